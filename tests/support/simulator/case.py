"""What a seed decides: a subject, its options, the calls, and what strikes them: plain data, so that it can shrink."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.support.failing_drive import Op
from tests.support.simulator.drive import DriveFault

STRIKES = ("raise", "sigint", "raise in a wait", "sigint in a wait")
"""An exception or a Ctrl-C: at a point where CPython runs handlers, or out of a wait."""
_MOST_POINTS = 1500


@dataclass(frozen=True)
class Strike:
    """What befalls a call: at the `number`-th point, or out of the `number`-th wait."""

    kind: str
    number: int


@dataclass(frozen=True)
class Call:
    """One call into a subject."""

    name: str
    number: int  # decides what the subject leaves open
    strike: Strike | None = None


@dataclass(frozen=True)
class Case:
    """Everything about one run, but the order in which threads and drive take turns, which `seed` decides, too."""

    seed: int
    subject: str
    options: Mapping[str, Any]
    restlessness: float
    preemption: str
    calls: tuple[Call, ...]
    faults: tuple[DriveFault, ...]
    full_at: tuple[int, ...]  # numbers of the allocations that find the drive full

    def keeping(self, calls: Sequence[int], num_faults: Sequence[int]) -> Case:
        """With these calls and faults alone, by place."""
        kept = tuple(self.faults[i] for i in num_faults)
        return replace(self, calls=tuple(self.calls[i] for i in calls), faults=kept)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.subject} {dict(self.options)}"]
        lines.append(f"  restless {self.restlessness}, preempted at {self.preemption}, full at {self.full_at}")
        lines += [f"  fault {place}: {fault}" for place, fault in enumerate(self.faults)]
        lines += [f"  call {place}: {call}" for place, call in enumerate(self.calls)]
        return "\n".join(lines)


def draw_calls(draw: random.Random, weights: Mapping[str, int], most: int) -> tuple[Call, ...]:
    """Calls by the weights of their names; in two of three cases something strikes one to three of them."""
    count = draw.randint(3, most)
    names = draw.choices(list(weights), weights=list(weights.values()), k=count)
    struck = set(draw.sample(range(count), min(count, draw.randint(1, 3)))) if draw.random() < 0.65 else set()
    return tuple(
        Call(name, draw.randrange(1 << 30), draw_strike(draw) if place in struck else None)
        for place, name in enumerate(names)
    )


def draw_strike(draw: random.Random) -> Strike:
    """Early points are as likely as late ones, on a scale of powers."""
    kind = draw.choices(STRIKES, weights=(4, 2, 2, 1))[0]
    most = 12 if "wait" in kind else _MOST_POINTS
    return Strike(kind, int(most ** draw.random()))


def draw_faults(draw: random.Random, *, checksums: bool) -> tuple[DriveFault, ...]:
    """None in a third of the cases; flipped bits only where they can be seen."""
    if draw.random() < 0.35:
        return ()
    # Together below the 64 attempts without progress after which an engine gives a request up.
    kinds = ["short", "short", "eintr", "eagain", "eio", "eio", "enospc"] + (["flip"] if checksums else [])
    faults = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(kinds)
        most = 15 if kind in ("short", "eintr", "eagain") else 12
        first, count = draw.randint(1, 60), draw.randint(1, most)
        faults.append(DriveFault(kind, first, count, draw.choice((None, Op.READ, Op.WRITE))))
    return tuple(faults)


def draw_case(seed: int, subjects: Mapping[str, Any]) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    name = draw.choices(list(subjects), weights=[subject.weight for subject in subjects.values()])[0]
    subject = subjects[name]
    options = subject.draw_options(draw)
    full = draw.random() < 0.15
    pace = draw.choice((0.02, 0.1, 0.4)), draw.choice(("none", "none", "calls", "opcodes"))
    calls = draw_calls(draw, subject.calls, subject.most_calls)
    faults = draw_faults(draw, checksums=bool(options.get("checksums")))
    return Case(seed, name, options, *pace, calls, faults, full_at=(draw.randint(1, 8),) if full else ())
