"""The README's picture of an iteration of `make demo`: `python -m scripts.readme_timeline TRACE.json [RESULT]`.

It goes to docs/pictures/timeline.svg: what training, the drive and the updates did, subgroup by subgroup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from math import floor, log10
from pathlib import Path
from typing import Any, NamedTuple

from scripts.picture import LANES, PICTURES, SPANS, WIDTH, Picture

Interval = tuple[float, float]
PICTURE = PICTURES / "timeline.svg"
LEFT, ROW = 106, 16  # where bars begin, and how high their rows are


class Bar(NamedTuple):
    """One span, in milliseconds."""

    kind: str
    subgroup: int  # -1 for what belongs to none
    start: float
    end: float


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The times in which at least one of the intervals runs, disjoint and in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """Length of all intervals together."""
    return sum(end - start for start, end in intervals)


def bars_of(trace: dict[str, Any]) -> list[Bar]:
    """Return all spans of a trace as `write_trace` writes it, in the order in which they begin."""
    bars = []
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            number, start = event["name"].rpartition(" ")[2], event["ts"] / 1e3
            subgroup = int(number) if number.isdigit() else -1
            bars.append(Bar(event["cat"], subgroup, start, start + event["dur"] / 1e3))
    return sorted(bars, key=lambda bar: bar.start)


def median_iteration(bars: list[Bar]) -> tuple[Bar, list[Bar]]:
    """Return the step of the iteration that took the median time, and all spans in it, from its first forward on.

    Only of iterations in which something is updated: the first one after a pause finds nothing behind the step before.
    """
    iterations, before = list[tuple[float, Bar]](), 0.0
    updates = [bar.start for bar in bars if bar.kind == "compute"]
    for step in (bar for bar in bars if bar.kind == "step"):
        first = next(bar.start for bar in bars if bar.kind == "forward" and bar.start >= before)
        if any(first <= start < step.end for start in updates):
            iterations.append((first, step))
        before = step.end
    zero, step = sorted(iterations, key=lambda each: each[1].end - each[0])[len(iterations) // 2]
    inside = (bar for bar in bars if bar.end > zero and bar.start < step.end)
    moved = [bar._replace(start=max(0.0, bar.start - zero), end=bar.end - zero) for bar in inside]
    return step._replace(start=step.start - zero, end=step.end - zero), moved


def draw(all_bars: list[Bar], path: Path, source: str) -> None:
    """Save the picture of the iteration that took the median time; `source` stands in the file."""
    step, bars = median_iteration(all_bars)
    own = [bar for bar in bars if bar.kind in ("read", "compute", "write")]
    picture = Picture(f"One iteration: {step.end / 1e3:.2f} s, {len({bar.subgroup for bar in own})} subgroups")
    picture.legend(SPANS)
    picture.line("All subgroups, and their share of the time", "ink bold")
    _draw_lanes(picture, bars, step)
    picture.y += 4
    picture.line("Subgroup by subgroup, while the step before ends", "ink bold")
    _draw_subgroups(picture, [bar for bar in own if bar.start < step.start])
    picture.save(path, source)


def _draw_lanes(picture: Picture, bars: list[Bar], step: Bar) -> None:
    top, scale = picture.y, (WIDTH - LEFT - 20) / max(step.end, *(bar.end for bar in bars))
    for lane, kinds in LANES.items():
        times = merge((bar.start, min(bar.end, step.end)) for bar in bars if bar.kind in kinds and bar.kind != "wait")
        _name(picture, f"{lane} {total(times) / step.end:.0%}")
        for kind in kinds:
            for start, end in merge((bar.start, bar.end) for bar in bars if bar.kind == kind):
                picture.bar(LEFT + start * scale, picture.y - 13, (end - start) * scale, 12, kind)
    for moment in (step.start, step.end):
        picture.rule(LEFT + moment * scale, top, picture.y + 4)
    picture.ticks(LEFT, scale * 1e3, top, _rounds(step.end / 1e3), " s")


def _draw_subgroups(picture: Picture, own: list[Bar]) -> None:
    until = max(bar.end for bar in own)
    top, scale = picture.y, (WIDTH - LEFT - 20) / until
    for subgroup in dict.fromkeys(bar.subgroup for bar in own if bar.kind == "compute"):
        bars = [bar for bar in own if bar.subgroup == subgroup]
        # Without a read before its update the state was in its staging buffer from the start.
        written = max((bar.end for bar in bars if bar.kind == "write"), default=0.0)
        held_from = next((bar.start for bar in bars if bar.kind == "read" and bar.start < written), 0.0)
        _name(picture, str(subgroup))
        picture.bar(LEFT + held_from * scale, picture.y - 8, (written - held_from) * scale, 2, "wait")
        for bar in bars:
            picture.bar(LEFT + bar.start * scale, picture.y - 13, (bar.end - bar.start) * scale, 12, bar.kind)
    picture.ticks(LEFT, scale, top, _rounds(until), " ms")


def _rounds(last: float) -> list[float]:
    """Return some round values from 0 to the last."""
    unit = 10.0 ** floor(log10(last))
    step = next(share * unit for share in (0.2, 0.5, 1.0, 2.0) if last / (share * unit) < 6)
    return [step * number for number in range(int(last / step) + 1)]


def _name(picture: Picture, name: str) -> None:
    """Begin a row, with its name at the left."""
    picture.y += ROW
    picture.text(LEFT - 6, picture.y - 2, name, anchor="end")


def main() -> None:
    """Draw the picture."""
    draw(bars_of(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), PICTURE, f"make demo, {sys.argv[-1]}")


if __name__ == "__main__":
    main()
