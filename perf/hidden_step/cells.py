"""Iterations over a drive of an exact rate, beside the ideal and the bound of `offload plan`."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from nvme_offload.perf.bench.comparison import Arm, Quad, compare
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

TOLERANCE = 0.1
"""Share by which computing alone may differ from what was asked for."""
ATTEMPTS = 3
"""Times that a cell is measured, as long as computing is disturbed."""

_LEAST_ITERATIONS = 3

CLIPPED_SCALE = 1e9
"""What the loss of a step is multiplied by that is to clip."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Iterations of one schedule at one ratio. Seconds are medians."""

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
        """Median seconds of an iteration."""
        return median(iteration.seconds for iteration in self.iterations)

    @property
    def of_ideal(self) -> float:
        """How many times as long as the ideal an iteration is."""
        return self.seconds / max(self.compute, self.nvme)

    @property
    def quotient(self) -> float:
        """How much longer an iteration is than the bound says."""
        return self.of_ideal / self.bound

    @property
    def is_disturbed(self) -> bool:
        """Whether computing alone did not take what it should have."""
        return abs(self.compute * self.ratio / self.nvme - 1) > TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        """The cell in plain types, for JSON."""
        return {**asdict(self), "of_ideal": self.of_ideal, "quotient": self.quotient, "is_disturbed": self.is_disturbed}

    def row(self) -> list[str]:
        """The cell as a row of the table."""
        parts = (median(getattr(one, part) for one in self.iterations) for part in ("forward", "backward", "step"))
        ratios = (f"{self.of_ideal:.2f}", f"{self.bound:.2f}", f"{self.quotient:.3f}")
        ratio = f"{self.ratio:g}{' (disturbed)' if self.is_disturbed else ''}"
        return [
            self.overlap_step,
            ratio,
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
            overlap_step,
            path,
            sub_group_size=setup.width**2,
            buffers=setup.buffers,
            engine=STANDS_IN_FOR,
            durable=overlap_step == "speculate",
        )
        with paced_drive() as pace, Training(model, model.sample, sections) as training:
            own = min(one.seconds for one in training.iterations(_LEAST_ITERATIONS))
            for ratio in ratios:
                for _ in range(ATTEMPTS):
                    pace.rate = math.inf
                    model.compute_for(max(0.0, nvme / ratio - own))
                    compute = median(one.seconds for one in training.iterations(_LEAST_ITERATIONS))
                    pace.rate = setup.bytes_moved(overlap_step) / nvme
                    cell = Cell(
                        overlap_step=overlap_step,
                        ratio=ratio,
                        compute=compute,
                        nvme=nvme,
                        iterations=tuple(training.iterations(1 + count)[1:]),
                        bound=setup.bound(overlap_step, compute, nvme).seconds / max(compute, nvme),
                    )
                    if not cell.is_disturbed:
                        break
                yield cell


def clipped(setup: Setup, share: float, nvme: float, count: int, quads: int, path: Path) -> Iterator[tuple[Quad, Quad]]:
    """Measure ``speculate`` beside ``forward``, both durable, in steps of which a share clips, chosen by chance.

    Args:
        setup: the model.
        share: of the steps.
        nvme: seconds of the drive in each iteration, and of computing.
        count: iterations that are measured each time.
        quads: how many.
        path: a folder for the swap files.
    """
    with paced_drive() as pace, ExitStack() as stack:
        arms: dict[OverlapStep, Arm] = {}
        names: tuple[OverlapStep, ...] = ("speculate", "forward")
        for name in names:
            model = setup.model()
            model.compute_for(nvme)
            sections = section(
                name,
                path,
                sub_group_size=setup.width**2,
                buffers=setup.buffers,
                engine=STANDS_IN_FOR,
                durable=name,
            )
            training = stack.enter_context(Training(model, model.sample, sections))
            training.scale = partial(_scale, random.Random(0), share)
            arms[name] = partial(_seconds, training, count)
        pace.rate = setup.bytes_moved("speculate") / nvme
        yield from compare(arms["speculate"], arms["forward"], quads)


def _scale(chance: random.Random, share: float) -> float:
    return CLIPPED_SCALE if chance.random() < share else 1.0


def _seconds(training: Training, count: int) -> float:
    """Mean seconds of an iteration."""
    return mean(one.seconds for one in training.iterations(count))
