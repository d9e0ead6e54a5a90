"""The picture of both loss curves and of where the time went."""

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from nvme_offload.perf.experiments.demo.records import RunResult
from nvme_offload.perf.experiments.demo.timeline import FAINT, INK, PICTURE_DPI

NVME_COLOUR = "#9ecae1"
MEMORY_COLOUR = "#08519c"
FORWARD_COLOUR = "#9e9ac8"
STEP_COLOUR = "#e6550d"
THICK = 0.06  # of the higher bar: enough to write in


def draw_curves(nvme: RunResult, memory: RunResult, path: Path) -> None:
    """Saves losses of both runs over steps, and beside them the seconds of each step."""
    figure, (losses, seconds) = plt.subplots(
        1, 2, figsize=(11.5, 4.6), gridspec_kw={"width_ratios": [1.6, 1]}, layout="constrained"
    )
    _draw_losses(losses, nvme, memory)
    _draw_seconds(seconds, nvme, memory)
    for axes in (losses, seconds):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(FAINT)
        axes.tick_params(color=FAINT, labelsize=9, labelcolor=INK)
        axes.grid(axis="y", color="#e6e9ed", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=PICTURE_DPI)
    plt.close(figure)


def _draw_losses(axes: Axes, nvme: RunResult, memory: RunResult) -> None:
    for result, name, style in (
        (nvme, "state on NVMe", {"color": NVME_COLOUR, "linewidth": 6.0}),
        (memory, "state in memory", {"color": MEMORY_COLOUR, "linewidth": 1.4}),
    ):
        steps = range(1, len(result.samples) + 1)
        axes.plot(steps, [s.loss for s in result.samples], label=f"training, {name}", **style)  # type: ignore[arg-type]
    for result, name, style in (
        (nvme, "state on NVMe", {"color": NVME_COLOUR, "markersize": 11}),
        (memory, "state in memory", {"color": MEMORY_COLOUR, "markersize": 5}),
    ):
        points = sorted(result.validation.items())
        axes.plot(
            [step for step, _ in points],
            [loss for _, loss in points],
            "D",
            label=f"held-out files, {name}",
            **style,  # type: ignore[arg-type]
        )
    same = [s.loss for s in nvme.samples] == [s.loss for s in memory.samples] and nvme.validation == memory.validation
    axes.set_title(
        "Loss: the two runs are " + ("equal in every digit" if same else "NOT EQUAL"),
        loc="left",
        fontsize=12,
        fontweight="bold",
        color=INK,
    )
    axes.set_xlabel("steps taken", color=INK)
    axes.set_ylabel("nats per byte", color=INK)
    axes.legend(frameon=False, fontsize=9)


def _draw_seconds(axes: Axes, nvme: RunResult, memory: RunResult) -> None:
    names = ["state\non NVMe", "state\nin memory"]
    bottoms = [0.0, 0.0]
    scale = max(statistics.median(s.seconds for s in result.measured) for result in (nvme, memory))
    for label, colour, attribute in (
        ("forward and backward", FORWARD_COLOUR, "forward_backward_seconds"),
        ("optimizer.step()", STEP_COLOUR, "optimizer_seconds"),
    ):
        heights = [statistics.median(getattr(s, attribute) for s in result.measured) for result in (nvme, memory)]
        axes.bar(names, heights, bottom=bottoms, color=colour, width=0.55, label=label)
        for i, height in enumerate(heights):
            thick = height > THICK * scale
            place, align, ink = (
                (bottoms[i] + height / 2, "center", "white") if thick else (bottoms[i] + height, "bottom", colour)
            )
            axes.text(i, place, f"{height:.2f} s", ha="center", va=align, color=ink, fontsize=10)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylim(0, max(bottoms) * 1.3)
    axes.set_title("Seconds per step (median)", loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
