"""How much a run writes in a day, how long its drives last at that, and what is said where it is too much."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from nvme_offload.offload.config.section import OffloadOptimizerConfig
from nvme_offload.offload.durable.rewrite_every import MAX_PERIOD, SECONDS_PER_DAY, DurableBytes, costs_of
from nvme_offload.offload.host.available_memory import ranks_on_host
from nvme_offload.offload.units import TB
from nvme_offload.optim.warn import warn_user

_SURE_SECONDS = 60.0
"""After so much training the rate is taken for that of the run."""


class _Moment(NamedTuple):
    seconds: float
    written: int


class Wear:
    """Watches what is written from the end of the first step on.

    Where that is more than the section allows, it says so once, with the section that would keep it.

    Args:
        section: has the limit, which the ranks of a host share, and what the drives may still be written.
        written: bytes that were written so far, of everything.
        size: of the state that is, or could be, rewritten every few steps.
        period: every how many steps it is; None: it ends with its process.
    """

    def __init__(
        self,
        section: OffloadOptimizerConfig,
        written: Callable[[], int],
        size: Callable[[], DurableBytes],
        period: int | None,
    ) -> None:
        self._section = section
        self._written = written
        self._size = size
        self._period = period
        self._begun: _Moment | None = None
        self._is_said = False
        self.written_per_day: float | None = None
        """Bytes, at the rate of this process until its latest step ended; None before the second one."""

    @property
    def stats(self) -> dict[str, Any]:
        """The fields of `OptimizerStats` about wear."""
        per_day, endurance = self.written_per_day, self._section.endurance
        return {
            "rewrite_every": self._period,
            "written_per_day": per_day,
            "days_of_life": endurance / per_day if endurance is not None and per_day else None,
        }

    def note_step(self) -> None:
        """A step has ended."""
        now = _Moment(time.monotonic(), self._written())
        if self._begun is None:
            self._begun = now
            return
        seconds = now.seconds - self._begun.seconds
        if seconds > 0:
            self.written_per_day = (now.written - self._begun.written) * SECONDS_PER_DAY / seconds
        limit = self._section.wear_limit
        if limit is not None and self.written_per_day is not None and seconds >= _SURE_SECONDS:
            self._hold_to(limit / ranks_on_host(), self.written_per_day)

    def _hold_to(self, limit: float, per_day: float) -> None:
        if per_day <= limit or self._is_said:
            return
        self._is_said = True
        shared = f" (the part of one rank, of {ranks_on_host()})" if ranks_on_host() > 1 else ""
        warn_user(
            f"{per_day / TB:.3g} TB a day are written at the rate of this run, and wear_limit is {limit / TB:.3g} TB a "
            f"day{shared}: {self._remedy(per_day, limit)}"
        )

    def _remedy(self, per_day: float, limit: float) -> str:
        size = self._size()
        now = size.state if self._period is None else costs_of(size, self._period).written
        for period in range(2, MAX_PERIOD + 1):
            then = per_day * costs_of(size, period).written / now if now else per_day
            if then <= limit:
                run = "a run with durable = true and" if self._period is None else "a new run with"
                return f"{run} rewrite_every = {period} would write about {then / TB:.3g} TB"
        if self._period is None:
            return "no rewrite_every of a durable run writes as little; give the state a host_budget, or a higher limit"
        return (
            "no rewrite_every of a durable run writes as little, nor does a host_budget, whose state is written, too; "
            "set a higher limit, or durable to false with a host_budget"
        )
