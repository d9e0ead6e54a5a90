"""`offload top`: watch a run, while it goes on and afterwards."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import sys
import termios
import time
import tty
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nvme_offload.offload.durable import directory as durable
from nvme_offload.offload.durable.rewrite_every import SECONDS_PER_DAY
from nvme_offload.offload.foreign import COUNT, EACH, fits, printable
from nvme_offload.offload.host.proc import PROC
from nvme_offload.offload.storage.run_directory import PREFIX, RECORD_NAME
from nvme_offload.offload.storage.tier_plan import TIERS
from nvme_offload.offload.units import TB, format_bytes, format_rate
from nvme_offload.optim.telemetry.run_record import KINDS, bytes_moved, read_records
from ..measure.results import figures

PARTS = {
    "computing": "iteration_compute_seconds",
    "waiting for the drive": "iteration_wait_seconds_drive",
    "waiting for a staging buffer": "iteration_wait_seconds_staging_buffers",
    "waiting for an update": "iteration_wait_seconds_kernel",
    "updating in step()": "iteration_kernel_seconds",
    "the norm": "iteration_norm_seconds",
}
"""An iteration's seconds went to these, with the scalar that has each."""
STEP_HEAD = ("a step, by kind", "read", "written", "tier plan: read", "written")
BAR = 20  # characters of a bar, at least
BESIDE_BAR = 60  # characters of a line that are no bar: borders, words, a figure, and what stands behind
WHOLE_LINES = 30  # of a terminal that shows all of a run with every kind on a drive
MOST_KINDS = 2  # that a shorter one shows beside the history
HISTORY = 8192  # records of a run that are kept for its history; a day of a log has some 6000
LEVELS = "▁▂▃▄▅▆▇█"
_STYLES: dict[State, str] = {"live": "green", "ended": "cyan", "gone": "red", "unknown": "yellow"}
NOTHING_YET = "a run has begun here and has not ended a step yet"
PREFIXES = (PREFIX, durable.PREFIX)
"""Run directories begin with these: of runs that end with their process, and of durable ones."""
State = Literal["live", "ended", "gone", "unknown"]

_NONE = type(None)
_SHAPE: Mapping[str, Any] = {
    **dict.fromkeys(("host", "optimizer", "engine"), str),
    **dict.fromkeys(("pid", "rank", "world_size"), COUNT),
    **dict.fromkeys(("started", "time", "peak_rate"), float),
    "queue_depth": range(1, COUNT.stop),
    "ended": bool,
    "limit": (str, _NONE),
    "tiers": {EACH: dict.fromkeys(TIERS, COUNT)},
    "planned": ({EACH: {EACH: float}}, _NONE),
    "paths": [str],
    "since": (dict.fromkeys(("seconds", "steps", "drive_busy_seconds", "bytes_read", "bytes_written"), float), _NONE),
    "scalars": {"steps": COUNT, "achieved_depth": float, EACH: (float, _NONE)},
}
"""The fields of a record that are shown, and what each must be."""
_LATEST = 1e11  # in seconds since the epoch; no calendar goes further


def view(run: RunOnShow, now: float, *, lines: int | None = None, width: int = 80) -> RenderableType:
    """Show one run at a moment, in seconds since the epoch.

    `lines` and `width`: those of the terminal. With fewer lines than `WHOLE_LINES` it is not shown where everything is,
    which stays, nor what was before, where three kinds move.
    """
    record, room = run.record, max(BAR, width - BESIDE_BAR)
    parts = [_now(record, run.free_bytes, room), _iteration(record["scalars"], record["limit"], room)]
    moved, is_whole = _step_rows(record), lines is None or lines >= WHOLE_LINES
    if len(run.history) > 1 and (is_whole or len(moved) <= MOST_KINDS):
        parts.append(_history(run.history, room))
    if moved:
        parts.insert(0, _table(STEP_HEAD, moved))
    if is_whole:
        parts.insert(0, _tiers(record["tiers"]))
    title = "{optimizer}, rank {rank} of {world_size}, pid {pid} on {host}".format(**record)
    return Panel(Group(*parts), title=Text(title), title_align="left", subtitle=_state(run, now), subtitle_align="left")


