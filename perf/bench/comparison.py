"""Ours against a reference on a drive whose speed changes by the minute.

A quad measures in the order ours, reference, reference, ours, so that a drift that is steady over the quad cancels.
After each one comes a control quad with the reference on both sides: what it shows is the luck of the minute. The
answer is the median ratio divided by the median ratio of the controls, with an interval from the quads themselves.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Arm = Callable[[], float]
"""A way of moving bytes: measures once and gives bytes per second."""

RESAMPLES = 10_000
SEED = 20


@dataclass(frozen=True)
class Quad:
    """Rates in the order in which they were measured: ours, reference, reference, ours."""

    rates: tuple[float, float, float, float]

    @classmethod
    def measure(cls, ours: Arm, reference: Arm) -> Quad:
        """Measure a quad: four runs, one after the other."""
        return cls((ours(), reference(), reference(), ours()))

    @property
    def ratio(self) -> float:
        """Ours over the reference, by geometric means: blind to a drift by a constant factor per run."""
        first, second, third, fourth = self.rates
        return math.sqrt(first * fourth / (second * third))


@dataclass(frozen=True)
class Comparison:
    """Quads and their controls, in the order in which they were measured."""

    quads: tuple[Quad, ...]
    controls: tuple[Quad, ...]

    @property
    def ratio(self) -> float:
        """Median of the ratio over the quads."""
        return median(quad.ratio for quad in self.quads)

    @property
    def control(self) -> float:
        """Median of the ratio over the controls: 1 on a quiet machine."""
        return median(quad.ratio for quad in self.controls)

    @property
    def quotient(self) -> float:
        """The answer: what is left of the ratio when the control is taken out."""
        return self.ratio / self.control

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the quotients of resampled quads and controls (bootstrap, percentile method, fixed seed)."""
        source = random.Random(SEED)
        ratios = [quad.ratio for quad in self.quads]
        controls = [quad.ratio for quad in self.controls]
        quotients = sorted(
            _resampled_median(ratios, source) / _resampled_median(controls, source) for _ in range(RESAMPLES)
        )
        return quotients[round(0.025 * (RESAMPLES - 1))], quotients[round(0.975 * (RESAMPLES - 1))]

    def as_dict(self) -> dict[str, Any]:
        """The comparison in plain types, for JSON."""
        return {
            "quads": [quad.rates for quad in self.quads],
            "controls": [quad.rates for quad in self.controls],
            "ratio": self.ratio,
            "control_ratio": self.control,
            "quotient": self.quotient,
            "interval_95": self.interval,
        }


def compare(ours: Arm, reference: Arm, num_quads: int) -> Iterator[tuple[Quad, Quad]]:
    """Measure quads and controls in turn; each pair is given as soon as it is there."""
    for _ in range(num_quads):
        yield Quad.measure(ours, reference), Quad.measure(reference, reference)


def comparison_of(pairs: Sequence[tuple[Quad, Quad]]) -> Comparison:
    """The pairs that `compare` gave."""
    return Comparison(tuple(quad for quad, _ in pairs), tuple(control for _, control in pairs))


def _resampled_median(values: list[float], source: random.Random) -> float:
    return median(source.choices(values, k=len(values)))
