"""`offload report`: a page of HTML about a run or a benchmark."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from nvme_offload.offload.storage.tier_plan import TIERS
from nvme_offload.offload.units import GB, TB, format_bytes, format_rate
from nvme_offload.optim.telemetry.run_record import KINDS, bytes_read, bytes_written, read_records
from nvme_offload.perf.measure.command_line import failures_in_words
from nvme_offload.perf.report.bench import bench_page
from nvme_offload.perf.report.page import Line, bar_chart, line_chart, page, section, sentences, table

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
Records = Sequence[Mapping[str, Any]]


def report(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file of run_log, or what offload bench --json printed or saved.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="By default FILE with the ending .html.")
    ] = None,
) -> None:
    """Write a page of HTML about a run or a benchmark.

    The page stands alone: it needs no network, and holds the numbers that its pictures were drawn from.
    """
    target = file.with_suffix(".html") if output is None else output
    try:
        text = page_of(file)
    except FileNotFoundError:
        what = "there is no such file; name that of run_log in the section, or of what offload bench --json printed"
        typer.echo(f"offload: {file}: {what}", err=True)
        raise typer.Exit(2) from None
    except (OSError, ValueError) as error:
        typer.echo(f"offload: {error}", err=True)
        raise typer.Exit(2) from None
    with failures_in_words():
        target.write_text(text, encoding="utf-8")
    typer.echo(f"saved {target}", err=True)


def page_of(file: Path) -> str:
    """The page of a file."""
    with suppress(ValueError):  # several lines: perhaps a log
        document = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(document, dict) and {"config", "environment", "engine", "results"} <= document.keys():
            return bench_page(document)
    if not (records := read_records(file)):
        raise ValueError(f"{file}: nothing is noted yet; a run writes its first line in the first step after a second")
    return run_page(records)


def run_page(records: Records) -> str:
    """The page of a run whose records these are, at least one, by time."""
    last = records[-1]
    title = f"{last['optimizer']}: {last['scalars']['steps']} steps on {last['host']}"
    rows = [
        [kind, *(format_bytes(sizes[tier]) if sizes[tier] else "" for tier in TIERS)]
        for kind, sizes in last["tiers"].items()
    ]
    sections = [
        section("In short", sentences(_summary(records))),
        section("Where the bytes are", table(["what", *TIERS], rows)),
    ]
    if moved := step_rows(last):
        sections.append(section("What a step moves, mean", table(STEP_HEAD, moved)))
    if len(records) > 1:
        sections.append(section("Over time", *_pictures(records)))
    found = {words: _values(records, name) for words, name in PARTS.items()}
    if all(found.values()):
        parts = {words: median(values) for words, values in found.items()}
        words = "What the seconds of an iteration went to, median"
        sections.append(section("An iteration", bar_chart(words, parts, "s")))
    footer = [
        f"rank {last['rank']} of {last['world_size']}, pid {last['pid']} on {last['host']}, engine {last['engine']}, "
        f"paths {', '.join(last['paths']) or 'none'}",
        f"noted {_date(records[0]['time'])} to {_date(last['time'])}{'' if last['ended'] else ', not ended there'}",
    ]
    return page(title, sections, footer, list(records))


def step_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Return a row below `STEP_HEAD` for each kind that a mean step has moved, or that the tier plan lets it move.

    The tier plan takes the micro-batches of a step one after the other, but where the section says "vertical", and
    counts nothing as found in a staging buffer.
    """
    scalars, planned, rows = record["scalars"], record.get("planned", {}), list[list[str]]()
    for kind, prefix in KINDS.items():
        moved = [scalars.get(f"{prefix}bytes_{way}", 0) / max(1, scalars["steps"]) for way in ("read", "written")]
        moved += [planned.get(kind, {}).get(way, 0) for way in ("read", "written")]
        if any(moved):
            rows.append([kind, *(format_bytes(round(size)) for size in moved)])
    return rows


def _summary(records: Records) -> list[str]:
    last = records[-1]
    scalars = last["scalars"]
    elapsed = last["time"] - last["started"]
    read, written = bytes_read(scalars), bytes_written(scalars)
    shares = _values(records, "iteration_share_of_ideal")
    lines = [
        f"{scalars['steps']} steps in {timedelta(seconds=round(elapsed))}, {scalars['skipped_steps']} skipped",
        f"{format_bytes(round(read))} read, {format_bytes(round(written))} written; "
        f"{written / TB * 86400 / elapsed if elapsed else 0.0:.3g} TB written per day",
        f"busy {scalars['drive_busy_seconds'] / elapsed if elapsed else 0.0:.0%} of the time; at most "
        f"{format_rate(last['peak_rate'])} while busy; {scalars['achieved_depth']:.1f} requests in flight of "
        f"{last['queue_depth']}",
    ]
    if shares:
        lines.append(f"{median(shares):.0%} of the ideal, median; latest iteration limited by: {last['limit']}")
    return lines


def _pictures(records: Records) -> list[str]:
    """Rates between two records, and how near iterations came to the ideal."""
    pairs = [(early, late) for early, late in pairwise(records) if late["time"] > early["time"]]
    started = records[0]["started"]
    when = [late["time"] - started for _, late in pairs]

    def rate(of: Any) -> list[float]:
        return [(of(b["scalars"]) - of(a["scalars"])) / (b["time"] - a["time"]) / GB for a, b in pairs]

    def gauge(name: str, factor: float = 1.0) -> list[float]:
        found = (late["scalars"][name] for _, late in pairs)
        return [math.nan if value is None else value * factor for value in found]

    moved = [Line("read", rate(bytes_read)), Line("written", rate(bytes_written))]
    longest = [Line("all of it", gauge("iteration_seconds"))]
    longest += [Line(words, gauge(PARTS[words])) for words in ("computing", "waiting for the drive")]
    return [
        line_chart("Moved to and from the drive", when, moved, "GB/s"),
        line_chart("Share of the ideal", when, [Line("share", gauge("iteration_share_of_ideal", 100.0))], "%"),
        line_chart("Iterations", when, longest, "s"),
        line_chart("Requests in flight", when, [Line("mean since the beginning", gauge("achieved_depth"))], ""),
    ]


def _values(records: Records, name: str) -> list[float]:
    return [value for record in records if (value := record["scalars"][name]) is not None]


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
