"""`offload runs`: which durable runs there are, and an end to those that nobody needs."""

import dataclasses
import errno
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from nvme_offload.offload.durable import inventory
from nvme_offload.offload.errors import StateError
from nvme_offload.offload.units import format_bytes
from ..measure.command_line import Json


def format_runs(found: Sequence[inventory.RunFound]) -> str:
    """Return a list of all runs as JSON."""
    more = {"step": "step", "alive": "is_alive", "size_bytes": "size_bytes", "committed_at": "committed_at"}
    said = [dataclasses.asdict(run) | {key: getattr(run, name) for key, name in more.items()} for run in found]
    return json.dumps(said, indent=2, default=str)


_HEADINGS = ("NAME", "MODEL", "STEP", "AGE", "BYTES", "RANKS", "STATE")
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
        "List durable runs, and remove them.\n\n"
        "A run is durable if its section sets `offload_optimizer.durable`. Its directories stay when it ends, however "
        "it ends. `offload runs PATH ...` lists runs."
    ),
)


@runs.command("list", epilog="Example: offload runs list /mnt/nvme0")
def list_runs(paths: Paths, as_json: Json = False) -> None:
    """List the durable runs below these folders. Nothing is changed, and a run that is alive is not disturbed."""
    found = _found(paths)
    if as_json:
        typer.echo(format_runs(found))
    else:
        typer.echo(_table(found) if found else "no durable runs")


@runs.command("remove", epilog="Example: offload runs remove my-run /mnt/nvme0")
def remove(
    name: Annotated[str, typer.Argument(help="Name of the run.")],
    paths: Paths,
    partly: Annotated[
        bool, typer.Option("--partly", help="Remove it, too, if some of its paths are not among these folders.")
    ] = False,
) -> None:
    """Delete a run. One that is alive is refused."""
    run = _named(name, paths)
    _check_paths(run, partly=partly)
    try:
        inventory.remove_run(run)
    except (StateError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(f"removed {name}: {format_bytes(run.size_bytes)} are free")


def _named(name: str, paths: Sequence[Path]) -> inventory.RunFound:
    run = next((run for run in _found(paths) if run.name == name), None)
    if run is None:
        raise typer.BadParameter(f"there is no durable run {name!r} below these folders", param_hint="NAME")
    return run


def _check_paths(run: inventory.RunFound, *, partly: bool) -> None:
    missing = [rank.copies for rank in run.ranks if rank.copies.num_missing]
    if missing and not partly:
        raise typer.BadParameter(
            f"{run.name!r} has {missing[0].num_paths} paths, and {len(missing[0].read_from)} of them are among these "
            "folders: name all, or say --partly",
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
