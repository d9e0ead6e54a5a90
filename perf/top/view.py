"""A run on a screen."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nvme_offload.offload.storage.tier_plan import TIERS
from nvme_offload.offload.units import TB, format_bytes, format_rate
from nvme_offload.perf.measure.drives import Drive, drive_of, temperature
from nvme_offload.perf.measure.health import Health, HealthError, read_health
from nvme_offload.perf.report.run import PARTS
from nvme_offload.perf.top.runs import Run, State

BAR = 24
"""Characters of a bar."""
HEALTH_SECONDS = 60
"""How long what SMART said is shown: to ask costs a process, and wear is slow."""
_STYLES: dict[State, str] = {"live": "green", "ended": "cyan", "gone": "red", "unknown": "yellow"}


class DriveTable:
    """What is known of drives beside the run's own record; keeps what SMART said for a while."""

    def __init__(self) -> None:
        self._health: dict[str, tuple[float, Health | None]] = {}

    def rows(self, paths: list[str]) -> Iterator[tuple[str, ...]]:
        """Path, drive, temperature, endurance used and bytes written in its life, for each disk under a path."""
        for path in paths:
            drive = drive_of(Path(path))
            for disk in drive.disks if drive else ():
                yield path, _name(drive, disk), *self._state_of(disk)

    def _state_of(self, disk: str) -> tuple[str, str, str]:
        warmth, health = temperature(disk), self._asked(disk)
        if warmth is None and health is not None:
            warmth = health.temperature
        return (
            "-" if warmth is None else f"{warmth:.0f} °C",
            "-" if health is None else f"{health.percent_used} %",
            "-" if health is None else f"{health.bytes_written / TB:.1f} TB",
        )

    def _asked(self, disk: str) -> Health | None:
        asked, health = self._health.get(disk, (float("-inf"), None))
        if time.monotonic() - asked >= HEALTH_SECONDS:
            try:
                health = read_health(disk)
            except HealthError:
                health = None  # doctor says why
            self._health[disk] = time.monotonic(), health
        return health


def _name(drive: Drive | None, disk: str) -> str:
    return f"{disk} ({drive.model})" if drive and drive.model and disk == drive.name else disk


def view(run: Run, limit: float | None, drives: DriveTable, now: float) -> RenderableType:
    """One run.

    Args:
        run: its latest record.
        limit: bytes per second that its drives reach reading and writing at once; None: the most that the run has seen.
        drives: what else is known of them.
        now: seconds since the epoch.
    """
    record = run.record
    parts = [_tiers(record["tiers"]), _now(record, limit), _iteration(record["scalars"], record["limit"])]
    rows = list(drives.rows(record["paths"]))
    if rows:
        parts.append(_drives(rows))
    return Panel(Group(*parts), title=_title(run, now), title_align="left")


def _title(run: Run, now: float) -> Text:
    record, state = run.record, run.state
    words = {
        "live": f"live, noted {max(0.0, now - record['time']):.0f} s ago",
        "ended": f"ended {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(record['time']))}",
        "gone": f"gone, last heard of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(record['time']))}",
        "unknown": f"on another host, noted {max(0.0, now - record['time']):.0f} s ago",
    }[state]
    elapsed = timedelta(seconds=round(record["time"] - record["started"]))
    head = (
        f"{record['optimizer']}, rank {record['rank']} of {record['world_size']}, pid {record['pid']} on "
        f"{record['host']}: {record['scalars']['steps']} steps in {elapsed}, "
    )
    return Text.assemble(head, (words, _STYLES[state]))


def _tiers(tiers: Mapping[str, Mapping[str, int]]) -> Table:
    table = Table("where", *TIERS, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, sizes in tiers.items():
        table.add_row(kind, *(format_bytes(sizes[tier]) if sizes[tier] else "" for tier in TIERS))
    return table


def _now(record: Mapping[str, Any], limit: float | None) -> Table:
    """Rates since the record before."""
    since, table = record["since"], _grid()
    scalars = record["scalars"]
    if since and since["seconds"] > 0:
        seconds, busy = since["seconds"], since["drive_busy_seconds"]
        moved = since["bytes_read"] + since["bytes_written"]
        of = limit or record["peak_rate"]
        rate = moved / busy if busy else 0.0
        table.add_row("read", format_rate(since["bytes_read"] / seconds), "")
        table.add_row("written", format_rate(since["bytes_written"] / seconds), "")
        whose = "of what bench measured" if limit else "of the most in this run"
        share = f"{rate / of:.0%} {whose}, {format_rate(of)}" if of else ""
        table.add_row("rate while busy", format_rate(rate), _bar(rate / of if of else 0.0), share)
        table.add_row("busy", f"{busy / seconds:.0%}", _bar(busy / seconds), "of the time")
    table.add_row("depth", f"{scalars['achieved_depth']:.1f}", "", f"of {record['queue_depth']}, {record['engine']}")
    total = scalars["bytes_written"] + scalars["param_bytes_written"] + scalars["grad_bytes_written"]
    table.add_row("written by this run", format_bytes(total), "")
    return table


def _iteration(scalars: Mapping[str, float | None], limit: str | None) -> RenderableType:
    seconds, share = scalars["iteration_seconds"], scalars["iteration_share_of_ideal"]
    if seconds is None or share is None:
        return Text("no iteration yet")
    table = _grid()
    table.add_row("iteration", f"{seconds:.3g} s", "", f"limited by: {limit}")
    table.add_row("share of the ideal", f"{share:.0%}", _bar(share))
    for words, name in PARTS.items():
        part = scalars[name] or 0.0
        table.add_row(f"  {words}", f"{part:.3g} s", _bar(part / seconds if seconds else 0.0))
    return table


def _drives(rows: list[tuple[str, ...]]) -> Table:
    table = Table("path", "drive", "temperature", "endurance used", "written in its life", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def _grid() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(width=30)
    table.add_column(justify="right", width=11)
    table.add_column(width=BAR)
    table.add_column()
    return table


def _bar(share: float) -> Text:
    full = round(BAR * min(1.0, max(0.0, share)))
    return Text.assemble(("█" * full, "green"), ("░" * (BAR - full), "dim"))
