"""One thing beside another on a machine whose speed changes by the minute.

A case has two arms. A quad measures them in the order ours, reference, reference, ours, so that a drift that is
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
    """Quads of a case, in the order in which they were measured, and the control behind each."""

    name: str
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
        source, pairs = random.Random(SEED), (self.quads, self.controls)
        ratios, controls = ([quad.ratio for quad in quads] for quads in pairs)
        quotients = sorted(
            median(source.choices(ratios, k=len(ratios))) / median(source.choices(controls, k=len(controls)))
            for _ in range(RESAMPLES)
        )
        return quotients[round(0.025 * (RESAMPLES - 1))], quotients[round(0.975 * (RESAMPLES - 1))]

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


def compared(name: str, ours: Arm, reference: Arm, num_quads: int) -> Iterator[Comparison]:
    """Measure quads and controls in turn; after each pair give what is known by then."""
    quads, controls = list[Quad](), list[Quad]()
    for _ in range(num_quads):
        quads.append(Quad.measure(ours, reference))
        controls.append(Quad.measure(reference, reference))
        yield Comparison(name, tuple(quads), tuple(controls))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
