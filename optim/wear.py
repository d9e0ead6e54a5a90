"""How much a run writes in a day, how long its drives last at that, and what is done where it is too much."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from nvme_offload.offload.config.section import OffloadOptimizerConfig
from nvme_offload.offload.durable.rewrite_every import (
    MAX_PERIOD,
    SECONDS_PER_DAY,
    DurableBytes,
    WithinLimit,
    costs_of,
    period_within,
)
from nvme_offload.offload.host.available_memory import ranks_on_host
from nvme_offload.offload.units import TB
from nvme_offload.optim.warn import warn_user

_SURE_SECONDS = 60.0
"""After so much training the rate is taken for that of the run."""


class Steering(NamedTuple):
    """What a limit of wear may change of a run."""

    fastest: int
    """The period that suits the drive."""
    most: int
    """The longest one that its logs have room for."""
    turn: Callable[[int], None]
    """Has the state rewritten every so many steps from the next one on."""


class _Moment(NamedTuple):
    seconds: float
    written: int
    steps: int


class Wear:
    """Watches what is written from the end of the first step on, and keeps it within what the section allows.

    With a period that may be chosen, it is chosen anew every minute, by what was written in that: the shortest from the
    fastest one on that is within the limit. Otherwise, or where none is, it says so once, and what to do.

    Args:
        section: has the limit, which the ranks of a host share, and what the drives may still be written.
        written: bytes that were written so far, of everything.
        size: of the state that is, or could be, rewritten every few steps.
        period: every how many steps it is; None: it ends with its process.
        steering: what may be changed; None: nothing.
    """

    def __init__(
        self,
        section: OffloadOptimizerConfig,
        written: Callable[[], int],
        size: Callable[[], DurableBytes],
        period: int | None,
        steering: Steering | None = None,
    ) -> None:
        self._section = section
        self._written = written
        self._size = size
        self._steering = steering
        self._begun: _Moment | None = None
        self._window = _Moment(0.0, 0, 0)
        self._steps = 0
        self._is_said = False
        self.period = period
        """Every how many steps the state is rewritten now."""
        self.written_per_day: float | None = None
        """Bytes, at the rate of this process until its latest step ended; None before the second one."""

    @property
    def stats(self) -> dict[str, Any]:
        """The fields of `OptimizerStats` about wear."""
        per_day, endurance = self.written_per_day, self._section.endurance
        return {
            "rewrite_every": self.period,
            "written_per_day": per_day,
            "days_of_life": endurance / per_day if endurance is not None and per_day else None,
        }

    def note_step(self) -> None:
        """A step has ended."""
        self._steps += 1
        now = _Moment(time.monotonic(), self._written(), self._steps)
        if self._begun is None:
            self._begun = self._window = now
            return
        if now.seconds > self._begun.seconds:
            self.written_per_day = _per_day(now.written - self._begun.written, self._begun, now)
        if self._section.wear_limit is not None and now.seconds - self._window.seconds >= _SURE_SECONDS:
            before, self._window = self._window, now
            self._keep_within(self._section.wear_limit / ranks_on_host(), before, now)

    def _keep_within(self, limit: float, before: _Moment, now: _Moment) -> None:
        per_day = _per_day(now.written - before.written, before, now)
        if self._steering is None or self.period is None:
            self._say(per_day, limit, lambda: self._remedy(per_day, limit))
            return
        found = period_within(
            self._size(),
            now=self.period,
            fastest=self._steering.fastest,
            most=self._steering.most,
            steps=_per_day(now.steps - before.steps, before, now),
            written=per_day,
            wear_limit=limit,
        )
        if found.period != self.period:
            self.period = found.period
            self._steering.turn(found.period)
        if found.excess:
            self._say(per_day, limit, lambda: _excess(found, limit))

    def _say(self, per_day: float, limit: float, remedy: Callable[[], str]) -> None:
        if per_day <= limit or self._is_said:
            return
        self._is_said = True
        shared = f" (the part of one rank, of {ranks_on_host()})" if ranks_on_host() > 1 else ""
        warn_user(
            f"{per_day / TB:.3g} TB a day are written at the rate of this run, and wear_limit is {limit / TB:.3g} TB a "
            f"day{shared}: {remedy()}"
        )

    def _remedy(self, per_day: float, limit: float) -> str:
        size = self._size()
        now = size.state if self.period is None else costs_of(size, self.period).written
        for period in range(2, MAX_PERIOD + 1):
            then = per_day * costs_of(size, period).written / now if now else per_day
            if then <= limit:
                durable = "" if self.period is not None else "durable = true and "
                return f"{durable}rewrite_every = {period} would write about {then / TB:.3g} TB"
        where = "give the state a host_budget, or" if self.period is None else "set"
        return f"no rewrite_every of a durable run writes as little; {where} a higher limit"


def _per_day(number: float, before: _Moment, now: _Moment) -> float:
    return number * SECONDS_PER_DAY / (now.seconds - before.seconds)


def _excess(found: WithinLimit, limit: float) -> str:
    room = "" if found.period == MAX_PERIOD else ", the longest that this run has room for,"
    return (
        f"rewritten every {found.period} steps{room} it writes {found.written_per_day / TB:.3g} TB, "
        f"{found.excess / TB:.3g} TB too much. What is in host memory is written, too, so a host_budget does not help: "
        "set a higher limit, or durable to false with a host_budget"
    )
