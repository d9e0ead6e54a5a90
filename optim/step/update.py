"""One subgroup of a step: its state is brought into memory, updated together with its parameters, and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.autograd.graph import increment_version
from torch.profiler import record_function

from nvme_offload.offload.devices.device import is_host
from nvme_offload.offload.storage.tier import Memory
from nvme_offload.optim.device_tiles import update_on_device
from nvme_offload.optim.kernels import Segment, make_segment
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.device_mirror import MirroredRuns
from nvme_offload.optim.state.masters import section_view, state_views
from nvme_offload.optim.state.phase import StepInputs, StepRecord
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.stats import Meter
from nvme_offload.optim.tiers.grad_tier import PartitionStandIn
from nvme_offload.optim.tiles import RunTensors, update_in_torch, update_whole


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
        meter: gets the time that the kernel takes, and that spent waiting for a device.
        record: of the step; it notes what is done.
        order: subgroups in the order in which they will be needed: reads of those that follow go on meanwhile.
        position: of the subgroup.

    Raises:
        SwapIOError, CorruptionError: see `StepPipeline.acquire`; nothing was updated.
    """
    slot, inputs = order[position], record.inputs
    if store.mirror:
        for ahead in (slot, *order[position + 1 : position + 2]):
            if not ahead.is_on_device:
                store.mirror.fetch(ahead.subgroup, store.table.params, inputs.grads)
    with record_function("nvme_offload: read"):
        memory = store.pipeline.acquire(order, position, replay=False)
    copies: MirroredRuns | None = None
    if store.mirror and not slot.is_on_device:
        with meter.waiting("device"):
            copies = store.mirror.take(slot.subgroup)
    with store.blocks.held_for_update(slot.subgroup, inputs.grads):
        with meter.computing("compute", slot.subgroup.index), record_function("nvme_offload: update"):
            update = update_of(slot, memory, inputs, store, copies)
            store.pipeline.will_change(slot)
            slot.updated = frozenset(run.param for run in slot.subgroup.runs if run.param in inputs.grads)
            record.update(slot, update)
        with record_function("nvme_offload: write"):
            store.pipeline.release(slot)


def update_of(
    slot: SlotRecord, memory: Memory, inputs: StepInputs, store: StateStore, copies: MirroredRuns | None = None
) -> Callable[[], int]:
    """What updates the state in `memory` and the parameters it belongs to. Before it is called nothing changes.

    Args:
        slot: of the subgroup.
        memory: with its state.
        inputs: of the step.
        store: the optimizer's state.
        copies: of the parameters and gradients, where those are on a device.

    Returns:
        To be called once. Returns how many tiles of 65536 elements somebody else had changed since the last update.
    """
    subgroup, table, mirror = slot.subgroup, store.table, store.mirror
    work: dict[int, RunTensors] = {}
    for run in subgroup.runs:
        if run.param not in inputs.grads:
            continue
        record = table[run.param]
        param = record.view(run)
        grad = _flat(inputs.grads[run.param])[run.start : run.stop]
        if copies is not None:
            param = param if is_host(param.device) else copies.param(run, param.dtype)
            grad = grad if is_host(grad.device) else copies.grad(run, grad.dtype)
        master, states = section_view(subgroup, memory, "master", run), state_views(subgroup, memory, run)
        scalars = inputs.scalars[run.param]
        work[run.param] = RunTensors(
            param, grad, master, states, record.checksums_of(run, on_device=slot.is_on_device), scalars
        )
    by_rule = (
        _on_device(subgroup.rule, work, store) if slot.is_on_device else _by_rule(slot, memory, work, inputs, store)
    )

    def update_and_copy_back() -> int:
        changed_tiles = by_rule()
        if mirror and copies is not None:
            mirror.copy_back(subgroup, copies, table.params, inputs.grads)
        return changed_tiles

    # The kernel writes by address: without this, a graph kept from before the step would use the new values unnoticed.
    increment_version([table[index].leaf for index in work])
    return by_rule if copies is None else update_and_copy_back


def _on_device(rule: UpdateRule, work: Mapping[int, RunTensors], store: StateStore) -> Callable[[], int]:
    """What updates runs where they are. How many tiles were found changed, the host learns in the next step."""

    def update() -> int:
        for run in work.values():
            store.changed_on_device.append(update_on_device(rule, run))
        return 0

    return update


def _by_rule(
    slot: SlotRecord, memory: Memory, work: Mapping[int, RunTensors], inputs: StepInputs, store: StateStore
) -> Callable[[], int]:
    """What updates runs, by parameter index, in whichever way the rule is written; returns tiles found changed."""
    pool, rule = store.kernels, slot.subgroup.rule
    if store.sealing is not None and rule.kernel and not rule.whole:
        store.sealing.begin_writing()
        return store.sealing.logs.update_of(slot, memory, work)
    if rule.whole:
        return lambda: sum(
            update_whole(rule, run, store.table[index].param, pool, partial(inputs.whole.through, index))
            for index, run in work.items()
        )
    if rule.kernel:
        segments = [_segment(rule, run) for run in work.values()]
        return lambda: sum(pool.update(segments))
    return lambda: sum(update_in_torch(rule, run, pool) for run in work.values())


def _segment(rule: UpdateRule, run: RunTensors) -> Segment:
    return make_segment(
        param=run.param,
        grad=run.grad,
        master=run.master,
        states=run.states,
        checksums=run.checksums,
        rule=rule,
        scalars=run.scalars.of_rule,
        grad_scale=run.scalars.grad_scale,
    )


def _flat(grad: torch.Tensor) -> torch.Tensor:
    """A gradient in memory, 1D. Where it is on a tier, its block must be held."""
    return grad.flat if isinstance(grad, PartitionStandIn) else grad
