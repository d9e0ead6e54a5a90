"""`offload runs`: which durable runs there are, and an end to those that nobody needs."""

import dataclasses
import errno
import json
import os
import time
from collections import ChainMap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from nvme_offload.offload.durable import inventory
from nvme_offload.offload.durable.owner import Owner
from nvme_offload.offload.errors import OffloadError, StateError
from nvme_offload.offload.foreign import COUNT, EACH, RANK, fits, parse_json, read_text
from nvme_offload.offload.units import format_bytes, parse_bytes
from nvme_offload.optim.checkpoint.committed_step import open_step
from nvme_offload.optim.checkpoint.run_export import export_checkpoint, export_weights
from ..measure.command_line import Json

_NAMES = [str]
_OWNER = {"pid": COUNT, "began": str, "host": str}
_COPIES = {"read_from": _NAMES, "others": _NAMES, "num_paths": COUNT}
_RANK: dict[str, Any] = {
    "rank": RANK,
    "folders": _NAMES,
    "copies": list,
    "steps": {EACH: COUNT},
    **dict.fromkeys(("snapshots", "prepared", "unreadable"), _NAMES),
    "committed_at": (float, type(None)),
    "model": str,
    "size_bytes": COUNT,
    "owner": (_OWNER, type(None)),
    "problem": str,
}
_RUN = {"name": str, "ranks": [_RANK], "num_ranks": RANK, "hosts": {EACH: str}}
"""A run is written so."""


def format_runs(found: Sequence[inventory.RunFound]) -> str:
    """Return a list of all runs as JSON, for `parse_runs` and for people."""
    more = {"step": "step", "alive": "is_alive", "size_bytes": "size_bytes", "committed_at": "committed_at"}
    said = [dataclasses.asdict(run) | {key: getattr(run, name) for key, name in more.items()} for run in found]
    return json.dumps(said, indent=2, default=str)


def parse_runs(text: str) -> list[inventory.RunFound]:
    """Return the runs of a list that `format_runs` made; ValueError where it is none."""
    runs = parse_json(text)
    if not fits(runs, [_RUN]) or not all(run["ranks"] for run in runs):
        raise ValueError("it has other names or values than a list of runs has")
    return [
        inventory.RunFound(run["name"], tuple(map(_rank_of, run["ranks"])), run["num_ranks"], run["hosts"])
        for run in runs
    ]


def _rank_of(said: dict[str, Any]) -> inventory.RankFound:
    copies = dict(zip(_COPIES, said["copies"], strict=False))
    if not (fits(copies, _COPIES) and copies["read_from"]):
        raise ValueError(f"its copies are {said['copies']}")
    owner = Owner(**{name: said["owner"][name] for name in _OWNER}) if said["owner"] else None
    return inventory.RankFound(
        **{**{name: said[name] for name in _RANK}, "copies": inventory.CopiesFound(**copies), "owner": owner}
    )


def joined(found: Sequence[inventory.RunFound]) -> list[inventory.RunFound]:
    """Return what several hosts found of each run as one; of a rank that several have, the last commit counts."""
    runs = []
    for name in sorted({run.name for run in found}):
        parts = [run for run in found if run.name == name]
        in_order = sorted((rank for part in parts for rank in part.ranks), key=lambda rank: rank.committed_at or 0.0)
        ranks = sorted({rank.rank: rank for rank in in_order}.items())
        num_ranks = max(part.num_ranks for part in parts)
        hosts = {**ChainMap(*(dict(part.hosts) for part in parts))}
        runs.append(inventory.RunFound(name, tuple(rank for _, rank in ranks), num_ranks, hosts))
    return runs


_HEADINGS = ("NAME", "MODEL", "STEP", "AGE", "BYTES", "RANKS", "STATE")
_SHOWN = 4
_OF_ITS_OWN = "; it writes its own: engine.export_safetensors(dir), engine.save_checkpoint(dir, background=True)"
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))

Paths = Annotated[list[Path], typer.Argument(metavar="PATH", help="Folders of nvme_path.")]


class _ListUnlessTold(TyperGroup):
    """`offload runs PATH` is `offload runs list PATH`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command in front that was left out."""
        known = [*self.commands, *ctx.help_option_names]
        return super().parse_args(ctx, args if args and args[0] in known else ["list", *args])


