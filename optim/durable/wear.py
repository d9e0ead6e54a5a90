"""Measure what a run writes in a day, and warn if it is too much."""

import time
from typing import Any, NamedTuple

from nvme_offload.aio_native.engine import EngineStats
from nvme_offload.offload.activations.activation_swapper import ActivationSwapper
from nvme_offload.offload.config.section import OffloadOptimizerConfig
from nvme_offload.offload.durable.rewrite_every import SECONDS_PER_DAY
from nvme_offload.offload.host.available_memory import ranks_on_host
from nvme_offload.offload.units import TB
from nvme_offload.offload.warn import Once
from ..state.store import StateStore

_SURE_SECONDS = 60.0
"""After so much training the rate is taken for that of the run."""

_OF_DURABLE = (
    'a new run with rewrite_every = "auto" takes the period that keeps it, where one does, and a run with '
    "durable = false and a host_budget writes less"
)
_OF_OTHERS = (
    'a host_budget keeps state in memory, and a run with durable = true and rewrite_every = "auto" takes the period '
    "that keeps it, where one does"
)


class _Moment(NamedTuple):
    seconds: float
    written: int


class EnginesOfRun:
    """The drive engines that work for a run: of its state, of parameters and gradients, of activations."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self.activations: ActivationSwapper | None = None
        """Keeps the activations of the model that is trained."""

    def count(self, activations: ActivationSwapper) -> None:
        """Count what moves activations, too."""
        self.activations = activations

    def stats(self) -> list[EngineStats]:
        """Return the counters of each."""
        tiers = self._store.tier, self.activations.tier if self.activations is not None else None
        return [tier.stats() for tier in tiers if tier is not None] + self._store.blocks.engine_stats


class Wear:
    """Watches what is written from the first step on, and warns once if it is more than the section allows."""

    def __init__(self, section: OffloadOptimizerConfig, store: StateStore, engines: EnginesOfRun) -> None:
        self._section = section
        self._store = store
        self._engines = engines
        self._period = store.durability.period if store.durability.takes_all else None
        self._begun: _Moment | None = None
        self._once = Once()
        self.written_per_day: float | None = None
        """Bytes, at the rate of this process until its latest step ended; None before the second one."""

    @property
    def stats(self) -> dict[str, Any]:
        """The fields of `OptimizerStats` about wear."""
        return {"rewrite_every": self._period, "written_per_day": self.written_per_day}

    def note_step(self) -> None:
        """Note that a step has ended."""
        now = _Moment(time.monotonic(), self._written)
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
        if per_day <= limit:
            return
        shared = f" (the part of one rank, of {ranks_on_host()})" if ranks_on_host() > 1 else ""
        self._once.warn(
            "wear_limit",
            f"{per_day / TB:.3g} TB a day are written at the rate of this run, and wear_limit is {limit / TB:.3g} TB a "
            f"day{shared}: {_OF_DURABLE if self._period else _OF_OTHERS}; or set a higher limit",
            of_this_rank=True,
        )

    @property
    def _written(self) -> int:
        return sum(engine.bytes_written for engine in self._engines.stats())
