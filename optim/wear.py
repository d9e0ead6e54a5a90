"""How much a run writes in a day, and how long its drives last at that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nvme_offload.offload.config.section import OffloadOptimizerConfig
from nvme_offload.offload.durable.rewrite_every import MAX_PERIOD, SECONDS_PER_DAY, DurableBytes, costs_of
from nvme_offload.offload.units import TB
from nvme_offload.optim.warn import warn_user

_SURE_SECONDS = 60.0
"""After so much training the rate is taken for that of the run."""


class Wear:
    """Watches what is written from the end of the first step on, and says once that it is more than the section allows.

    Args:
        section: has the limit, and what the drives may still be written.
        written: bytes that were written so far, of everything.
        size: of the state.
        period: every how many steps that is rewritten; None: it ends with its process.
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
        self._begun: tuple[float, int] | None = None
        self._is_said = False
        self.written_per_day: float | None = None
        """Bytes, at the rate of this process until its latest step ended; None before the second one."""

    @property
    def stats(self) -> dict[str, Any]:
        """The fields of `OptimizerStats` about wear."""
        per_day, endurance = self.written_per_day, self._section.endurance
        return {
            "written_per_day": per_day,
            "days_of_life": endurance / per_day if endurance is not None and per_day else None,
        }

    def note_step(self) -> None:
        """A step has ended."""
        now, written, limit = time.monotonic(), self._written(), self._section.wear_limit
        if self._begun is None:
            self._begun = now, written
            return
        seconds = now - self._begun[0]
        if seconds <= 0:
            return
        self.written_per_day = per_day = (written - self._begun[1]) * SECONDS_PER_DAY / seconds
        if limit is not None and per_day > limit and seconds >= _SURE_SECONDS and not self._is_said:
            self._is_said = True
            warn_user(
                f"{per_day / TB:.3g} TB a day are written at the rate of this run, and wear_limit is {limit / TB:.3g} "
                f"TB a day: {self._remedy(per_day, limit)}"
            )

    def _remedy(self, per_day: float, limit: int) -> str:
        size = self._size()
        now = size.state if self._period is None else costs_of(size, self._period).written
        for period in range(2, MAX_PERIOD + 1):
            then = per_day * costs_of(size, period).written / now if now else per_day
            if then <= limit:
                durable = "" if self._period is not None else "durable = true and "
                return f"{durable}rewrite_every = {period} would write about {then / TB:.3g} TB"
        return "no rewrite_every of a durable run writes as little; give the state a host_budget, or a higher limit"
