"""Bring one subgroup's state into memory, update it together with its parameters, and write it."""

from collections.abc import Sequence
from itertools import islice

import torch
from torch.autograd.graph import increment_version

from nvme_offload.offload._torch_private import recorded
from ..layout.flat import PartitionStandIn
from ..state.body import StepState
from ..state.condition import StepPhase
from ..state.phase import StepRecord
from ..state.slots import SlotRecord
from ..state.table import PlacesInTable
from ..telemetry.stats import Meter
from ..updates.work import SubgroupStep
from .schedule import LOOK_AHEAD


def read_update_write(
    store: StepState, meter: Meter, record: StepRecord, order: Sequence[SlotRecord], position: int = 0
) -> None:
    """Do the part of a step that belongs to ``order[position]``; its write runs behind.

    Subgroups that follow in `order` are read meanwhile; the next one's copies come from a device. If
    `StepPipeline.acquire` or `Updater.prepare` raises, nothing was updated.
    """
    slot, inputs = order[position], record.inputs
    # What is fetched of those that are not pending would lack gradients that are not final yet.
    pending = filter(record.pending.__contains__, order[position : position + LOOK_AHEAD])
    for ahead in islice(pending, 2):
        assert ahead.updater is not None
        ahead.updater.expect(inputs.grads)
    with recorded("nvme_offload: read"):
        memory = store.pipeline.acquire(order, position, replay=False)
    in_order, is_gathered = record.phase is not StepPhase.BEGUN, record.phase in (StepPhase.BEGUN, StepPhase.BEHIND)
    with store.blocks.held_for_update(slot.subgroup, inputs.grads, in_order=in_order, is_gathered=is_gathered):
        with recorded("nvme_offload: update"):
            assert slot.updater is not None
            runs = [run for run in slot.subgroup.runs if run.param in inputs.grads]
            grads = {run.param: _flat(inputs.grads[run.param]) for run in runs}
            places = PlacesInTable(store.table, on_device=slot.home.on_device)
            work = SubgroupStep(slot.subgroup, memory, grads, inputs.scalars, inputs.whole, places)
            update = slot.updater.prepare(work)
            # The kernel writes by address: a graph from before the step must not use the new values unnoticed.
            increment_version([store.table[index].leaf for index in work.grads])
            with meter.computing("compute", slot.subgroup.index):
                store.pipeline.will_change(slot, updated=work.grads)
                record.update(slot, update)
                if not slot.home.on_device:
                    store.table.keep_changes(runs, record.number, store.means.kernels)
        with recorded("nvme_offload: write"):
            store.pipeline.release(slot)


def _flat(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient in memory, 1D. If it is on a tier, its block must be held."""
    return grad.partition.view() if isinstance(grad, PartitionStandIn) else grad
