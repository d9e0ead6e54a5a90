"""Take a step: collect gradients, take their norm, find the scalars, and update each subgroup in turn.

In this order, and why:

1. Refuse (`step`) if the step before stopped halfway: this one would replace what finishes that.
2. Place (`_placed`) what has its first gradient: all that follows finds state for each gradient.
3. Collect (`_collect_grads`), and compare with what backward has updated with: nothing is decided yet.
4. Norm (`_grad_scale`), over all ranks: a skipped step ends here, on all ranks alike.
5. Settle (`_settle_commit`): no rank writes for this step before all know whether the one before lasts.
6. Take over what began in backward (`EarlyStep.settled`), or take it back if its factor was guessed wrong.
7. Record (`StateBody.enter`), once nothing can be refused any more: from here on `finish_step` leads on.
8. Update (`_go_on`) what nobody can be made to wait for.
9. Leave the rest to the worker (`_leave_to_worker`): readers wait for it, and the caller does not.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from nvme_offload.aio_native.interrupt import DeferredInterrupt
from nvme_offload.offload._torch_private import recorded
from nvme_offload.offload.devices.device import is_host, refuse_capture, wait_for_queued
from nvme_offload.offload.errors import ConfigWarning
from nvme_offload.offload.warn import Once, warn_user
from ..layout.flat import flat_grad
from ..rules.rule import UpdateRule
from ..state.body import StepState
from ..state.condition import Need, StepPhase, take_back_notes
from ..state.phase import StepInputs, StepRecord
from ..state.slots import Residency, SlotRecord
from ..state.table import ParamRecord
from ..telemetry.stats import Meter
from ..updates.whole_params import WholeParams
from .begin import EarlyStep
from .finality import Backward, Finality, StepCommits
from .hiding import Schedules, hindrance_in
from .job import StepJob
from .norm import clip_coefficient, sums_from_device, total_norm
from .scalars import scalars_of
from .schedule import Behind, first_of_next, forward_order, in_direction
from .update import read_update_write
from .waiting_parameter import let_read, let_wait


class Stepper:
    """Takes steps, and finishes those that stopped halfway.

    Args:
        norm_group: further ranks whose gradients belong to the same global norm.
        commits: of a durable run: the one before a step is settled before it writes anything.
    """

    def __init__(
        self,
        store: StepState,
        rule: UpdateRule,
        meter: Meter,
        norm_group: dist.ProcessGroup | None,
        commits: StepCommits | None = None,
    ) -> None:
        self.total_norm = float("nan")
        """Norm of the latest step's gradients, over all ranks, unscaled, before clipping."""
        self.had_gradients = False
        """Whether any rank had a gradient in the latest step."""
        self.clip_coef = 1.0
        """Factor by which the latest step clipped."""
        self.clip_first = 1.0
        """Factor by which `clip_grads` wants the next step to clip."""
        self._store = store
        self._rule = rule
        self._meter = meter
        self._norm_group = norm_group
        self._commits = commits
        self.schedules = Schedules(store)
        self._once = Once()
        several = dist.is_initialized() and dist.get_world_size() > 1
        early = EarlyStep(store, meter, rule)
        self.final = Finality(store, self.schedules, early, commits if several else None)
        """Begins the updates in backward, where the section asks for that."""

    def watch(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take these as the optimizer's groups from now on; their parameters stay where they are."""
        self.schedules.decide()
        self.final.watch(groups)

    def expect_step(self, after_next_backward: bool, *, by_turns: bool = False) -> None:
        """See `OffloadOptimizer.expect_step`."""
        if after_next_backward and self.final.must_agree:
            with self._store.at_rest():
                self._settle_commit()
        self.final.expect_step(Backward(after_next_backward, by_turns))

    def _settle_commit(self) -> None:
        """Know whether the commit of the step before lasts. Collective where several ranks step together."""
        if self._commits is not None and not self._commits.is_settled:
            self._commits.settle()

    def step(self, groups: Sequence[Mapping[str, Any]], loss_scale: float | None, found_inf: bool | None) -> None:
        """Update every parameter of the groups that has a gradient.

        `found_inf` says whether a scaler has found one that is not finite; None: nobody looked, and a skipped step
        warns. An error has one note that says what is done. A refusal has none: StateError, the step before stopped
        halfway.
        """
        # The way on is noted now: when an error comes, another may have taken its place.
        number, has_begun, begun = self._meter.steps + 1, False, self._store.condition.way_on
        try:
            with DeferredInterrupt() as interrupt, self._meter.stepping(), self._between_steps(interrupt):
                if (refusal := self._store.condition.refuses(Need.NEXT_STEP)) is not None:
                    self._store.worker.raise_failure()  # first: the cause, if nobody has heard it yet
                    raise refusal
                has_begun = True
                self._note_changed_on_device()
                self._report_changed()
                self._step(number, groups, self._placed(groups), loss_scale, found_inf, interrupt)
        except BaseException as error:
            if has_begun or not isinstance(error, Exception):  # else it is a refusal
                take_back_notes(error, begun)  # updates in backward may have said it
                error.add_note(self._where_it_stands(number))
                if self._commits is not None:
                    self._commits.explain(error)
            raise

    def _between_steps(self, interrupt: DeferredInterrupt) -> AbstractContextManager[object]:
        """Hold the state for this step alone; a step that began in backward keeps the transfers that it started."""
        store = self._store
        if store.record_in(StepPhase.BEGUN) is None:
            return store.at_rest(meanwhile=interrupt.deliver)
        if not is_host(there := self.final.early.device):
            # The host is here long before the device has computed backward. Until then the worker may go on.
            with self._meter.waiting("device"):
                wait_for_queued(there)
        return store.worker.kept_away()

    def _placed(self, groups: Sequence[Mapping[str, Any]]) -> list[ParamRecord]:
        """Return the records of the groups' parameters; those with a gradient have their place from here on."""
        store = self._store
        members = store.table.members(groups)
        used = [record for record in members if record.leaf.grad is not None]
        if not self.schedules.know(used):
            store.table.check_layouts()
            self.schedules.forget()  # before places change: if that is cut short, all is updated inside the step
            store.ensure_placed(used)
            self.watch(groups)
        return members

    def _step(
        self,
        number: int,
        groups: Sequence[Mapping[str, Any]],
        members: Sequence[ParamRecord],
        loss_scale: float | None,
        found_inf: bool | None,
        interrupt: DeferredInterrupt,
    ) -> None:
        store = self._store
        grads = self._collect_grads(members)
        self.final.end_backward()
        self.final.early.check(groups, grads)  # before the norm, which uses the sums that this takes
        self.had_gradients = bool(grads)
        if not grads and self._norm_group is None:  # ranks of a group wait for this one's part of the norm
            return
        grad_scale = self._grad_scale(grads, loss_scale, found_inf)
        if self.final.backward.is_last and self.final.must_agree:
            self._say_that_nobody_agreed()
        self._settle_commit()  # not earlier, if it may be: the writes of the step before go on while the norm is taken
        begun = self.final.early.settled(grad_scale) if grads else None  # also if skipped: a guess is taken back
        if not grads or grad_scale is None:
            return
        scalars = scalars_of(store, self._rule, groups, grads, grad_scale)
        rest = {index: grad for index, grad in grads.items() if begun is None or index not in begun.begun}
        done = dict.fromkeys(slot for slot in begun.order if slot not in begun.pending) if begun is not None else {}
        inside, behind = self._divided([slot for slot in store.slots_of(grads) if slot not in done], grads)
        counts = {index: store.table[index].steps + 1 for index in grads}
        captured = begun.inputs.grads if begun is not None else {}
        shards = {index: grad for index in grads if isinstance(grad := store.table[index].leaf.grad, DTensor)}
        record = StepRecord(
            store.owner,
            StepPhase.RUNNING,
            number,
            [*inside, *done, *behind],
            StepInputs({**rest, **captured}, scalars, self._whole_params(rest), counts, shards),
            way_back=store.way_back,
            begun=begun,
        )
        # Not earlier: where a hyperparameter is refused, the step is still to come.
        store.enter(record)
        store.table.marks.note_change(grads, step=number)
        store.worker.raise_failure()  # of an update in backward. The record is there: finish_step() leads on
        self._go_on(record, len(inside), interrupt)

    def finish(self) -> None:
        """Complete a step that stopped halfway, or raise StateError if none can be finished. Call it `at_rest`."""
        store = self._store
        store.table.check_layouts()
        store.check(Need.REST_OF_STEP)
        record = store.record
        assert record is not None
        record.check_grads(record.inputs.grads)
        try:
            with DeferredInterrupt() as interrupt:
                self._end_cut_short(record)  # first: what follows writes, and would write half an update
                store.pipeline.forget_failures()
                self._go_on(record, len(record.order), interrupt)
        except BaseException as error:
            error.add_note(self._where_it_stands(record.number))
            raise

    def _end_cut_short(self, record: StepRecord) -> None:
        """End updates that a device refused memory for, and have their state written with the parameters as they are.

        What is left of them changes nothing of a state that was written meanwhile.
        """
        pipeline = self._store.pipeline
        for slot, update in list(record.pending.items()):
            if update is None:
                continue
            if slot.home.memory is None and slot.residency is not Residency.DIRTY:
                pipeline.acquire([slot], 0)
                pipeline.will_change(slot, updated=record.inputs.grads)
            record.update(slot, update)

    def clip_grads(self, groups: Sequence[Mapping[str, Any]], max_norm: float) -> float:
        """Have the next step clip all gradients together to `max_norm`; return their norm as stored."""
        store = self._store
        # What was guessed need not be taken back for that: the step will see the factor.
        begun = store.record_in(StepPhase.BEGUN)
        with store.at_rest() if begun is None or begun.claims.way_back is None else store.worker.kept_away():
            grads = self._collect_grads(store.table.members(groups))
            norm = self.clip_first * (self._norm_of(grads, found_inf=False) or 0.0)
        self.clip_first *= clip_coefficient(norm, max_norm)
        return norm

    def _where_it_stands(self, number: int) -> str:
        begun = self._store.record_in(StepPhase.BEGUN)
        if self._store.has_unfinished_step or (begun is not None and begun.done):
            condition = self._store.condition
            return f"{condition.situation}. {condition.way_on}"
        if self._meter.steps >= number:
            return f"Step {number} is complete."
        return f"Step {number} has updated nothing: parameters and state are as before, and step() can be called again."

    def _collect_grads(self, members: Sequence[ParamRecord]) -> dict[int, torch.Tensor]:
        """Return flat gradients by parameter index, for parameters that have one; empty where the shard is."""
        self._store.table.check_layouts()
        grads = {record.index: flat_grad(record.leaf, record.layout, record.name) for record in members}
        return {index: grad for index, grad in grads.items() if grad is not None}

    def _norm_of(self, grads: Mapping[int, torch.Tensor], *, found_inf: bool) -> float | None:
        store = self._store
        known = dict(self.final.early.sums)
        there = next((grad.device for grad in grads.values() if not grad.is_cpu), None)
        if there is not None:  # backward is still under way: this waits for it
            refuse_capture(there)
            with self._meter.waiting("device"):
                store.blocks.land_gradients()
                unknown = {index: grad for index, grad in grads.items() if index not in known}
                known |= sums_from_device(unknown, store.means.fused)
        with self._meter.computing("norm", -1), recorded("nvme_offload: norm"):
            return total_norm(
                store.table, grads, store.kernels, norm_group=self._norm_group, found_inf=found_inf, known=known
            )

    def _grad_scale(
        self, grads: Mapping[int, torch.Tensor], loss_scale: float | None, found_inf: bool | None
    ) -> float | None:
        """Return the factor of stored gradients (inv_scale x clip_coef), or None when the step must be skipped."""
        inv_scale = (1.0 if loss_scale is None else 1.0 / loss_scale) * self.clip_first
        norm = self._norm_of(grads, found_inf=bool(found_inf))
        self.had_gradients = norm is not None
        self.total_norm = (norm or 0.0) * inv_scale
        if not math.isfinite(self.total_norm):
            if not self._store.config.skip_non_finite:
                self.final.drop_begun()
                self._store.worker.raise_failure()  # backward may have found it, and says of which parameter
                raise ValueError(
                    f"gradient norm is {self.total_norm}, and skip_non_finite = false makes that an error: write true "
                    "to skip and count such steps"
                )
            self._meter.skip_step()
            self.clip_first = 1.0  # `clip_grads` was called for this step, which is over
            if found_inf is None:
                warn_user(
                    f"gradient norm is {self.total_norm}: step skipped, parameters and state are as before "
                    "(counted in stats().skipped_steps)"
                )
            return None
        clipping = self._store.config.gradient_clipping
        if self.total_norm == 0 and self.had_gradients and not clipping:
            self._once.warn(
                "all zero",
                "every gradient of this step is 0. If torch.nn.utils.clip_grad_norm_ was called before it, its norm "
                "has overflowed, and it multiplied all of them by 0: leave that call out and write gradient_clipping "
                "in the section, whose norm is summed in fp64. Said once",
            )
        self.clip_coef = clip_coefficient(self.total_norm, clipping)
        return inv_scale * self.clip_coef

    def _divided(
        self, slots: list[SlotRecord], grads: Mapping[int, torch.Tensor]
    ) -> tuple[list[SlotRecord], list[SlotRecord]]:
        """Return subgroups in the order of this step: those that are updated inside it, and those behind it.

        Behind it are those of which every reader of a parameter waits for the update; not those that a device
        updates, for which nobody has to wait.
        """
        store = self._store
        may_wait = {index for index in grads if self.schedules.of(index).hides}
        if not may_wait and store.config.overlap_step is not None and store.config.overlap.hides:
            self._say_that_nothing_overlaps(store.table[next(iter(grads))])
        behind = [
            slot
            for slot in slots
            if slot.can_be_behind and all(run.param in may_wait for run in slot.subgroup.runs if run.param in grads)
        ]
        kept = set(behind)
        inside = self._ordered([slot for slot in slots if slot not in kept])
        return inside, forward_order(behind, store.uses.take())

    def _say_that_nothing_overlaps(self, record: ParamRecord) -> None:
        self._once.warn(
            "nothing overlaps",
            f"{self._store.config.overlap} does nothing here: {hindrance_in(self._store, record)}. "
            'Steps are taken as with "off", with the same bits; leave the key out to hide them where that is possible',
            ConfigWarning,
        )

    def _say_that_nobody_agreed(self) -> None:
        self._once.warn(
            "nobody agreed",
            f'{self._store.config.overlap} is done as with "forward" here: ranks of a durable run '
            "write in backward once they have agreed that the step before lasts on all of them. Call "
            "optimizer.expect_step(True) before the last backward of each step, on every rank, as the engine does. The "
            "bits are the same",
            ConfigWarning,
        )

    def _ordered(self, slots: list[SlotRecord]) -> list[SlotRecord]:
        """Sort subgroups for this step: the same on every rank as far as whole parameters go."""
        if self._rule.whole:
            slots.sort(key=lambda slot: slot.subgroup.runs[0].param)
        if self._store.blocks.exist:  # those of one block one after the other, also where groups share the block
            slots.sort(key=lambda slot: slot.subgroup.block)  # stable: whole parameters keep their order in it
        ordered = list(in_direction(slots, self._meter.steps))
        if self._rule.whole or self._store.blocks.exist:  # what is in buffers differs by rank, and splits blocks
            return ordered
        return self._store.durability.in_order_of_reading(ordered)

    def _whole_params(self, grads: Mapping[int, torch.Tensor]) -> WholeParams:
        """Parameters that will be updated whole, in the order of `_ordered`; on ranks that have nothing of one, too."""
        table, blocks = self._store.table, self._store.blocks
        indices = sorted(index for index in grads if table[index].rule.whole)
        if blocks.exist:
            indices.sort(key=lambda index: blocks.number_of(table[index].leaf))
        return WholeParams(table.leaves, in_direction(indices, self._meter.steps), self._rule.gathered_dtype)

    def _go_on(self, record: StepRecord, num_inside: int, interrupt: DeferredInterrupt) -> None:
        """Update `num_inside` subgroups here, and leave the rest to the worker. Ctrl-C is honoured in between."""
        store = self._store
        self._end_cut_short(record)

        def on_pause() -> None:
            interrupt.deliver()
            store.blocks.advance()

        self.clip_first = 1.0  # the record has it
        inside, pending = ([slot.subgroup for slot in slots] for slots in (record.order[:num_inside], record.pending))
        behind = pending[num_inside:]
        store.mirror.begin_step()
        store.blocks.begin_step(pending[:num_inside], behind)
        try:
            with store.pipeline.pausing(on_pause):
                for position, slot in enumerate(record.order[:num_inside]):
                    if slot in record.pending:  # else it was updated before the step stopped
                        on_pause()
                        read_update_write(store, self._meter, record, record.order, position)
                record.inputs.whole.finish()
        finally:
            # Also after a failure: the device must not read parameters that are still on their way to it.
            store.mirror.end_step()
        store.blocks.end_step(inside, behind)
        if record.pending:
            self._leave_to_worker(record)
            return
        # Counts before DONE: if this is cut short, `finish` sets them again. What is DONE cannot be finished.
        store.table.count_steps(record.inputs.counts)
        self._meter.count_step(record.number)
        record.become(StepPhase.DONE)
        store.be_whole()
        let_read(store.table[index] for index in record.inputs.counts)  # not earlier: a reader would find old weights
        store.blocks.advance()  # last: whatever stops it, the step is done
        self._meter.note_changed(record.changed_tiles)
        self._report_changed()

    def _leave_to_worker(self, record: StepRecord) -> None:
        """End the step here; the worker does the rest, and whoever needs that waits."""
        store = self._store
        # As updates inside the step do, each for itself: a graph from before it must not use either weights unnoticed.
        increment_version([store.table[index].leaf for index in record.inputs.grads])
        record.keep_pending_only()  # before the worker has the record, and drops gradients of it, too
        let_read(store.table[index] for index in record.inputs.counts if not record.concerns(index))
        # Before the worker has the job: a reader could come between an update and this.
        let_wait((store.table[index] for index in record.inputs.counts if record.concerns(index)), is_behind=True)
        # Subgroups as the next step will probably go through them.
        following = forward_order(record.order, store.uses.ranks) if self.final.early.is_asked else list(record.order)
        first = first_of_next(following, begins_in_backward=self.final.begins_with(following))
        schedule = Behind(following, began_in_backward=bool(record.done))
        # In this order, so that whoever interrupts it leaves a step that can be finished, or one that somebody does.
        store.worker.take_on(StepJob(store, self._meter, record, schedule, first=first))
        self._meter.count_step(record.number)
        record.become(StepPhase.BEHIND)
        store.worker.wake()

    def _note_changed_on_device(self) -> None:
        """Count what the step before found changed on the device: this step waits for it anyway, for the norm."""
        if found := self._store.means.found_changed:
            self._meter.note_changed(int(torch.stack(found).sum()))
            found.clear()

    def _report_changed(self) -> None:
        if changed_tiles := self._meter.take_changed():
            self._once.warn(
                "changed tiles",
                f"{changed_tiles} tiles of 65536 elements were changed between steps by something other than this "
                "optimizer: their master weights now start from the changed 16-bit values (the moments are kept). "
                "Later changes are counted in stats().resplit_blocks alone",
                of_this_rank=True,
            )
