"""One subgroup of a step: its state is brought into memory, updated together with its parameters, and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch.autograd.graph import increment_version
from torch.profiler import record_function

from nvme_offload.offload.storage.tier import Memory
from nvme_offload.optim.kernels import KernelPool, make_segment
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.masters import section_view, state_views
from nvme_offload.optim.state.progress import StepInputs, UnfinishedStep
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.stats import Meter
from nvme_offload.optim.tiers.grad_tier import PartitionStandIn
from nvme_offload.optim.tiles import RunTensors, update_in_torch, update_whole
from nvme_offload.optim.whole_params import WholeParams


def read_update_write(
    store: StateStore,
    meter: Meter,
    step: UnfinishedStep,
    inputs: StepInputs,
    order: Sequence[SlotRecord],
    position: int = 0,
) -> None:
    """Do the part of a step that belongs to ``order[position]``; its write runs behind.

    Args:
        store: the optimizer's state.
        meter: gets the time that the kernel takes.
        step: notes what is done.
        inputs: of the step.
        order: subgroups in the order in which they will be needed: reads of those that follow go on meanwhile.
        position: of the subgroup.

    Raises:
        SwapIOError, CorruptionError: see `StepPipeline.acquire`; nothing was updated.
    """
    slot = order[position]
    if store.mirror:
        for ahead in order[position : position + 2]:
            store.mirror.fetch(ahead.subgroup, store.table.params, inputs.grads)
    with record_function("nvme_offload: read"):
        memory = store.pipeline.acquire(order, position)
    with store.blocks.held_for_update(slot.subgroup, inputs.grads):
        step.updating = True
        store.pipeline.will_change(slot)
        with meter.computing("compute", slot.subgroup.index), record_function("nvme_offload: update"):
            step.changed_tiles += update_subgroup(slot, memory, inputs, store)
        # No call in between: a signal handler sees it updated, or cut off inside.
        del step.pending[slot]
        step.updating = False
        with record_function("nvme_offload: write"):
            store.pipeline.release(slot)


def update_subgroup(slot: SlotRecord, memory: Memory, inputs: StepInputs, store: StateStore) -> int:
    """Update the state in `memory` and the parameters it belongs to.

    Returns:
        Tiles of 65536 elements that somebody else had changed since the last update.
    """
    subgroup, table, mirror = slot.subgroup, store.table, store.mirror
    copies = mirror.take(subgroup) if mirror else None
    work: dict[int, RunTensors] = {}
    for run in subgroup.runs:
        if run.param not in inputs.grads:
            continue
        record = table[run.param]
        param = record.view(run)
        grad = _flat(inputs.grads[run.param])[run.start : run.stop]
        if copies is not None:
            param, grad = copies.param(run, param.dtype), copies.grad(run, grad.dtype)
        master, states = section_view(subgroup, memory, "master", run), state_views(subgroup, memory, run)
        scalars = inputs.scalars[run.param]
        work[run.param] = RunTensors(param, grad, master, states, record.checksums_of(run), scalars)
    changed_tiles = _run_rule(subgroup.rule, work, inputs.whole, store)
    if mirror and copies is not None:
        mirror.copy_back(subgroup, copies, table.params, inputs.grads)
    # The kernel writes by address: without this, a graph kept from before the step would use the new values unnoticed.
    increment_version([table[index].leaf for index in work])
    return changed_tiles


def _run_rule(rule: UpdateRule, work: Mapping[int, RunTensors], whole: WholeParams, store: StateStore) -> int:
    """Update runs by parameter index in whichever way the rule is written; returns blocks found changed."""
    if rule.whole:
        return sum(
            update_whole(rule, run, store.table[index].param, store.kernels, partial(whole.through, index))
            for index, run in work.items()
        )
    if rule.kernel:
        return _update_natively(rule, work.values(), store.kernels)
    return sum(update_in_torch(rule, run, store.kernels) for run in work.values())


def _update_natively(rule: UpdateRule, work: Iterable[RunTensors], pool: KernelPool) -> int:
    segments = [
        make_segment(
            param=run.param,
            grad=run.grad,
            master=run.master,
            states=run.states,
            checksums=run.checksums,
            rule=rule,
            scalars=run.scalars.of_rule,
            grad_scale=run.scalars.grad_scale,
        )
        for run in work
    ]
    return sum(pool.update(segments))


def _flat(grad: torch.Tensor) -> torch.Tensor:
    """A gradient in memory, 1D. Where it is on a tier, its block must be held."""
    return grad.flat if isinstance(grad, PartitionStandIn) else grad
