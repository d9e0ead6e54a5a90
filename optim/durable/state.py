"""Keep the state of a durable run: its files, and what its store asks of it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch.autograd.graph import increment_version

from nvme_offload.aio_native.bell import Bell
from nvme_offload.offload.config.section import OffloadConfig, OffloadOptimizerConfig
from nvme_offload.offload.durable.chain import bytes_needed
from nvme_offload.offload.durable.identity import read_identity
from nvme_offload.offload.durable.rewrite_every import DurableBytes, auto_period, measure_rates
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.errors import ConfigWarning
from nvme_offload.offload.host.available_memory import ranks_on_host
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.warn import warn_user
from ..layout.master import TAIL_DTYPE, MasterForm, state_itemsize
from ..layout.subgroup import Subgroup
from ..rules.rule import UpdateRule
from ..state.durability import Durability, Ground
from ..state.pipeline import StepPipeline
from ..state.slots import SlotRecord
from ..state.table import ParamRecord
from ..updates.log_state import LogState
from ..updates.logged import DurableMeans
from ..updates.logs import SlotLogs, is_loggable
from ..updates.work import Means
from .latest import LatestCommit
from .sealing import Sealing

_UPDATES_PER_THREAD = 0.5e9  # of parameters in a second: see `perf/benchmarks/bench_kernel.py`
_ITEMSIZE = 2  # of a gradient in 16 bits


def period_of(
    section: OffloadOptimizerConfig, run: DurableRun, tier: NvmeTier, rule: UpdateRule, num_threads: int
) -> int:
    """Return every how many steps the state of a run is rewritten, from its beginning to its end.

    The section says it. With "auto" a run that was found goes on with what it wrote down when it began; a new one
    decides now, see `auto_period`.
    """
    if isinstance(section.rewrite_every, int):
        return section.rewrite_every
    if committed := [*run.found, *run.snapshots.all.values()]:
        return int(read_identity(run.folder, committed[0].identity).get("rewrite_every", 1))
    tail = TAIL_DTYPE[MasterForm.SPLIT]
    assert tail is not None
    size = DurableBytes(state=state_itemsize(MasterForm.SPLIT, rule.states), tail=tail.itemsize, grad=_ITEMSIZE)
    rates = replace(measure_rates(tier), update=num_threads * _UPDATES_PER_THREAD)
    return auto_period(size, rates, section.wear_limit and section.wear_limit / ranks_on_host(), section.copies)


def open_durability(config: OffloadConfig, rule: UpdateRule, ground: Ground) -> Durability:
    """Open the files of an optimizer's state; if the section names a durable run, those of that run."""
    section = config.zero_optimization.offload_optimizer
    if (run := DurableRun.of(config)) is None:
        return Durability(NvmeTier(config) if section.device == "nvme" else None)
    tier = NvmeTier(config, space=run.space)
    try:
        return DurableState(run, tier, period_of(section, run, tier, rule, ground.kernels.num_threads), ground)
    except BaseException:
        tier.close()
        run.close()
        raise


