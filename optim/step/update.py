"""One subgroup of a step: its state is brought into memory, updated together with its parameters, and written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version
from torch.profiler import record_function

from nvme_offload.offload.storage.tier import Memory
from nvme_offload.optim.layout.subgroup import section_view, state_views
from nvme_offload.optim.state.phase import StepInputs, StepRecord
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.state.table import ParamTable
from nvme_offload.optim.stats import Meter
from nvme_offload.optim.tiers.grad_tier import PartitionStandIn
from nvme_offload.optim.updates.work import RunTensors, SubgroupStep


def read_update_write(
    store: StateStore,
    meter: Meter,
    record: StepRecord,
    order: Sequence[SlotRecord],
    position: int = 0,
) -> None:
    """Do the part of a step that belongs to ``order[position]``; its write runs behind.

    Args:
        store: the optimizer's state.
        meter: gets the time that the kernel takes.
        record: of the step; it notes what is done.
        order: subgroups in the order in which they will be needed: reads of those that follow go on meanwhile.
        position: of the subgroup.

    Raises:
        SwapIOError, CorruptionError: see `StepPipeline.acquire`; nothing was updated.
        OutOfSpaceError: see `Updater.prepare`; nothing was updated.
    """
    slot, inputs = order[position], record.inputs
    for ahead in order[position : position + 2]:
        assert ahead.updater is not None
        ahead.updater.expect(inputs.grads)
    with record_function("nvme_offload: read"):
        memory = store.pipeline.acquire(order, position, replay=False)
    with store.blocks.held_for_update(slot.subgroup, inputs.grads):
        with record_function("nvme_offload: update"):
            assert slot.updater is not None
            work = _work_of(slot, memory, inputs, store.table)
            update = slot.updater.prepare(work)
            # The kernel writes by address: a graph from before the step must not use the new values unnoticed.
            increment_version([store.table[index].leaf for index in work.runs])
            with meter.computing("compute", slot.subgroup.index):
                store.pipeline.will_change(slot, updated=work.runs)
                record.update(slot, update)
        with record_function("nvme_offload: write"):
            store.pipeline.release(slot)


def _work_of(slot: SlotRecord, memory: Memory, inputs: StepInputs, table: ParamTable) -> SubgroupStep:
    """Collect the tensors of all runs that have a gradient."""
    subgroup, runs = slot.subgroup, {}
    for run in subgroup.runs:
        if (grad := inputs.grads.get(run.param)) is not None:
            runs[run.param] = RunTensors(
                table[run.param].view(run),
                _flat(grad)[run.start : run.stop],
                section_view(subgroup, memory, "master", run),
                state_views(subgroup, memory, run),
                table[run.param].checksums_of(run, on_device=slot.home.on_device),
                inputs.scalars[run.param],
            )
    return SubgroupStep(memory, runs, inputs.whole)


def _flat(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient in memory, 1D. Where it is on a tier, its block must be held."""
    return grad.flat if isinstance(grad, PartitionStandIn) else grad