runs = typer.Typer(
    cls=_ListUnlessTold,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "List durable runs, export what they committed, remove them.\n\n"
        "A run is durable if its section sets `offload_optimizer.durable`. Its directories stay when it ends, however "
        "it ends. `offload runs PATH ...` lists runs. The model is not needed to export one."
    ),
)


@runs.command("list", epilog="Example: offload runs list /mnt/nvme0")
def list_runs(paths: Paths, as_json: Json = False) -> None:
    """List the durable runs below these folders. Nothing is changed, and a run that is alive is not disturbed.

    A PATH may also be a file that --json printed on another host: a run on several hosts is one line then.
    """
    listings = [path for path in paths if os.path.exists(path) and not os.path.isdir(path)]
    found = _found([path for path in paths if path not in listings])
    for listing in listings:
        try:
            found += parse_runs(read_text(listing))
        except (OSError, ValueError) as error:
            said = f"{listing} is not of `offload runs --json`: {error}"
            raise typer.BadParameter(said, param_hint="PATH") from error
    found = joined(found)
    if as_json:
        typer.echo(format_runs(found))
    else:
        typer.echo(_table(found) if found else "no durable runs")


@runs.command("remove", epilog="Example: offload runs remove my-run /mnt/nvme0")
def remove(
    name: Annotated[str, typer.Argument(help="Name of the run.")],
    paths: Paths,
    snapshot: Annotated[
        str | None, typer.Option("--snapshot", metavar="NAME", help="Remove this snapshot, and leave the run.")
    ] = None,
    partly: Annotated[
        bool, typer.Option("--partly", help="Remove it, too, if some of its paths are not among these folders.")
    ] = False,
) -> None:
    """Delete a run, or one snapshot of it. A run that is alive is refused."""
    run = _named(name, paths, snapshot)
    _check_paths(run, partly=partly)
    try:
        if snapshot is None:
            inventory.remove_run(run)
            done = f"removed {name}: {format_bytes(run.size_bytes)} are free"
        else:
            inventory.remove_snapshot(run, snapshot)
            done = f"removed snapshot {snapshot} of {name}: its next process uses the space"
    except (StateError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(done)


@runs.command("export", epilog="Example: offload runs export my-run weights /mnt/nvme0 --dtype bf16")
def export(
    name: Annotated[str, typer.Argument(help="Name of the run.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write to, new or empty.")],
    paths: Paths,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", help="Step to export, which the run still holds.  [default: the newest that all ranks have]"
        ),
    ] = None,
    snapshot: Annotated[
        str | None, typer.Option("--snapshot", metavar="NAME", help="Snapshot to export, in place of a step.")
    ] = None,
    what: Annotated[
        Literal["weights", "checkpoint"],
        typer.Option("--what", help="Weights alone, or a checkpoint that `load_checkpoint` takes."),
    ] = "weights",
    dtype: Annotated[
        str, typer.Option("--dtype", help="Dtype of weights: fp32, bf16, fp16, or own (that of the forward).")
    ] = "fp32",
    max_shard: Annotated[str, typer.Option("--max-shard", metavar="BYTES", help="Most bytes of one file.")] = "1GiB",
    partly: Annotated[
        bool, typer.Option("--partly", help="Export a run although it keeps no frozen parameters: they are left out.")
    ] = False,
) -> None:
    """Write a committed step as safetensors, or as a checkpoint.

    It does not need the model. Weights are in the layout of Hugging Face.

    Every byte is verified. Nothing of the run is changed, and one that is alive is refused.
    """
    run = _named(name, paths, snapshot)
    _check_paths(run)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise typer.BadParameter(f"{folder} is there and is no empty folder: name a new one", param_hint="FOLDER")
    if snapshot is not None and step is not None:
        raise typer.BadParameter("a snapshot is of one step: leave out --step", param_hint="--snapshot")
    try:
        with open_step(run, step=step, snapshot=snapshot) as committed:
            if what == "checkpoint":
                files = [*export_checkpoint(committed, folder).iterdir()]
            else:
                missing = [] if partly else committed.missing
                if missing:
                    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
                    raise ValueError(
                        f"{committed.name!r} does not keep {', '.join(missing[:_SHOWN])}{more}: parameters that were "
                        "always frozen are no state. Say --partly to have all others, and take these from where the "
                        "training had them"
                    )
                files = export_weights(committed, folder, dtype, parse_bytes(max_shard))
            size_bytes = sum(file.stat().st_size for file in files)
            typer.echo(f"exported step {committed.step} of {name}: {format_bytes(size_bytes)} in {len(files)} file(s)")
    except (OffloadError, OSError, ValueError) as error:
        typer.echo(f"{error}{_OF_ITS_OWN if run.is_alive and isinstance(error, StateError) else ''}", err=True)
        raise typer.Exit(1) from error


