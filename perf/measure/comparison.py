"""One thing beside another on a machine whose speed changes by the minute.

A `Case` has two arms. A quad measures them in the order ours, reference, reference, ours, so that a drift that is
steady over the quad cancels. After each one comes a control quad with the reference on both sides: it shows the luck of
the minute. The answer is the median ratio divided by the median ratio of the controls, with an interval from the quads
themselves.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, ClassVar

Arm = Callable[[], float]  # measures once. Gives bytes per second, or seconds: the same in both arms of a case.

RESAMPLES = 10_000
SEED = 20


@dataclass(frozen=True)
class Quad:
    """Rates, or seconds, in the order in which they were measured: ours, reference, reference, ours."""

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
class Round:
    """A quad and its control, and what was noted before them."""

    quad: Quad
    control: Quad | None = None
    noted: Mapping[str, float] = field(default_factory=dict)
    counts: bool = True  # false: the machine was disturbed


@dataclass(frozen=True)
class Comparison:
    """Rounds of a case, in the order in which they were measured."""

    name: str
    rounds: tuple[Round, ...]
    head: ClassVar = ("", "over the other (95 %)", "control", "quads", "seconds", "the other's")

    @property
    def counted(self) -> list[Round]:
        """The rounds in which nothing was disturbed; all of them if there is no such round."""
        return [one for one in self.rounds if one.counts] or list(self.rounds)

    @property
    def ratios(self) -> list[float]:
        """Ours over the reference in each round that counts."""
        return [one.quad.ratio for one in self.counted]

    @property
    def control_ratios(self) -> list[float]:
        """The reference over itself in each round that counts; 1 if the case has no control."""
        return [one.control.ratio for one in self.counted if one.control] or [1.0]

    @property
    def ratio(self) -> float:
        """Median of the ratio over the quads."""
        return median(self.ratios)

    @property
    def control(self) -> float:
        """Median of the ratio over the controls: 1 on a quiet machine."""
        return median(self.control_ratios)

    @property
    def quotient(self) -> float:
        """The answer: what is left of the ratio when the control is taken out."""
        return self.ratio / self.control

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the quotients of resampled quads and controls (bootstrap, percentile method, fixed seed)."""
        source, ratios, controls = random.Random(SEED), self.ratios, self.control_ratios
        quotients = sorted(
            median(source.choices(ratios, k=len(ratios))) / median(source.choices(controls, k=len(controls)))
            for _ in range(RESAMPLES)
        )
        return quotients[round(0.025 * (RESAMPLES - 1))], quotients[round(0.975 * (RESAMPLES - 1))]

    def as_dict(self) -> dict[str, Any]:
        """The figures of the rounds that count, in plain types."""
        return {
            "quads": [one.quad.rates for one in self.counted],
            "controls": [one.control.rates for one in self.counted if one.control],
            "ratio": self.ratio,
            "control_ratio": self.control,
            "quotient": self.quotient,
            "interval_95": self.interval,
        }

    def to_dict(self) -> dict[str, Any]:
        """The same with the name and with every round, also those that do not count."""
        rounds = [
            {"quad": {"rates": one.quad.rates}, "control": one.control and {"rates": one.control.rates}, **one.noted}
            for one in self.rounds
        ]
        return {"name": self.name, "rounds": rounds, **self.as_dict()}

    def cells(self) -> list[str]:
        """A row below `head`, for arms that give seconds."""
        low, high = self.interval
        times = [one.quad.rates for one in self.counted]
        own, other = (median(mean((t[i], t[j])) for t in times) for i, j in ((0, 3), (1, 2)))
        return [
            self.name,
            f"{self.quotient:.3f} ({low:.3f} to {high:.3f})",
            f"{self.control:.3f}",
            f"{len(self.counted)} of {len(self.rounds)}",
            f"{own:.3f}",
            f"{other:.3f}",
        ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two arms that are measured by turns."""

    name: str
    ours: Arm
    reference: Arm
    has_control: bool = True  # false: both sides must go equally far, because what they end with is compared
    before: Callable[[], tuple[Mapping[str, float], bool]] = lambda: ({}, True)
    """Called before each round. Gives what to note of it, and whether it counts."""

    def measure(self, num_quads: int) -> Iterator[Comparison]:
        """Measure quads and controls in turn; after each round give what is known by then."""
        rounds: list[Round] = []
        for _ in range(num_quads):
            noted, counts = self.before()
            quad = Quad.measure(self.ours, self.reference)
            control = Quad.measure(self.reference, self.reference) if self.has_control else None
            rounds.append(Round(quad, control, noted, counts))
            yield Comparison(self.name, tuple(rounds))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
