"""What a comparison with others found: read from its file, as a table, in words, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, Self

from nvme_offload.offload.units import format_bytes
from nvme_offload.perf.experiments.peers.contenders import MEMORY, Contender
from nvme_offload.perf.experiments.peers.worker import Ended, Order
from nvme_offload.perf.measure.comparison import Quad
from nvme_offload.perf.measure.gpt import parse_size

ITERATIONS = 2
"""Iterations of a turn."""
HEAD = ("", "iteration", "over ours", "peak memory", "B read", "B written", "distance")
COLOURS = {"ours": "#e6550d"}
OTHERS = "#9ecae1"


@dataclass
class Found:
    """What was seen of one contender."""

    contender: Contender
    numel: int
    """Parameters of the model."""
    problem: str | None = None
    """Why it could not train; None: it did."""
    version: str | None = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    quads: list[Quad] = field(default_factory=list)
    """Seconds of an iteration: ours, theirs, theirs, ours."""
    ended: Ended | None = None
    distance: float | None = None
    """Of its weights from those of the run in memory, over the way that those have come; 0: the same bits."""
    bits_of_ours: bool = False
    """Whether its weights have the bits that ours on NVMe has."""

    @classmethod
    def of_dict(cls, saved: dict[str, Any], numel: int) -> Self:
        """Undo `to_dict`."""
        ended = saved["ended"]
        known = {each.name for each in fields(cls)} - {"contender", "numel", "quads", "ended"}
        return cls(
            **{name: value for name, value in saved.items() if name in known},
            contender=Contender(**saved["contender"]),
            numel=numel,
            quads=[Quad(tuple(rates)) for rates in saved["quads"]],
            ended=Ended(**ended) if ended else None,
        )

    @property
    def times_ours(self) -> float | None:
        """Its iteration over ours, the median of the quads."""
        return median(1 / quad.ratio for quad in self.quads) if self.quads else None

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        return {
            **asdict(self),
            "quads": [quad.rates for quad in self.quads],
            "times_ours": self.times_ours,
        }

    def cells(self) -> list[str]:
        """Its row below `HEAD`."""
        name = self.contender.text + (f" ({self.version})" if self.version else "")
        if self.problem is not None or self.ended is None:
            return [name, "cannot" if self.problem else "not yet", *[""] * (len(HEAD) - 2)]
        moved = self.ended.moved
        per_step = [f"{count / self.numel / self.ended.iterations:.1f}" for count in moved] if moved else ["", ""]
        times = self.times_ours
        return [
            name,
            f"{median(self.seconds):.2f} s",
            "1" if times is None else f"{times:.2f}",
            "" if self.ended.peak_bytes is None else format_bytes(self.ended.peak_bytes),
            *per_step,
            self._distance(),
        ]

    def _distance(self) -> str:
        if not self.distance:
            return "" if self.distance is None else "0"
        return f"{self.distance:.1e}" + (", the bits of ours" if self.bits_of_ours else "")


@dataclass(frozen=True)
class Result:
    """A comparison that has ended."""

    environment: dict[str, Any]
    """Facts of the machine, as `nvme_offload.perf.measure.environment` gives them."""
    order: Order
    """The order of all contenders, but for who and where."""
    found: list[Found]
    """Ours first."""

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Read a result that was saved.

        Raises:
            ValueError: the file is none of a comparison; names it.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            order = Order(**document["order"])
            numel = parse_size(order.size).num_parameters
            found = [Found.of_dict(entry, numel) for entry in document["results"]]
            return cls(document["environment"], order, found)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no saved comparison ({error!r}); make one with --save") from None


def notes(order: Order, all_found: Sequence[Found]) -> list[str]:
    """Say what was done and what the columns mean, and why some could not train."""
    quads = max(len(found.quads) for found in all_found)
    return [
        f"{parse_size(order.size).num_parameters:,} parameters, {order.tokens} tokens an iteration; bf16 compute over "
        f"fp32 masters, AdamW, clipping at 1.0; {quads} x {ITERATIONS} iterations each of ours, theirs, theirs, ours",
        "B: bytes per parameter and iteration as the kernel counts them; memory: the most resident in training",
        f"distance: of the weights at the end from those of {MEMORY.text}, over the way that those have come",
        *(f"{found.contender.text}: {found.problem}" for found in all_found if found.problem is not None),
    ]


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
