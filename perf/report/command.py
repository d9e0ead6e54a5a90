"""`offload report`: what a run did, as one page of HTML that needs nothing else."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from nvme_offload.offload.durable.rewrite_every import SECONDS_PER_DAY
from nvme_offload.offload.foreign import parse_json, printable, read_text
from nvme_offload.offload.units import TB, format_bytes, format_rate
from nvme_offload.optim.telemetry.run_record import KINDS, bytes_moved
from ..top.command import PARTS, NoRunError, RunOnShow, runs_of
from .charts import Series, bars, lines, stacks, timeline

NAME = "report.html"
SHOWN_MS = 3_000.0  # of the end of a trace
SPANS = {
    "forward": ("forward", "#bdb76b"),
    "backward": ("backward", "#756bb1"),
    "step": ("step()", "#8c6d31"),
    "norm": ("the norm", "#dd77aa"),
    "wait": ("waits", "#8b949e"),
    "read": ("state is read", "#3182bd"),
    "compute": ("is updated", "#e6550d"),
    "write": ("is written", "#31a354"),
    "commit": ("a commit", "#d62728"),
}
"""Kinds of spans in a trace: what they are called, and their colours."""
TONES = {"a": "#3182bd", "b": "#e6550d", "c": "#31a354", "d": "#756bb1", "e": "#8c6d31", "f": "#dd77aa"}
"""Colours of all else, by CSS class."""
STYLE = """
:root{color-scheme:light dark;--ink:#22272e;--paper:#fff;--line:#d0d7de}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--line:#30363d}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:1rem auto;max-width:60rem;
padding:0 1rem}svg{width:100%;display:block;border:1px solid var(--line)}figure{margin:0 0 1.5rem}
figure p{margin:.3rem 0 0}.tiles{display:flex;flex-wrap:wrap;gap:1rem;padding:0;list-style:none}
.tiles b{display:block;font-size:1.4rem}.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:0;
list-style:none}.legend i{display:inline-block;width:.9em;height:.9em;margin-right:.3em}
table{border-collapse:collapse;width:100%}th{text-align:left;font-weight:400}th,td{padding:.1rem .5rem .1rem 0}
.bars td:nth-child(2){width:60%}.bars td i{display:block;height:1em}polyline{stroke-width:2;
vector-effect:non-scaling-stroke}polyline+polyline{stroke-dasharray:7 5}.bars td:last-child{white-space:nowrap}
"""


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A file of run_log, a run directory, or a folder of either.")
    ],
    out: Annotated[Path | None, typer.Option(help="File to write.  [default: report.html in that folder]")] = None,
) -> None:
    """Write an HTML page about a run: timeline, bytes, waits, wear.

    It takes the records of `run_log`, or what a run directory has, and traces (`trace.json`, of `write_trace`) that lie
    in the same folder. The page needs no network.
    """
    folder = run if run.is_dir() else run.parent
    file = out or folder / NAME
    try:
        runs, problems = runs_of(run)
    except (NoRunError, OSError) as error:
        typer.echo(f"offload: {error}", err=True)
        raise typer.Exit(2) from None
    for problem in problems:
        typer.echo(f"offload: left out: {problem}", err=True)
    try:
        file.write_text(page(runs, sorted(folder.glob("*trace*.json"))), encoding="utf-8")
    except OSError as error:
        typer.echo(f"offload: {file}: {error.strerror}; name another file with --out", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"wrote {file}")


def page(runs: Sequence[RunOnShow], traces: Sequence[Path]) -> str:
    """Return the page, of each run a section; a trace that cannot be read says so there."""
    tones = TONES | {f"s-{kind}": tone for kind, (_, tone) in SPANS.items()}
    colours = "".join(f".{kind}{{fill:{tone};stroke:{tone};background:{tone}}}" for kind, tone in tones.items())
    parts = [part for run in runs for part in _of_run(run)] + [part for file in traces for part in _of_trace(file)]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    style = f"<style>{STYLE}{colours}rect,polygon{{stroke:none}}polyline{{fill:none!important}}</style>"
    return (
        f"<!doctype html><html lang=en>{head}<title>offload report</title>{style}<body>{''.join(parts)}</body></html>\n"
    )


def _of_run(run: RunOnShow) -> Iterator[str]:
    record, history = run.record, run.history
    scalars, elapsed = record["scalars"], max(1e-9, record["time"] - record["started"])
    title = "{optimizer}, rank {rank} of {world_size} on {host}".format(**record)
    yield f"<h1>{escape(title)}</h1>"
    written = bytes_moved(scalars, "written")
    share = scalars.get("iteration_share_of_ideal")
    tiles = {
        f"steps in {timedelta(seconds=round(elapsed))}": f"{scalars['steps']}",
        "of the ideal, the latest iteration": "-" if share is None else f"{share:.0%}",
        f"the most of its drive, by {record['engine']}": format_rate(record["peak_rate"]),
        "written": format_bytes(round(written)),
        "TB written in a day of this": f"{written / elapsed * SECONDS_PER_DAY / TB:.1f}",
    }
    items = (f"<li><b>{escape(value)}</b>{escape(words)}</li>" for words, value in tiles.items())
    yield f'<ul class="tiles">{"".join(items)}</ul>'
    spans = [(each["time"] - record["started"], each["since"], each["scalars"]) for each in history]
    known = [(at, since) for at, since, _ in spans if since and since["seconds"] > 0]
    if len(known) > 1:
        rates = [
            Series(words, kind, [since[f"bytes_{way}"] / since["seconds"] for _, since in known])
            for words, kind, way in (("read", "a", "read"), ("written", "b", "written"))
        ]
        most = max(value for each in rates for value in each.values)
        yield "<h2>Rates over time</h2>" + lines(
            [at for at, _ in known], rates, f"top: {format_rate(most)}", _width(known[0][0], known[-1][0])
        )
    yield from _iterations([(at, numbers) for at, _, numbers in spans if numbers.get("iteration_seconds")])
    moved = {
        f"{kind}, {way}": (colour, size, format_bytes(round(size)))
        for kind, prefix in KINDS.items()
        for way, colour in (("read", "a"), ("written", "b"))
        if (size := scalars.get(f"{prefix}bytes_{way}") or 0.0)
    }
    yield f"<h2>Bytes by kind</h2>{bars(moved)}" if moved else "<p>No byte has moved.</p>"
    if len(spans) > 1:
        worn = Series("written so far", "b", [bytes_moved(numbers, "written") for _, _, numbers in spans])
        yield "<h2>Wear</h2>" + lines(
            [at for at, *_ in spans], [worn], f"top: {format_bytes(round(written))}", _width(spans[0][0], spans[-1][0])
        )


def _iterations(found: Sequence[tuple[float, Mapping[str, Any]]]) -> Iterator[str]:
    """Give the seconds of iterations by where they went."""
    if len(found) < 2:
        return
    series = [
        Series(words, kind, [numbers.get(name) or 0.0 for _, numbers in found])
        for kind, (words, name) in zip(TONES, PARTS.items(), strict=True)
    ]
    most = max(sum(values) for values in zip(*(each.values for each in series), strict=True))
    times = [at for at, _ in found]
    yield "<h2>Where an iteration's time went</h2>"
    yield stacks(times, series, f"top: {most:.3g} s", _width(times[0], times[-1]))


def _width(first: float, last: float) -> str:
    return f"from {timedelta(seconds=round(first))} to {timedelta(seconds=round(last))} after the beginning"


def _of_trace(file: Path) -> Iterator[str]:
    """Give the end of a trace as lanes: whoever wrote the file, what is no event of ours is left out."""
    try:
        events = [each for each in parse_json(read_text(file))["traceEvents"] if isinstance(each, dict)]
        names = {each["tid"]: str(each["args"]["name"]) for each in events if each.get("ph") == "M"}
        ours = [each for each in events if each.get("ph") == "X" and each.get("cat") in SPANS]
        spans = [(each["tid"], each["cat"], each["ts"] / 1e3, (each["ts"] + each["dur"]) / 1e3) for each in ours]
    except (OSError, ValueError, LookupError, TypeError) as error:
        yield f"<p>{escape(printable(f'{file}: no trace of ours ({error!r})'))}</p>"
        return
    if not spans:
        return
    last = max(end for *_, end in spans)
    lanes = defaultdict[str, list[tuple[str, float, float]]](list)
    for track, kind, start, end in spans:
        if end >= last - SHOWN_MS:
            lanes[names.get(track, str(track))].append((f"s-{kind}", max(start, last - SHOWN_MS), end))
    shown = {kind[2:] for lane in lanes.values() for kind, *_ in lane}
    yield "<h2>Timeline</h2>"
    named = {f"s-{kind}": words for kind, (words, _) in SPANS.items() if kind in shown}
    yield timeline(
        lanes, named, f"the last {min(SHOWN_MS, last) / 1e3:.2f} s of {file.name}; all of it: ui.perfetto.dev"
    )