class DurableState(Durability):
    """Has all state in a run that outlives the process.

    Args:
        run: that was opened; it is this object's to close.
        tier: over its files.
        period: every how many steps a subgroup is rewritten at the latest, where its updates can be logged.
    """

    takes_all = True

    def __init__(self, run: DurableRun, tier: NvmeTier, period: int, ground: Ground) -> None:
        super().__init__(tier)
        self.run = run
        self.period = period
        self.latest = LatestCommit(run, ground.meter)
        self.logs = SlotLogs(run.extents, ground.table, ground.kernels, period)
        self.seal: Sealing = Sealing(run, self.logs, self.latest, ground)
        self._ground = ground

    @property
    def run_found(self) -> str | None:  # type: ignore[override]
        """See `Durability`."""
        return self.run.name if self.run.found else None

    @property
    def may_write(self) -> bool:  # type: ignore[override]
        """See `Durability`."""
        return self.latest.may_write

    def means(self, ground: Ground) -> Means:
        """See `Durability`."""
        means = ground.kernels, ground.param_of, ground.fused, ground.computing
        return DurableMeans(*means, logs=self.logs, begin_writing=self.latest.begin_writing)

    def new_log(self) -> LogState:
        """See `Durability`."""
        return LogState()

    def size_in_buffer(self, subgroup: Subgroup) -> int:
        """Return the bytes of a subgroup with the longest log it is read with, or the entry that it gets."""
        layout = self.logs.layout_of(subgroup)
        return layout.base.size_bytes + (layout.period - 1) * layout.entry_bytes

    def log_itemsize(self, record: ParamRecord) -> int:
        """See `Durability`."""
        num_logs = self.period - 1 if is_loggable(record.form, record.rule) else 0
        return num_logs * record.log_dtype.itemsize

    def space_of(self, subgroups: Sequence[Subgroup]) -> list[int]:
        """See `Durability`."""
        if self.run.is_under_way:
            return []
        return bytes_needed(map(self.logs.layout_of, subgroups), self.run.extents.steps_back)

    def promise(self, subgroups: Sequence[Subgroup]) -> None:
        """See `Durability`."""
        layouts = [self.logs.layout_of(subgroup) for subgroup in subgroups]
        if self.period > 1 and not any(layout.period > 1 for layout in layouts):
            warn_user(
                f"rewrite_every = {self.period} is done as 1 here: parameters in fp32, and those of a rule without a "
                "native kernel, are rewritten in every step",
                ConfigWarning,
            )
        if not self.run.is_under_way:
            self.run.extents.add(layouts)

    def drop(self, first: int) -> None:
        """See `Durability`."""
        self.run.extents.drop(first)

    def in_order_of_reading(self, slots: Sequence[SlotRecord]) -> list[SlotRecord]:
        """Return subgroups in the order in which a step had better go through them, where updates can be logged.

        What is in a buffer comes first, and last what would have the longest log to read in the step after it: what
        comes last stays in the buffers. Those in memory of their own keep their places among the others.
        """
        if self.period == 1:
            return list(slots)
        extents = self.run.extents
        visitors = [slot for slot in slots if slot.home.is_visited]
        visitors.sort(key=lambda slot: (slot.buffer is None, extents.num_logged_next(slot.index)))
        following = iter(visitors)
        return [next(following) if slot.home.is_visited else slot for slot in slots]

    def is_as_committed(self, slot: SlotRecord) -> bool:
        """See `Durability`."""
        return self.may_write and self.run.extents.is_committed(slot.index) and not self.seal.is_changed(slot)

    @torch.no_grad()
    def take_back(self, slots: Sequence[SlotRecord], pipeline: StepPipeline) -> None:
        """See `Durability`."""
        self._ground.mirror.end_step()  # what is on its way to a device is there before something else takes its place
        for slot in slots:
            self.run.extents.take_back_write(slot.index)
            self.seal.find(slot, pipeline)
        for position, slot in enumerate(slots):
            self.seal.bring_back(slot, pipeline.acquire(slots, position, for_change=False, replay=False))
        table = self._ground.table
        increment_version([table[run.param].leaf for slot in slots for run in slot.subgroup.runs])

    def end_updates(self, pipeline: StepPipeline, bell: Bell) -> None:
        """Begin the commit of the step."""
        self.latest.begin(pipeline, bell)

    def begin_load(self, subgroups: Iterable[Subgroup]) -> None:
        """See `Durability`. A run that was found and not resumed is left as it is until the first commit."""
        run = self.run
        self.latest.give_up("a load in their place")
        if run.is_under_way:
            run.write_over_found([self.logs.layout_of(subgroup) for subgroup in subgroups])
        elif run.found:
            run.forget_commits()

    def close(self) -> None:
        """See `Durability`."""
        super().close()
        self.run.close()
