"""One thing beside another on a machine whose speed changes by the minute.

A `Case` has two arms. A quad measures them in the order ours, reference, reference, ours, so that a drift that is
steady over the quad cancels. After each one comes a control quad with the reference on both sides: it shows the luck of
the minute. The answer is the median ratio divided by the median ratio of the controls, with an interval from the quads
themselves.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

Arm = Callable[[], float]  # measures once. Gives bytes per second, or seconds: the same in both arms of a case.

RESAMPLES = 10_000
SEED = 20


@dataclass(frozen=True)
class Quad:
    """Rates, or seconds, in the order in which they were measured: ours, reference, reference, ours."""

    rates: tuple[float, float, float, float]

    @classmethod
    def measure(cls, ours: Arm, reference: Arm) -> Self:
        """Measure a quad: four runs, one after the other."""
        return cls((ours(), reference(), reference(), ours()))

    @property
    def ratio(self) -> float:
        """Ours over the reference, by geometric means: blind to a drift by a constant factor per run."""
        first, second, third, fourth = self.rates
        return math.sqrt(first * fourth / (second * third))


@dataclass(frozen=True)
class Comparison:
    """Quads of a case, in the order in which they were measured, and the control behind each; or no controls."""

    name: str
    quads: tuple[Quad, ...]
    controls: tuple[Quad, ...] = ()

    @property
    def ratio(self) -> float:
        """Median of the ratio over the quads."""
        return _median_ratio(self.quads)

    @property
    def control(self) -> float:
        """Median of the ratio over the controls: 1 on a quiet machine, and without controls."""
        return _median_ratio(self.controls)

    @property
    def quotient(self) -> float:
        """The answer: what is left of the ratio when the control is taken out."""
        return self.ratio / self.control

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the quotients of resampled quads and controls (bootstrap, percentile method, fixed seed)."""
        source, pairs = random.Random(SEED), (self.quads, self.controls)
        ratios, controls = ([quad.ratio for quad in quads] or [1.0] for quads in pairs)
        quotients = sorted(
            median(source.choices(ratios, k=len(ratios))) / median(source.choices(controls, k=len(controls)))
            for _ in range(RESAMPLES)
        )
        return quotients[round(0.025 * (RESAMPLES - 1))], quotients[round(0.975 * (RESAMPLES - 1))]

    @property
    def medians(self) -> tuple[float, float]:
        """Ours and the reference's rate, or seconds: each the median over the quads of the mean of its two."""
        times = [quad.rates for quad in self.quads]
        return median((t[0] + t[3]) / 2 for t in times), median((t[1] + t[2]) / 2 for t in times)

    def to_dict(self) -> dict[str, Any]:
        """The figures in plain types."""
        return {
            "name": self.name,
            "quads": [quad.rates for quad in self.quads],
            "controls": [quad.rates for quad in self.controls],
            "ratio": self.ratio,
            "control_ratio": self.control,
            "quotient": self.quotient,
            "interval_95": self.interval,
        }

    @property
    def shown(self) -> dict[str, str]:
        """A row by the heads of its columns, for arms that give seconds."""
        (low, high), (own, other) = self.interval, self.medians
        return {
            "": self.name,
            "over the other (95 %)": f"{self.quotient:.3f} ({low:.3f} to {high:.3f})",
            "control": f"{self.control:.3f}",
            "quads": f"{len(self.quads)}",
            "seconds": f"{own:.3f}",
            "the other's": f"{other:.3f}",
        }


def _median_ratio(quads: Sequence[Quad]) -> float:
    return median(quad.ratio for quad in quads) if quads else 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two arms that are measured by turns."""

    name: str
    ours: Arm
    reference: Arm
    has_control: bool = True  # false: both sides must go equally far, because what they end with is compared

    def measure(self, num_quads: int) -> Iterator[Comparison]:
        """Measure quads and controls in turn; after each pair give what is known by then."""
        quads, controls = list[Quad](), list[Quad]()
        for _ in range(num_quads):
            quads.append(Quad.measure(self.ours, self.reference))
            if self.has_control:
                controls.append(Quad.measure(self.reference, self.reference))
            yield Comparison(self.name, tuple(quads), tuple(controls))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
