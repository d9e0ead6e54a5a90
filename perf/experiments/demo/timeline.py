"""The picture of one iteration: what training, the drive and the updates did, subgroup by subgroup."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from nvme_offload.perf.experiments.demo.records import RunResult, StepSample
from nvme_offload.perf.experiments.demo.spans import io_seconds, merge, total

INK = "#22272e"
FAINT = "#8b949e"
GRID = "#e6e9ed"
WAITING = "#c4cad1"
COLOURS = {
    "forward": "#bdb76b",
    "backward": "#756bb1",
    "norm": "#dd77aa",
    "wait": WAITING,
    "read": "#3182bd",
    "compute": "#e6550d",
    "write": "#31a354",
}
LANES = {
    "training": ("forward", "backward", "norm", "wait"),
    "drive reads": ("read",),
    "CPU updates": ("compute",),
    "drive writes": ("write",),
}
MEANINGS = {
    "forward": "forward",
    "backward": "backward",
    "norm": "norm",
    "wait": "waits",
    "read": "state is read",
    "compute": "is updated",
    "write": "is written back",
}
OF_SUBGROUPS = ("read", "compute", "write")
PICTURE_DPI = 150
BAR_HEIGHT = 0.66
LANE_INCHES = 0.36
ROW_INCHES = 0.25


@dataclass(frozen=True)
class Bar:
    """One span, in milliseconds since the first forward began."""

    kind: str
    subgroup: int
    start: float
    end: float


def typical_step(result: RunResult) -> int:
    """The step whose iteration took the median time; not the first, which also creates what the others use.

    Raises:
        ValueError: No step has reads and writes to show.
    """
    steps = [i for i, sample in enumerate(result.samples) if any(span[0] == "write" for span in sample.spans)]
    if not steps:
        raise ValueError("the optimizer kept no timeline")
    steps = steps[1:] or steps
    return sorted(steps, key=lambda i: result.samples[i].seconds)[len(steps) // 2]


def to_bars(sample: StepSample, zero: int) -> list[Bar]:
    """The spans of an iteration in the order in which they began; `zero`: its start, in nanoseconds."""
    ordered = sorted(sample.spans, key=lambda span: span[2])
    return [
        Bar(kind, subgroup, max(0.0, (start - zero) / 1e6), (end - zero) / 1e6)
        for kind, subgroup, start, end in ordered
    ]


def draw_timeline(result: RunResult, path: Path) -> int:
    """Saves the picture of a typical step and gives the step's index.

    Raises:
        ValueError: The run has no timeline.
    """
    step = typical_step(result)
    sample = result.samples[step]
    zero = sample.started_ns
    bars = to_bars(sample, zero)
    updates = list(dict.fromkeys(bar.subgroup for bar in bars if bar.kind == "compute"))
    top, gap, bottom = 1.2, 0.6, 1.12
    lanes_height, rows_height = LANE_INCHES * len(LANES), ROW_INCHES * len(updates)
    height = top + lanes_height + gap + rows_height + bottom
    figure = plt.figure(figsize=(11.5, height))
    left, width = 0.115, 0.765
    rows = figure.add_axes((left, bottom / height, width, rows_height / height))
    lanes = figure.add_axes((left, (bottom + rows_height + gap) / height, width, lanes_height / height), sharex=rows)
    called, returned = ((moment - zero) / 1e6 for moment in (sample.began_ns, sample.returned_ns))
    _draw_lanes(lanes, bars, returned)
    _draw_subgroups(rows, bars, updates)
    rows.set_xlim(0, max(returned, *(bar.end for bar in bars)) * 1.01)
    for moment, text, align in ((called, "step() is called", "right"), (returned, "returns", "right")):
        for axes in (lanes, rows):
            axes.axvline(moment, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=5)
        lanes.annotate(
            text, (moment, 1), xycoords=("data", "axes fraction"), xytext=(0, 3), fontsize=9, color=INK,
            textcoords="offset points", ha=align,
        )  # fmt: skip
    _describe(figure, result, step, bars)
    figure.savefig(path, dpi=PICTURE_DPI)
    plt.close(figure)
    return step


def _bare(axes: Axes) -> None:
    """Leave of the axes only what carries meaning: a light grid of time, no frame."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=INK)
    axes.tick_params(axis="x", color=FAINT, labelsize=9, labelcolor=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_bar(axes: Axes, row: int, start: float, end: float, kind: str) -> None:
    axes.broken_barh(
        [(start, end - start)],
        (row - BAR_HEIGHT / 2, BAR_HEIGHT),
        facecolor=COLOURS[kind],
        edgecolor=COLOURS[kind],
        linewidth=1.2 if kind == "compute" else 0.0,  # so that the shortest update can be seen
        zorder=3,
    )


def _heading(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, color=INK, fontweight="bold")


def _draw_lanes(axes: Axes, bars: list[Bar], returned: float) -> None:
    for row, kinds in enumerate(LANES.values()):
        for kind in kinds:
            for start, end in merge((bar.start, bar.end) for bar in bars if bar.kind == kind):
                _draw_bar(axes, row, start, end, kind)
        times = merge((bar.start, min(bar.end, returned)) for bar in bars if bar.kind in kinds and bar.kind != "wait")
        axes.text(
            1.01,
            row,
            f"{total(times) / returned:.0%} of the time",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=9,
            color=INK,
        )
    axes.set_yticks(range(len(LANES)), list(LANES))
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.tick_params(axis="x", labelbottom=False)
    _heading(axes, "All subgroups together")
    _bare(axes)


def _draw_subgroups(axes: Axes, bars: list[Bar], updates: list[int]) -> None:
    for row, subgroup in enumerate(updates):
        own = [bar for bar in bars if bar.subgroup == subgroup and bar.kind in OF_SUBGROUPS]
        # Without a read the state was in its staging buffer from the start.
        held_from = next((bar.start for bar in own if bar.kind == "read"), 0.0)
        axes.plot(
            [held_from, max(bar.end for bar in own)],
            [row, row],
            color=WAITING,
            linewidth=2.5,
            zorder=2,
            solid_capstyle="butt",
        )
        for bar in own:
            _draw_bar(axes, row, bar.start, bar.end, bar.kind)
    axes.set_yticks(range(len(updates)), [str(subgroup) for subgroup in updates])
    axes.set_ylim(len(updates) - 0.4, -0.6)
    axes.set_ylabel("subgroup", color=INK, labelpad=12)
    axes.set_xlabel("milliseconds since the first forward began", color=INK)
    _heading(axes, "Subgroup by subgroup, in the order of their updates")
    _bare(axes)


def _facts(result: RunResult, step: int, bars: Iterable[Bar]) -> str:
    sample = result.samples[step]
    kept = result.stats["num_subgroups"] - len({bar.subgroup for bar in bars if bar.kind == "read"})
    rate = sample.bytes_moved / io_seconds(span for span in sample.spans if span[2] >= sample.began_ns) / 1e9
    facts = (
        f"Step {step + 1}, {sample.pace}; {result.num_parameters / 1e6:.1f} million parameters in "
        f"{result.stats['num_subgroups']} subgroups; {sample.bytes_moved / 1e6:.0f} MB moved at {rate:.2f} GB/s; "
        f"engine {result.stats['engine']}"
    )
    return facts + (f"; {kept} were still in memory" if kept else "")


def _describe(figure: Figure, result: RunResult, step: int, bars: list[Bar]) -> None:
    height = figure.get_figheight()
    title = "One iteration with its optimizer state on NVMe"
    figure.text(0.015, 1 - 0.34 / height, title, fontsize=15, fontweight="bold", color=INK)
    figure.text(0.015, 1 - 0.62 / height, _facts(result, step, bars), fontsize=9.5, color=INK)
    present = [kind for kind in MEANINGS if any(bar.kind == kind for bar in bars)]
    handles: list[Patch | Line2D] = [Patch(color=COLOURS[kind], label=MEANINGS[kind]) for kind in present]
    handles.append(Line2D([], [], color=WAITING, linewidth=2.5, label="waits in a staging buffer"))
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.008, 0.25 / height),
        ncols=len(handles),
        fontsize=9,
        frameon=False,
        columnspacing=1.4,
    )
    reading = (
        "Bars above one another happen at the same time: while one subgroup is updated, others are read and written. "
        "At the left the last writes of the step before."
    )
    figure.text(0.015, 0.13 / height, reading, fontsize=9, color="#57606a")