def _state(run: RunOnShow, now: float) -> Text:
    record, state = run.record, run.state
    noted = f"noted {max(0.0, now - record['time']):.0f} s ago"
    last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))
    words = {"live": f"live, {noted}", "ended": f"ended {last}", "gone": f"gone, last heard of {last}"}
    elapsed = timedelta(seconds=round(record["time"] - record["started"]))
    head = f"{record['scalars']['steps']} steps in {elapsed}, "
    return Text.assemble(head, (words.get(state, f"on another host, {noted}"), _STYLES[state]))


def _tiers(tiers: Mapping[str, Mapping[str, int]]) -> Table:
    rows = (
        [kind, *(format_bytes(sizes[tier]) if sizes[tier] else "" for tier in TIERS)] for kind, sizes in tiers.items()
    )
    return _table(("where", *TIERS), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = figures(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def _step_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Return a row below `STEP_HEAD` for each kind that a mean step has moved, or that the tier plan lets it move.

    The tier plan takes the micro-batches of a step as `engine.accumulate` does, and counts nothing as found in a
    staging buffer.
    """
    scalars, planned, rows = record["scalars"], record.get("planned") or {}, list[list[str]]()
    for kind, prefix in KINDS.items():
        moved = [scalars.get(f"{prefix}bytes_{way}", 0) / max(1, scalars["steps"]) for way in ("read", "written")]
        moved += [planned[kind].get(way, 0) for way in ("read", "written") if kind in planned]  # else no cell
        if any(moved):
            rows.append([kind, *(format_bytes(round(size)) for size in moved)])
    return rows


def _now(record: Mapping[str, Any], free_bytes: int | None, room: int) -> Table:
    since, table = record["since"], _grid(room)
    scalars = record["scalars"]
    if since and since["seconds"] > 0:
        seconds, busy = since["seconds"], since["drive_busy_seconds"]
        moved = since["bytes_read"] + since["bytes_written"]
        most = record["peak_rate"]
        rate = moved / busy if busy else 0.0
        table.add_row("read", format_rate(since["bytes_read"] / seconds))
        table.add_row("written", format_rate(since["bytes_written"] / seconds))
        table.add_row("rate while busy", format_rate(rate), _bar(rate / most if most else 0.0, room))
        if most:
            table.add_row("  the most in this run", format_rate(most))
        table.add_row("busy, of the time", f"{busy / seconds:.0%}", _bar(busy / seconds, room))
    depth, most = scalars["achieved_depth"], record["queue_depth"]
    table.add_row(f"depth, of {most}", f"{depth:.1f}", _bar(depth / most, room), record["engine"])
    written, elapsed = bytes_moved(scalars, "written"), record["time"] - record["started"]
    a_day = f"{written / elapsed * SECONDS_PER_DAY / TB:.3g} TB a day" if elapsed > 0 else ""
    table.add_row("written by this run", format_bytes(round(written)), a_day)
    committed, free = scalars.get("committed_step"), "" if free_bytes is None else format_bytes(free_bytes)
    if committed is not None:
        table.add_row("committed step, free space", f"{committed:.0f}", free)
    elif free:
        table.add_row("free on the drive", free)
    return table


def _history(history: Sequence[Mapping[str, Any]], room: int) -> Table:
    """Return two lines, as wide as there is room: bytes a second, and seconds of a step, from the first to the last."""
    spans = [each["since"] for each in history if each["since"] and each["since"]["seconds"] > 0][-room:]
    rates = [(since["bytes_read"] + since["bytes_written"]) / since["seconds"] for since in spans]
    steps = [since["seconds"] / since["steps"] for since in spans if since["steps"] > 0]
    table = _grid(room)
    for words, values, most in (("rate", rates, format_rate), ("seconds of a step", steps, _seconds)):
        if values:
            table.add_row(f"{words}, the most", most(max(values)), _line(values))
    return table


def _line(values: Sequence[float]) -> str:
    highest, top = max(values) or 1.0, len(LEVELS) - 1
    return "".join(LEVELS[min(top, max(0, round(top * value / highest)))] for value in values)


def _iteration(scalars: Mapping[str, float | None], limit: str | None, room: int) -> RenderableType:
    seconds, share = scalars.get("iteration_seconds"), scalars.get("iteration_share_of_ideal")
    if seconds is None or share is None:
        return Text("no iteration yet")
    table = _grid(room)
    table.add_row("iteration", _seconds(seconds), f"limited by {limit}")
    table.add_row("share of the ideal", f"{share:.0%}", _bar(share, room))
    for words, name in PARTS.items():
        part = scalars.get(name) or 0.0
        table.add_row(f"  {words}", _seconds(part), _bar(part / seconds if seconds else 0.0, room))
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _grid(room: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(width=30)
    table.add_column(justify="right", width=12)
    table.add_column(width=room)
    table.add_column(width=8)
    return table


def _bar(share: float, room: int) -> Text:
    full = round(room * min(1.0, max(0.0, share)))
    return Text.assemble(("█" * full, "green"), ("░" * (room - full), "dim"))


def top(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory, the file of run_log, or a folder of either.")
    ],
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option(help="Look once, also on a terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the latest records as lines of JSON.")] = False,
) -> None:
    """Watch a run: its bytes, rates and waits.

    On a terminal it is live until the run ends or you type q; before the first step it waits. Without a terminal it
    looks once. Nothing of the run is touched.
    """
    console = Console(highlight=False, markup=False)
    is_live = console.is_terminal and not once and not as_json
    found, problems = list[RunOnShow](), list[str]()
    try:
        found, problems = runs_of(run)
    except (NoRunError, OSError) as error:
        if not (is_live and isinstance(error, NoRunError) and error.has_begun):
            typer.echo(f"offload: {error}", err=True)
            raise typer.Exit(2) from None
    for problem in problems:
        typer.echo(f"offload: left out: {problem}", err=True)
    if as_json:
        for each in found:
            typer.echo(json.dumps(each.record))
    elif is_live:
        _watch(run, found, interval, console)
    else:
        console.print(_page(found, console.width))


def _page(runs: list[RunOnShow], width: int, lines: int | None = None) -> RenderableType:
    now = time.time()
    shown = [*_together(runs), *(view(run, now, lines=lines, width=width) for run in runs)]
    return Group(*shown) if shown else Text(f"{NOTHING_YET}; q ends")


def _together(runs: list[RunOnShow]) -> Iterator[Text]:
    of_runs = defaultdict[tuple[str, int], dict[int, Mapping[str, Any]]](dict)
    for record in sorted((run.record for run in runs), key=lambda record: record["time"]):
        of_runs[record["optimizer"], record["world_size"]][record["rank"]] = record
    for (optimizer, size), ranks in of_runs.items():
        if len(ranks) > 1:
            numbers = ", ".join(map(str, sorted(ranks)))
            hosts = ", ".join(sorted({str(record["host"]) for record in ranks.values()}))
            rates = [_rate(ranks.values(), f"bytes_{way}") for way in ("read", "written")]
            steps = min(record["scalars"]["steps"] for record in ranks.values())
            head = f"{optimizer}, ranks {numbers} of {size} on {hosts}: {steps} steps"
            yield Text(f"{head}, reads {rates[0]}, writes {rates[1]}")


def _rate(records: Iterable[Mapping[str, Any]], name: str) -> str:
    """Return what ranks have moved a second since the records before, in all."""
    since = [record["since"] for record in records if record["since"] and record["since"]["seconds"] > 0]
    return format_rate(sum(each[name] / each["seconds"] for each in since))


def _watch(path: Path, runs: list[RunOnShow], interval: float, console: Console) -> None:
    """Look again and again, until every run is over or the user types q or Ctrl-C; those that are gone stay as last."""
    with (
        suppress(KeyboardInterrupt),
        Live(_page(runs, console.width, console.height), console=console, auto_refresh=False) as live,
        Keyboard() as keyboard,
    ):
        while not runs or not all(run.is_over for run in runs):
            if keyboard.typed(interval) == "q":
                break
            found = dict[Any, RunOnShow]()
            with suppress(NoRunError, OSError):
                found = {run.key: run for run in runs_of(path, 1)[0]}
            runs = [run.then(found.pop(run.key, None)) for run in runs] + list(found.values())
            live.update(_page(runs, console.width, console.height), refresh=True)


class Keyboard:
    """A terminal as standard input gives one key at a time and does not show it."""

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
        if self._before is not None:
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def typed(self, seconds: float) -> str:
        """Wait for a key for so long: the key, or an empty string."""
        if self._before is None:
            time.sleep(seconds)
        elif select.select([sys.stdin], [], [], seconds)[0]:
            return os.read(sys.stdin.fileno(), 1).decode(errors="replace")
        return ""


class NoRunError(RuntimeError):
    """There is nothing to watch at a place; the message says what there is, and what to do."""

    def __init__(self, message: str, *, has_begun: bool = False) -> None:
        super().__init__(message)
        self.has_begun = has_begun  # whether a run is there that will have something to watch


@dataclass(frozen=True)
class RunOnShow:
    """The latest record of a run."""

    record: dict[str, Any]
    is_there: bool = True  # whether its file still is
    history: tuple[dict[str, Any], ...] = ()  # records up to that one, as far as they are known

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what tells it from other runs."""
        return self.record["host"], self.record["pid"], self.record["started"]

    @property
    def state(self) -> State:
        """`gone`: it ended without a word here. `unknown`: on another host, or in another container."""
        if self.record["ended"]:
            return "ended"
        if not self.is_there:
            return "gone"
        if self.record["host"] != socket.gethostname():
            return "unknown"
        return "live" if (PROC / str(self.record["pid"])).exists() else "gone"

    def then(self, now: Self | None) -> Self:
        """Return how the run is now, with what was seen before; None: its file is gone."""
        if now is None:
            return replace(self, is_there=False)
        later = (each for each in now.history if each["time"] > self.record["time"])
        return replace(now, history=(*self.history, *later)[-HISTORY:])

    @property
    def free_bytes(self) -> int | None:
        """Free bytes of the drives that it uses, where it goes on and they are this host's."""
        if self.state != "live":
            return None
        with suppress(OSError, TypeError):
            free = {os.stat(path).st_dev: shutil.disk_usage(path).free for path in self.record["paths"]}
            return sum(free.values()) or None
        return None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.state in ("ended", "gone")


def runs_of(path: Path, most: int = HISTORY) -> tuple[list[RunOnShow], list[str]]:
    """The runs at a path: a log, a run directory, or a folder with run directories or logs of ranks in it.

    Each has so many records of its history at most. Also says what else is there and cannot be read. NoRunError: there
    is no run.
    """
    if path.is_dir():
        own = path / RECORD_NAME
        below = sorted(file for prefix in PREFIXES for file in path.glob(f"{prefix}*/{RECORD_NAME}"))
        files = [own] if own.exists() else below or sorted(path.glob("*.jsonl"))
        if not files:
            has_begun = any(any(path.glob(prefix + "*")) for prefix in PREFIXES) or (path / "lock").exists()
            elsewhere = f"{path} holds no run: name the nvme_path of a run that goes on, or the file of its run_log"
            raise NoRunError(f"{path}: {NOTHING_YET}" if has_begun else elsewhere, has_begun=has_begun)
    elif path.exists():
        files = [path]
    else:
        last = "the record of a run goes with its run directory; the file of run_log in its section stays"
        raise NoRunError(f"{path} is not there: {last}")
    runs, problems = list[RunOnShow](), list[str]()
    for file in files:
        try:
            if records := [_checked(file, record) for record in read_records(file)[-most:]]:
                runs.append(RunOnShow(records[-1], history=tuple(records)))
        except FileNotFoundError:
            pass  # it ended at this moment
        except OSError as error:
            problems.append(printable(f"{file}: {error.strerror}"))
        except ValueError as error:
            problems.append(printable(str(error)))
    if not runs:
        raise NoRunError(problems[0] if problems else f"{path}: {NOTHING_YET}", has_begun=not problems)
    return runs, problems


def _checked(file: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return a record that can be shown; ValueError names the fields that cannot."""
    wrong = [name for name, shape in _SHAPE.items() if not fits(record.get(name), shape)]
    wrong = wrong or [name for name in ("started", "time") if not 0 <= record[name] < _LATEST]
    if wrong:
        raise ValueError(f"{file}: not what a run notes of itself, by its {', '.join(wrong)}")
    return record
