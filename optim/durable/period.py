"""Decide every how many steps a durable run is rewritten, where the section leaves that to a measurement."""

from dataclasses import replace

from nvme_offload.offload.config.section import OffloadOptimizerConfig
from nvme_offload.offload.durable.identity import read_identity
from nvme_offload.offload.durable.probe import measure_rates
from nvme_offload.offload.durable.rewrite_every import DurableBytes, auto_period
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.host.available_memory import ranks_on_host
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.optim.layout.master import TAIL_DTYPE, MasterForm, state_itemsize
from nvme_offload.optim.rules.rule import UpdateRule

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
