"""The README's picture of an iteration, from a trace of `make demo`: `python -m scripts.readme_timeline TRACE.json`.

It goes to docs/pictures/timeline.png: what training, the drive and the updates did, subgroup by subgroup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

Interval = tuple[float, float]
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "timeline.png"
INK, GRID, WAITING = "#22272e", "#e6e9ed", "#c4cad1"
KINDS = {
    "forward": ("#bdb76b", "forward"),
    "backward": ("#756bb1", "backward"),
    "norm": ("#dd77aa", "norm"),
    "wait": (WAITING, "waits"),
    "read": ("#3182bd", "state is read"),
    "compute": ("#e6550d", "is updated"),
    "write": ("#31a354", "is written back"),
}
"""Colour and meaning of each kind of span."""
LANES = {
    "training": ("forward", "backward", "norm", "wait"),
    "drive reads": ("read",),
    "CPU updates": ("compute",),
    "drive writes": ("write",),
}
READING = (
    "Bars above one another happen at the same time: while one subgroup is updated, others are read and written.\n"
    "At the left the step before goes on under the forward."
)


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


def draw(all_bars: list[Bar], path: Path) -> None:
    """Save the picture of the iteration that took the median time."""
    step, bars = median_iteration(all_bars)
    called, returned = step.start, step.end
    updates = list(dict.fromkeys(bar.subgroup for bar in bars if bar.kind == "compute"))
    heights = (1.5 * len(LANES), len(updates))
    figure, (lanes, rows) = plt.subplots(
        2, figsize=(11.5, 2.6 + 0.25 * sum(heights)), height_ratios=heights, sharex=True, layout="constrained"
    )
    _draw_lanes(lanes, bars, returned)
    _draw_subgroups(rows, bars, updates)
    for axes in (lanes, rows):
        for moment in (called, returned):
            axes.axvline(moment, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=5)
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=GRID)
        axes.set_axisbelow(True)
        axes.invert_yaxis()
    for moment, text, side in ((called, "step() is called ", "right"), (returned, " returns", "left")):
        lanes.annotate(text, (moment, 1), xycoords=("data", "axes fraction"), va="bottom", ha=side, fontsize=9)
    rows.set_xlim(0, max(returned, *(bar.end for bar in bars)) * 1.01)
    facts = f"{returned / 1e3:.2f} s, {len(updates)} subgroups"
    figure.suptitle(f"One iteration with its optimizer state on NVMe\n{facts}", x=0.01, ha="left")
    handles: list[Patch | Line2D] = [
        Patch(color=color, label=meaning)
        for kind, (color, meaning) in KINDS.items()
        if any(bar.kind == kind for bar in bars)
    ]
    handles.append(Line2D([], [], color=WAITING, linewidth=2.5, label="waits in a staging buffer"))
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_bar(axes: Axes, row: int, start: float, end: float, kind: str) -> None:
    color, width = KINDS[kind][0], 1.2 if kind == "compute" else 0.0  # so that the shortest update can be seen
    axes.broken_barh([(start, end - start)], (row - 0.33, 0.66), color=color, linewidth=width, zorder=3)


def _draw_lanes(axes: Axes, bars: list[Bar], returned: float) -> None:
    for row, kinds in enumerate(LANES.values()):
        for kind in kinds:
            for start, end in merge((bar.start, bar.end) for bar in bars if bar.kind == kind):
                _draw_bar(axes, row, start, end, kind)
        times = merge((bar.start, min(bar.end, returned)) for bar in bars if bar.kind in kinds and bar.kind != "wait")
        said, place = f"{total(times) / returned:.0%} of the time", axes.get_yaxis_transform()
        axes.text(1.01, row, said, transform=place, va="center", fontsize=9)
    axes.set_yticks(range(len(LANES)), list(LANES))
    axes.set_title("All subgroups together\n", loc="left", fontsize=10, fontweight="bold")


def _draw_subgroups(axes: Axes, bars: list[Bar], updates: list[int]) -> None:
    for row, subgroup in enumerate(updates):
        own = [bar for bar in bars if bar.subgroup == subgroup and bar.kind in ("read", "compute", "write")]
        # Without a read the state was in its staging buffer from the start.
        held_from = next((bar.start for bar in own if bar.kind == "read"), 0.0)
        held_to = max(bar.end for bar in own)
        axes.plot([held_from, held_to], [row, row], color=WAITING, linewidth=2.5, solid_capstyle="butt", zorder=2)
        for bar in own:
            _draw_bar(axes, row, bar.start, bar.end, bar.kind)
    axes.set_yticks(range(len(updates)), [str(subgroup) for subgroup in updates])
    axes.set_ylabel("subgroup")
    axes.set_xlabel(f"milliseconds since the first forward began\n{READING}")
    axes.set_title("Subgroup by subgroup, in the order of their updates", loc="left", fontsize=10, fontweight="bold")


def main() -> None:
    """Draw the picture."""
    draw(bars_of(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), PICTURE)
    sys.stdout.write(f"{PICTURE} is drawn\n")


if __name__ == "__main__":
    main()
