"""The comparison as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from nvme_offload.offload.units import format_bytes
from nvme_offload.perf.compare.rounds import Found

HEAD = ("", "iteration", "over ours", "peak memory", "B read", "B written", "distance")
COLOURS = {"ours": "#e6550d"}
OTHERS = "#9ecae1"


def row(found: Found, numel: int) -> list[str]:
    """One contender's line."""
    name = found.contender.text + (f" ({found.version})" if found.version else "")
    if found.problem is not None or found.ended is None:
        return [name, "cannot", *[""] * (len(HEAD) - 2)]
    moved = found.ended.moved
    per_step = [f"{count / numel / found.ended.iterations:.1f}" for count in moved] if moved else ["", ""]
    times = found.times_ours
    return [
        name,
        f"{median(found.seconds):.2f} s",
        "1" if times is None else f"{times:.2f}",
        "" if found.ended.peak_bytes is None else format_bytes(found.ended.peak_bytes),
        *per_step,
        _distance(found),
    ]


def _distance(found: Found) -> str:
    if found.distance is None:
        return ""
    if found.distance == 0:
        return "0"
    return f"{found.distance:.1e}" + (", the bits of ours" if found.bits_of_ours else "")


def problems(all_found: Sequence[Found]) -> list[str]:
    """Why those that could not train could not."""
    return [f"{found.contender.text}: {found.problem}" for found in all_found if found.problem is not None]


def draw(all_found: Sequence[Found], path: Path, source: str = "") -> None:
    """Save bars: seconds of an iteration, and peak memory, of all who trained; `source` stands in the metadata."""
    import matplotlib

    matplotlib.use("Agg")  # before pyplot: no display is needed
    import matplotlib.pyplot as plt

    trained = [found for found in all_found if found.ended is not None][::-1]
    names = [found.contender.text for found in trained]
    colours = [COLOURS.get(found.contender.name, OTHERS) for found in trained]
    figure, (seconds, memory) = plt.subplots(1, 2, figsize=(11.5, 0.7 + 0.45 * len(names)), layout="constrained")
    values = (
        (seconds, [median(found.seconds) for found in trained], "seconds per iteration"),
        (memory, [(found.ended.peak_bytes or 0) / 2**30 for found in trained if found.ended], "peak memory, GiB"),
    )
    for axes, numbers, title in values:
        bars = axes.barh(names, numbers, color=colours)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
        axes.set_title(title, fontsize=10, loc="left")
        axes.margins(x=0.15)
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(labelsize=9, bottom=False, labelbottom=False)
    memory.set_yticklabels([])
    figure.savefig(path, dpi=110, metadata={"Source": source})
    plt.close(figure)