def _named(name: str, paths: Sequence[Path], snapshot: str | None) -> inventory.RunFound:
    run = next((run for run in _found(paths) if run.name == name), None)
    if run is None:
        raise typer.BadParameter(f"there is no durable run {name!r} below these folders", param_hint="NAME")
    if snapshot is not None and snapshot not in run.snapshots:
        there = ", ".join(run.snapshots) or "none"
        raise typer.BadParameter(f"{name!r} has no snapshot {snapshot!r}; there are: {there}", param_hint="--snapshot")
    return run


def _check_paths(run: inventory.RunFound, *, partly: bool | None = None) -> None:
    missing = [rank.copies for rank in run.ranks if rank.copies.num_missing]
    if missing and not partly:
        raise typer.BadParameter(
            f"{run.name!r} has {missing[0].num_paths} paths, and {len(missing[0].read_from)} of them are among these "
            f"folders: name all{'' if partly is None else ', or say --partly'}",
            param_hint="PATH",
        )


def _found(folders: Sequence[Path]) -> list[inventory.RunFound]:
    here, lost = inventory.without_lost(folders)
    if missing := [str(error.path) for error in lost if error.errno in (errno.ENOENT, errno.ENOTDIR)]:
        what = "is no directory: name a folder that a section has as nvme_path"
        raise typer.BadParameter(f"{', '.join(missing)} {what}", param_hint="PATH")
    if lost and not here:
        raise typer.BadParameter(str(lost[0]), param_hint="PATH") from lost[0]
    for error in lost:
        typer.echo(f"offload: left out: {error}", err=True)
    return inventory.find_runs(here)


def _table(found: Sequence[inventory.RunFound]) -> str:
    rows = [_HEADINGS, *(_row(run) for run in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    below = [[], *([f"  {said}" for said in _said(run)] for run in found)]
    return "\n".join(line for own, its in zip(lines, below, strict=True) for line in (own, *its))


def _row(run: inventory.RunFound) -> tuple[str, ...]:
    ranks = [rank.rank for rank in run.ranks]
    here = f"rank {ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}..{ranks[-1]}"
    owners = [rank.owner for rank in run.ranks if rank.owner]
    seconds = time.time() - (run.committed_at or 0.0)
    age = next((f"{int(seconds // size)} {unit}" for unit, size in _UNITS if seconds >= size), "0 s")
    return (
        run.name,
        next((rank.model for rank in run.ranks if rank.model), "-"),
        "-" if run.step is None else str(run.step),
        "-" if run.committed_at is None else age,
        format_bytes(run.size_bytes),
        f"{here} of {run.num_ranks}" if len(ranks) < run.num_ranks else str(len(ranks)),
        f"alive ({owners[0]})" if owners else "not alive",
    )


def _said(run: inventory.RunFound) -> list[str]:
    said = [f"rank {rank.rank}: {rank.problem}" for rank in run.ranks if rank.problem]
    if run.missing:
        said.append(f"no directory of ranks {run.missing} is here")
    if run.step is None:
        committed = any(rank.steps for rank in run.ranks)
        said.append("there is no step that all of these ranks have" if committed else "nothing was committed")
    for rank in run.ranks:
        first, num_copies = rank.copies.read_from[0], len(rank.folders) // len(rank.copies.read_from)
        if num_copies > 1:
            said.append(f"rank {rank.rank}: {rank.copies.num_whole} of {num_copies} copies whole, read from {first}")
    if run.snapshots:
        said.append(f"snapshots: {', '.join(run.snapshots)}")
    for rank in run.ranks:
        lacking = [name for name in run.snapshots if name not in (*rank.snapshots, *rank.prepared, *rank.unreadable)]
        said += [f"rank {rank.rank}: has no snapshot {name}, and another rank has" for name in lacking]
        said += [f"rank {rank.rank}: the file of snapshot {name} is damaged" for name in rank.unreadable]
    return said
