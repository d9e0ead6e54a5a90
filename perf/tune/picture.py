"""The search of `offload tune` as a picture: what was tried, what it gave, and why the choice fell as it did."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from nvme_offload.offload.units import format_bytes

CHOSEN = "#d62728"
COLORS = "viridis"


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the picture of a search as PNG."""
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    grid, ranks = figure.subplots(1, 2, width_ratios=(1, 1))
    _draw_grid(figure, grid, document)
    _draw_ranks(ranks, document)
    facts = document["environment"]
    figure.suptitle(
        "offload tune: bandwidth of the optimizer's 1:1 pattern, relative to the defaults measured beside each trial"
    )
    place = facts["storage"][0]
    commit = (facts["commit"] or "unknown")[:12]
    footer = f"{facts['cpu']}, Linux {facts['kernel']}, {place.get('file_system')} on {place.get('device')}, {commit}"
    figure.supxlabel(footer, fontsize=8, color="0.4")
    figure.savefig(path, dpi=120)


def _score(trial: dict[str, Any]) -> float:
    return float(median(trial["scores"]))


def _is(trial: dict[str, Any], setting: dict[str, Any]) -> bool:
    return all(trial[name] == value for name, value in setting.items())


def _draw_grid(figure: Figure, axes: Axes, document: dict[str, Any]) -> None:
    """Block size against depth, on one ring, with the engine that auto takes."""
    engine = document["trials"][0]["engine"]
    trials = [trial for trial in document["trials"] if trial["rings"] == 1 and trial["engine"] == engine]
    blocks = sorted({trial["block_size"] for trial in trials})
    depths = sorted({trial["queue_depth"] for trial in trials})
    scale = Normalize(min(map(_score, trials)), max(map(_score, trials)))
    colors = ScalarMappable(scale, COLORS)
    for trial in trials:
        x, y = depths.index(trial["queue_depth"]), blocks.index(trial["block_size"])
        chosen = _is(trial, document["chosen"])
        axes.add_patch(_cell(x, y, colors.to_rgba(np.array([_score(trial)]))[0], chosen))
        ink = "white" if scale(_score(trial)) < 0.6 else "black"
        axes.text(x, y, f"{_score(trial):.2f}", ha="center", va="center", color=ink, fontsize=9)
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set_yticks(range(len(blocks)), [format_bytes(block) for block in blocks])
    axes.set(xlim=(-0.6, len(depths) - 0.4), ylim=(-0.6, len(blocks) - 0.4))
    axes.set(xlabel="queue_depth", ylabel="block_size", title=f"{engine}, one ring (empty: not tried)")
    figure.colorbar(colors, ax=axes, label="of the defaults")


def _cell(x: int, y: int, color: Any, chosen: bool) -> Any:
    from matplotlib.patches import Rectangle

    edge, width = (CHOSEN, 3) if chosen else ("white", 1)
    return Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=color, edgecolor=edge, linewidth=width)


def _draw_ranks(axes: Axes, document: dict[str, Any]) -> None:
    """The finalists, the rings and the other engines: every score a dot, the median a bar."""
    grid_engine = document["trials"][0]["engine"]
    finalists = document["finalists"]
    shown = [
        trial
        for trial in document["trials"]
        if trial["rings"] > 1 or trial["engine"] != grid_engine or any(_is(trial, f) for f in finalists)
    ]
    shown.sort(key=_score)
    best = max(_score(trial) for trial in shown if any(_is(trial, finalist) for finalist in finalists))
    axes.axvspan((1 - document["noise"]) * best, best, color="0.88", label="within the noise of the best")
    for y, trial in enumerate(shown):
        color = CHOSEN if _is(trial, document["chosen"]) else "tab:blue"
        axes.plot(trial["scores"], [y] * len(trial["scores"]), "o", color=color, alpha=0.35, markeredgewidth=0)
        axes.plot(_score(trial), y, "|", color=color, markersize=16, markeredgewidth=2.5)
    axes.set_yticks(range(len(shown)), [_name(trial, finalists) for trial in shown])
    axes.axvline(1, color="0.5", linewidth=0.8, linestyle=":", label="defaults")
    axes.set(xlabel="of the defaults", title="finalists (*), rings and engines; red: chosen")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)


def _name(trial: dict[str, Any], finalists: list[dict[str, Any]]) -> str:
    star = "* " if any(_is(trial, finalist) for finalist in finalists) else ""
    rings = f" x {trial['rings']} rings" if trial["rings"] > 1 else ""
    return f"{star}{trial['engine']} {format_bytes(trial['block_size'])} x {trial['queue_depth']}{rings}"
