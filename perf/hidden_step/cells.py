"""Iterations over a drive of an exact rate, beside the ideal and the bound of `offload plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from nvme_offload.perf.hidden_step.paced import STANDS_IN_FOR, paced_drive
from nvme_offload.perf.hidden_step.training import Iteration, Setup, Training, section
from nvme_offload.perf.planning.schedule import OverlapStep

RATIOS = (0.5, 1.0, 2.0)
"""Seconds of the drive over those of computing."""
HEAD = (
    "overlap_step",
    "I/O : compute",
    "iteration s",
    "of the ideal",
    "bound",
    "quotient",
    "forward",
    "backward",
    "step",
)

_LEAST_ITERATIONS = 3


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Iterations of one schedule at one ratio. Seconds are medians or, of iterations, the mean."""

    overlap_step: OverlapStep
    ratio: float
    compute: float
    """Seconds of an iteration over a drive that takes no time."""
    nvme: float
    """Seconds in which the drive moves every subgroup there and back: what ``off`` moves, no more and no less."""
    iterations: tuple[Iteration, ...]
    bound: float
    """How many times as long as the ideal an iteration has to be, by the model of `offload plan`."""

    @property
    def seconds(self) -> float:
        """Mean seconds of an iteration: directions of ``off`` alternate."""
        return mean(iteration.seconds for iteration in self.iterations)

    @property
    def of_ideal(self) -> float:
        """How many times as long as the ideal an iteration is."""
        return self.seconds / max(self.compute, self.nvme)

    @property
    def quotient(self) -> float:
        """How much longer an iteration is than the bound says."""
        return self.of_ideal / self.bound

    def to_dict(self) -> dict[str, Any]:
        """The cell in plain types, for JSON."""
        return {**asdict(self), "of_ideal": self.of_ideal, "quotient": self.quotient}

    def row(self) -> list[str]:
        """The cell as a row of the table."""
        parts = (mean(getattr(one, part) for one in self.iterations) for part in ("forward", "backward", "step"))
        ratios = (f"{self.of_ideal:.2f}", f"{self.bound:.2f}", f"{self.quotient:.3f}")
        return [
            self.overlap_step,
            f"{self.ratio:g}",
            f"{self.seconds:.3f}",
            *ratios,
            *(f"{part:.3f}" for part in parts),
        ]


def measure(
    setup: Setup, overlaps: Sequence[OverlapStep], ratios: Sequence[float], nvme: float, count: int, path: Path
) -> Iterator[Cell]:
    """Measure each schedule at each ratio.

    Args:
        setup: the model.
        overlaps: schedules.
        ratios: of the drive's seconds to those of computing.
        nvme: seconds of the drive in each iteration.
        count: iterations that are measured in each cell; even, since directions of ``off`` alternate.
        path: a folder for the swap file, in which nothing is written.
    """
    for overlap_step in overlaps:
        model = setup.model()
        sections = section(
            overlap_step, path, sub_group_size=setup.width**2, buffers=setup.buffers, engine=STANDS_IN_FOR
        )
        with paced_drive() as pace, Training(model, model.sample, sections) as training:
            own = median(one.seconds for one in training.iterations(_LEAST_ITERATIONS))
            for ratio in ratios:
                pace.rate = math.inf
                model.compute_for(max(0.0, nvme / ratio - own))
                compute = median(one.seconds for one in training.iterations(_LEAST_ITERATIONS))
                pace.rate = setup.bytes_moved / nvme
                taken = tuple(training.iterations(1 + count)[1:])
                bound = setup.bound(overlap_step, compute, nvme)
                yield Cell(
                    overlap_step=overlap_step,
                    ratio=ratio,
                    compute=compute,
                    nvme=nvme,
                    iterations=taken,
                    bound=bound.seconds / max(compute, nvme),
                )
