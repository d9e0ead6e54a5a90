"""Measure what a run writes in a day, and warn if it is too much."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from nvme_offload.aio_native import EngineStats
from nvme_offload.offload.activations.activation_swapper import ActivationSwapper
from nvme_offload.offload.config.section import MAX_PERIOD, OffloadOptimizerConfig
from nvme_offload.offload.durable.rewrite_every import SECONDS_PER_DAY, DurableBytes, costs_of
from nvme_offload.offload.host.available_memory import ranks_on_host
from nvme_offload.offload.units import TB
from nvme_offload.offload.warn import warn_user
from nvme_offload.optim.layout.master import DTYPE_OF_FORM
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.updates.logs import is_loggable

_SURE_SECONDS = 60.0
"""After so much training the rate is taken for that of the run."""


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
        self._is_said = False
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
        if per_day <= limit or self._is_said:
            return
        self._is_said = True
        shared = f" (the part of one rank, of {ranks_on_host()})" if ranks_on_host() > 1 else ""
        warn_user(
            f"{per_day / TB:.3g} TB a day are written at the rate of this run, and wear_limit is {limit / TB:.3g} TB a "
            f"day{shared}: {self._remedy(per_day, limit)}",
            of_this_rank=True,
        )

    def _remedy(self, per_day: float, limit: float) -> str:
        size = self._size
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

    @property
    def _written(self) -> int:
        """Bytes of all kinds that went to drives so far."""
        return sum(engine.bytes_written for engine in self._engines.stats())

    @property
    def _size(self) -> DurableBytes:
        """The bytes of the state that is logged, with what a base has besides; of all of it where none is."""
        size, durability = DurableBytes(state=0, tail=0, grad=0, numel=0), self._store.durability
        for subgroup in (slot.subgroup for slot in self._store.slots):
            if durability.period > 1 and not is_loggable(subgroup.form, subgroup.rule):
                continue
            dtype, numel = subgroup.tail_dtype, subgroup.numel
            size += DurableBytes(
                state=subgroup.size_bytes,
                tail=dtype.itemsize * numel if dtype else 0,
                grad=DTYPE_OF_FORM[subgroup.form].itemsize * numel,
                numel=numel,
            )
        return size
