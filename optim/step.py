"""One step: gradients are collected, their norm taken, the scalars found, and each subgroup in turn updated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.profiler import record_function

from nvme_offload.offload.storage.tier import Memory
from nvme_offload.optim.grad_norm import clip_coefficient, total_norm
from nvme_offload.optim.groups import check_group
from nvme_offload.optim.interrupt import DeferredInterrupt
from nvme_offload.optim.kernels import Segment, make_segment
from nvme_offload.optim.layout.flat import flat_grad
from nvme_offload.optim.rules.rule import UpdateRule, rounded
from nvme_offload.optim.state.masters import section_view, state_views
from nvme_offload.optim.state.progress import StepInputs, UnfinishedStep
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.stats import Meter
from nvme_offload.optim.tiers.grad_tier import PartitionStandIn
from nvme_offload.optim.tiles import RunTensors, StepScalars, update_in_torch, update_whole
from nvme_offload.optim.warn import warn_user
from nvme_offload.optim.whole_params import WholeParams


class Stepper:
    """Takes steps, and finishes those that stopped halfway.

    Args:
        store: the optimizer's state.
        rule: the optimizer's.
        meter: counts steps and collects their timeline.
        max_norm: ``gradient_clipping`` of the section; 0 does not clip.
        norm_group: further ranks whose gradients belong to the same global norm.
    """

    def __init__(
        self, store: StateStore, rule: UpdateRule, meter: Meter, max_norm: float, norm_group: dist.ProcessGroup | None
    ) -> None:
        self.total_norm = float("nan")
        """Norm of the latest step's gradients, over all ranks, unscaled, before clipping."""
        self.clip_coef = 1.0
        """Factor by which the latest step clipped."""
        self.clip_first = 1.0
        """Factor by which `clip_grads` wants the next step to clip."""
        self._store = store
        self._rule = rule
        self._meter = meter
        self._max_norm = max_norm
        self._norm_group = norm_group

    def step(self, groups: Sequence[Mapping[str, Any]], loss_scale: float | None, found_inf: bool | None) -> None:
        """Update every parameter of the groups that has a gradient.

        Args:
            groups: the optimizer's parameter groups.
            loss_scale: what gradients were multiplied by; None: not scaled.
            found_inf: whether a scaler has found one that is not finite; None: nobody looked, and a step that is
                skipped draws a warning.

        Raises:
            StateError: the step before stopped halfway.
            SwapIOError, ValueError, KeyboardInterrupt: with one note that says what is done.
        """
        store = self._store
        store.check_usable()
        if store.unfinished is not None:
            raise store.unfinished.refusal("a finished step")
        number = self._meter.steps + 1
        try:
            with DeferredInterrupt() as interrupt, self._meter.stepping():
                self._step(number, groups, loss_scale, found_inf, interrupt)
        except BaseException as error:
            error.add_note(self._where_it_stands(number))
            raise

    def _step(
        self,
        number: int,
        groups: Sequence[Mapping[str, Any]],
        loss_scale: float | None,
        found_inf: bool | None,
        interrupt: DeferredInterrupt,
    ) -> None:
        store = self._store
        grads = self._collect_grads(groups)
        if not grads and self._norm_group is None:
            return
        store.ensure_placed([store.table[index] for index in grads])
        grad_scale = self._grad_scale(grads, loss_scale, found_inf)
        if not grads or grad_scale is None:
            return
        inputs = StepInputs(grads, self._scalars(groups, grads, grad_scale), self._whole_params(grads))
        counts = {index: store.table[index].steps + 1 for index in grads}
        order = self._ordered(store.slots_of(grads))
        split = store.table.has_split_params
        step = UnfinishedStep(number, order, inputs, counts, split=split, owner=store.owner)
        # Not earlier: where a hyperparameter is refused, the step is still to come. And no call in between: whoever
        # interrupts finds the factor, or a step that has it.
        store.unfinished = step
        self.clip_first = 1.0
        self._go_on(step, inputs, interrupt)

    def finish(self, step: UnfinishedStep) -> None:
        """Complete a step that stopped halfway.

        Raises:
            StateError: it cannot be finished any more.
            SwapIOError: it failed again.
        """
        self._store.table.check_layouts()
        inputs = step.check_resumable()
        try:
            with DeferredInterrupt() as interrupt:
                self._store.pipeline.forget_failures()
                self._go_on(step, inputs, interrupt)
        except BaseException as error:
            error.add_note(self._where_it_stands(step.number))
            raise

    def clip_grads(self, groups: Sequence[Mapping[str, Any]], max_norm: float) -> float:
        """Have the next step multiply all gradients by what clips them together; returns their norm as stored."""
        self._store.check_usable()
        norm = self.clip_first * self._norm_of(self._collect_grads(groups), found_inf=False)
        self.clip_first *= clip_coefficient(norm, max_norm)
        return norm

    def _where_it_stands(self, number: int) -> str:
        """What has been done of a step that an exception comes out of, and the way on."""
        unfinished = self._store.unfinished
        if unfinished is not None:
            return f"{unfinished.situation}. {unfinished.way_on}"
        if self._meter.steps >= number:
            return f"Step {number} is complete."
        return f"Step {number} has updated nothing: parameters and state are as before, and step() can be called again."

    def _collect_grads(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, torch.Tensor]:
        """Flat gradient by parameter index, of those that are in a group and have one; empty where the shard is."""
        table = self._store.table
        members = table.members(groups)
        table.check_layouts()
        grads = {record.index: flat_grad(record.leaf, record.name) for record in members}
        return {index: grad for index, grad in grads.items() if grad is not None}

    def _norm_of(self, grads: Mapping[int, torch.Tensor], *, found_inf: bool) -> float:
        store = self._store
        with self._meter.computing("norm", -1), record_function("nvme_offload: norm"):
            return total_norm(
                store.table.leaves, grads, store.kernels, norm_group=self._norm_group, found_inf=found_inf
            )

    def _grad_scale(
        self, grads: Mapping[int, torch.Tensor], loss_scale: float | None, found_inf: bool | None
    ) -> float | None:
        """What stored gradients are multiplied by (inv_scale x clip_coef), or None when the step must be skipped."""
        inv_scale = (1.0 if loss_scale is None else 1.0 / loss_scale) * self.clip_first
        self.total_norm = self._norm_of(grads, found_inf=bool(found_inf)) * inv_scale
        if not math.isfinite(self.total_norm):
            self._meter.skipped_steps += 1
            self.clip_first = 1.0
            if found_inf is None:
                warn_user(
                    f"gradient norm is {self.total_norm}: step skipped, parameters and state are as before "
                    "(counted in stats().skipped_steps)"
                )
            return None
        self.clip_coef = clip_coefficient(self.total_norm, self._max_norm)
        return inv_scale * self.clip_coef

    def _scalars(
        self, groups: Sequence[Mapping[str, Any]], grads: Mapping[int, torch.Tensor], grad_scale: float
    ) -> dict[int, StepScalars]:
        scalars = {}
        by_step: dict[tuple[int, int], StepScalars] = {}  # most parameters of a group are at the same step
        for number, group in enumerate(groups):
            records = [self._store.table.of(param) for param in group["params"]]
            check_group(self._rule, group, number, records, self._store.owner)  # schedulers write to them
            rule = self._rule.of(group)
            for record in records:
                if record.index not in grads:
                    continue
                key = number, record.steps + 1
                if key not in by_step:
                    [scale] = rounded(-grad_scale if group.get("maximize") else grad_scale)
                    by_step[key] = StepScalars(rule.scalars(group, key[1]), scale)
                scalars[record.index] = by_step[key]
        return scalars

    def _ordered(self, slots: list[SlotRecord]) -> list[SlotRecord]:
        """Subgroups in the order of this step, which is the same on every rank as far as whole parameters go."""
        if self._rule.whole:
            slots.sort(key=lambda slot: slot.subgroup.runs[0].param)
        if self._store.blocks.exist:  # those of one block one after the other, also where groups share the block
            slots.sort(key=lambda slot: slot.subgroup.block)
        return slots if self._is_forward else slots[::-1]

    def _whole_params(self, grads: Mapping[int, torch.Tensor]) -> WholeParams:
        """Parameters that will be updated whole, in the order of `_ordered`; on ranks that have nothing of one, too."""
        table, blocks = self._store.table, self._store.blocks
        indices = sorted(index for index in grads if table[index].rule.whole)
        if blocks.exist:
            indices.sort(key=lambda index: blocks.number_of(table[index].leaf))
        return WholeParams(table.leaves, indices if self._is_forward else indices[::-1], self._rule.gathered_dtype)

    @property
    def _is_forward(self) -> bool:
        """Whether this step goes through the subgroups forward: directions alternate."""
        return self._meter.steps % 2 == 0

    def _go_on(self, step: UnfinishedStep, inputs: StepInputs, interrupt: DeferredInterrupt) -> None:
        """Do what is left of a step. Ctrl-C is honoured between subgroups, so that the step can be finished later."""
        store = self._store

        def on_pause() -> None:
            interrupt.deliver()
            store.blocks.advance()

        subgroups = [slot.subgroup for slot in step.order]
        store.pipeline.on_pause = on_pause
        if store.mirror:
            store.mirror.begin_step()
        store.blocks.begin_step(subgroups[step.done :])
        try:
            for position in range(step.done, len(step.order)):
                on_pause()
                self._update(position, step, inputs)
            inputs.whole.finish()
        finally:
            store.pipeline.on_pause = lambda: None
            # Also after a failure: the device must not read parameters that are still on their way to it.
            if store.mirror:
                store.mirror.end_step()
        # Set and not counted on, so that it may be cut short and done once more.
        for index, count in step.counts.items():
            store.table[index].steps = count
        self._meter.steps = step.number
        store.blocks.end_step(subgroups)
        store.unfinished = None
        store.blocks.advance()  # last: whatever stops it, the step is done
        self._report_changed(step.changed_tiles)

    def _update(self, position: int, step: UnfinishedStep, inputs: StepInputs) -> None:
        """Read, update and write one subgroup; reads of those that follow and writes of those before go on."""
        store, slot = self._store, step.order[position]
        if store.mirror:
            for ahead in step.order[position : position + 2]:
                store.mirror.fetch(ahead.subgroup, store.table.params, inputs.grads)
        with record_function("nvme_offload: read"):
            memory = store.pipeline.acquire(step.order, position)
        with store.blocks.held_for_update(slot.subgroup, inputs.grads):
            store.pipeline.will_change(slot)
            with self._meter.computing("compute", slot.subgroup.index), record_function("nvme_offload: update"):
                update = update_of(slot, memory, inputs, store)
                # No other call until `updating` is false: an exception in between leaves a step that nobody can finish.
                step.updating = True
                step.changed_tiles += update()
                step.done = position + 1
                step.updating = False
            with record_function("nvme_offload: write"):
                store.pipeline.release(slot)

    def _report_changed(self, changed_tiles: int) -> None:
        self._meter.resplit_blocks += changed_tiles
        if changed_tiles:
            warn_user(
                f"{changed_tiles} tiles of 65536 elements were changed between steps by something other than this "
                "optimizer: their master weights now start from the changed 16-bit values (the moments are kept)"
            )


def update_of(slot: SlotRecord, memory: Memory, inputs: StepInputs, store: StateStore) -> Callable[[], int]:
    """What updates the state in `memory` and the parameters it belongs to. Before it is called nothing changes.

    Returns:
        To be called once. Returns how many tiles of 65536 elements somebody else had changed since the last update.
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
    by_rule = _by_rule(subgroup.rule, work, inputs.whole, store)

    def update_and_copy_back() -> int:
        changed_tiles = by_rule()
        if mirror and copies is not None:
            mirror.copy_back(subgroup, copies, table.params, inputs.grads)
        return changed_tiles

    # The kernel writes by address: without this, a graph kept from before the step would use the new values unnoticed.
    increment_version([table[index].leaf for index in work])
    return by_rule if copies is None else update_and_copy_back


def _by_rule(
    rule: UpdateRule, work: Mapping[int, RunTensors], whole: WholeParams, store: StateStore
) -> Callable[[], int]:
    """What updates runs, by parameter index, in whichever way the rule is written; returns tiles found changed."""
    pool = store.kernels
    if rule.whole:
        return lambda: sum(
            update_whole(rule, run, store.table[index].param, pool, partial(whole.through, index))
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
