"""Record a step from its first update to its last: its phase, what it works with, and what is still to be done.

Whoever interrupts a step leaves its record behind, so the record never has to be put right afterwards:

1. A step is RUNNING before its first update and until its last. An exception that comes out of it leaves it RUNNING,
   and `finish_step` goes on from what is pending.
2. A subgroup leaves `pending` when its kernel has returned. While a kernel works the record says so; left like that,
   nobody knows how far the kernel came, and the step is SPOILT. One that a device refused memory for knows it itself,
   and is kept, to be called once more.
3. What a step needs (gradients, scalars) is in its record, and nowhere else.
4. Phase and worker change together, by assignments with no call between them: see `StateBody.enter`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import version_of
from nvme_offload.offload.errors import StateError, check_may_follow
from ..layout.flat import PartitionStandIn
from ..updates.whole_params import WholeParams
from ..updates.work import StepScalars
from .condition import Condition, Need, StepPhase
from .slots import SlotRecord

_MAY_FOLLOW = {
    StepPhase.BEGUN: {StepPhase.SPOILT},
    StepPhase.RUNNING: {StepPhase.BEHIND, StepPhase.SPOILT, StepPhase.DONE},
    StepPhase.BEHIND: {StepPhase.STOPPED, StepPhase.SPOILT, StepPhase.DONE},
    StepPhase.STOPPED: {StepPhase.SPOILT, StepPhase.DONE},
    StepPhase.SPOILT: set(),
    StepPhase.DONE: set(),
}
"""Which phase may follow which, and who sees to it. A record that is BEGUN goes: it is taken back, or `step()` makes
one that is RUNNING, which has what it has.

BEGUN -> SPOILT [ForGood.drop, Inbox.take_in, StepJob._update, StepJob._goes_on]
RUNNING -> BEHIND [Stepper._leave_to_worker]
RUNNING -> DONE [Stepper._go_on]: nothing is left for behind the step
RUNNING -> SPOILT [Stepper._leave_to_worker]: a kernel was cut off
BEHIND -> DONE [StepJob._finish]
BEHIND -> STOPPED [StepJob.give_up]
BEHIND -> SPOILT [StepJob._update, StepJob._goes_on, StepJob.give_up]: a gradient has changed, or a kernel was cut off
STOPPED -> DONE [Stepper._go_on]: `finish_step`
STOPPED -> SPOILT [StepRecord.note_overwritten]: a parameter that waits for its update has another value
"""

_LACKS = {
    StepPhase.BEGUN: {Need.STATE, Need.PARAMS, Need.REST_OF_STEP},
    StepPhase.RUNNING: {Need.NEXT_STEP, Need.STATE, Need.PARAMS},
    StepPhase.BEHIND: {Need.NEXT_STEP, Need.STATE, Need.PARAMS, Need.REST_OF_STEP},
    StepPhase.STOPPED: {Need.NEXT_STEP, Need.STATE, Need.PARAMS},
    StepPhase.SPOILT: set(Need),
    StepPhase.DONE: {Need.REST_OF_STEP},
}
"""Nobody can have these in a phase. Whoever can wait for a step that is BEHIND does so before asking."""


@dataclass(frozen=True)
class StepInputs:
    """A step needs these besides the state; they are fixed when it begins."""

    grads: dict[int, torch.Tensor]
    """Flat gradients by parameter index, of parameters that have one. An update behind the step takes its own out."""
    scalars: Mapping[int, StepScalars]
    """Scalars by parameter index: the bias corrections follow each parameter's own step."""
    whole: WholeParams
    """Parameters that their rule needs whole."""
    counts: Mapping[int, int] = field(default_factory=dict)
    """Updates that each parameter will have had, by index."""
    shards: dict[int, DTensor] = field(default_factory=dict)
    """Gradients of shards by parameter index: a change in place counts in these, and not in their local parts."""


@dataclass
class Claims:
    """The claims of a step that has begun in backward on what others might use."""

    final: set[int] = field(default_factory=set)
    """Parameters whose gradient was final, by index: they may be updated at any moment."""
    way_back: Callable[[], None] | None = None
    """Takes back what was updated, so that nothing of the step has happened; None: nothing can."""


class StepRecord(Condition):
    """The record of a step that is not done.

    Args:
        phase: BEGUN or RUNNING.
        number: of the step, counted from 1.
        order: subgroups in the order of this step: first those that are updated inside it, then those behind it.
        way_back: what brings whole state back, in words.
        claims: of a step that is BEGUN.
        begun: the same step, as it began in backward; its subgroups are in `order` too.
    """

    def __init__(
        self,
        owner: str,
        phase: StepPhase,
        number: int,
        order: Sequence[SlotRecord],
        inputs: StepInputs,
        *,
        way_back: str,
        claims: Claims | None = None,
        begun: StepRecord | None = None,
    ) -> None:
        super().__init__(owner)
        self.phase = phase
        self.number = number
        self.order = order
        self.inputs = inputs
        self.pending: dict[SlotRecord, Callable[[], int] | None] = dict.fromkeys(order)
        """Subgroups that have not been updated yet, in the order of the step, with the kernel where a device refused it
        memory: called once more, before anything else, it goes on."""
        self.wanted: list[int] = []
        """Parameters that somebody waits for, by index: they come next."""
        self.changed_tiles = 0
        """Tiles of 65536 elements found changed by somebody else."""
        self.claims = claims or Claims()
        self.left = count_parts(order)
        """Parameters that are not wholly updated yet, by index, with the number of their subgroups that are not."""
        self.is_in_kernel = False
        """Whether a kernel works, or was cut off."""
        self._versions = {index: self._changes_of(index) for index in inputs.grads}
        self._way_back = way_back
        if begun is not None:
            self._go_on_from(begun)

    def become(self, phase: StepPhase) -> None:
        """Change the phase, or raise StateError. If a kernel was cut off, any phase but DONE becomes SPOILT."""
        if self.is_in_kernel and phase is not StepPhase.DONE:
            phase = StepPhase.SPOILT
        check_may_follow(f"step {self.number}", _MAY_FOLLOW, self.phase, phase)
        self.phase = phase

    @property
    def lacks(self) -> frozenset[Need]:
        """Return all that nobody can have in this phase."""
        phase = StepPhase.SPOILT if self.is_in_kernel else self.phase
        return frozenset(_LACKS[phase])

    @property
    def done(self) -> int:
        """Number of subgroups that have been updated."""
        return len(self.order) - len(self.pending)

    def concerns(self, index: int) -> bool:
        """Return whether a part of this parameter is still to be updated, or nobody knows. From any thread."""
        if self.phase is StepPhase.DONE:  # also where an exception came before the optimizer let go of the record
            return False
        return index in self.left or self.phase is StepPhase.SPOILT

    @property
    def updated(self) -> frozenset[SlotRecord]:
        """Subgroups that have been updated."""
        return frozenset(slot for slot in self.order if slot not in self.pending)

    def note_overwritten(self) -> None:
        """Note that a parameter whose update is pending gets another value: nobody can finish the step any more."""
        if self.phase is StepPhase.STOPPED:
            self.become(StepPhase.SPOILT)

    def waited_for(self) -> Iterator[SlotRecord]:
        """Yield pending subgroups of parameters that somebody waits for."""
        for index in tuple(self.wanted):
            yield from (slot for slot in self.pending if any(run.param == index for run in slot.subgroup.runs))

    def update(self, slot: SlotRecord, kernel: Callable[[], int]) -> None:
        """Run a subgroup's kernel, which returns how many tiles somebody else had changed; note that it is updated."""
        # No other call until it is False again: an exception in between leaves a step that nobody can finish.
        self.is_in_kernel = True
        try:
            self.changed_tiles += kernel()
        except torch.OutOfMemoryError:
            self.pending[slot] = kernel
            self.is_in_kernel = False
            raise
        del self.pending[slot]
        self.is_in_kernel = False

    def ends_with(self, slot: SlotRecord, index: int) -> bool:
        """Return whether nothing of this parameter is left to be updated when this subgroup is."""
        return self.left.get(index) == sum(run.param == index for run in slot.subgroup.runs)

    def let_go_of(self, slot: SlotRecord) -> None:
        """Note that a subgroup is updated, and drop gradients of parameters of which that was the last part."""
        for run in slot.subgroup.runs:
            if run.param not in self.left:
                continue
            self.left[run.param] -= 1
            if not self.left[run.param]:
                del self.left[run.param]
                self.inputs.grads.pop(run.param, None)
                self.inputs.shards.pop(run.param, None)
                if run.param in self.wanted:
                    self.wanted.remove(run.param)

    def keep_pending_only(self) -> None:
        """Drop gradients of all that is updated, before the rest is left to be done behind the step."""
        self.left = count_parts(self.pending)
        for grads in (self.inputs.grads, self.inputs.shards):
            for index in [index for index in grads if index not in self.left]:
                del grads[index]

    def take_on(self, index: int, grad: torch.Tensor, num_parts: int, slots: Sequence[SlotRecord]) -> None:
        """Add a parameter's gradient to a step that has begun in backward; `slots` may be updated now.

        The gradient is kept until `num_parts` subgroups, all that have a part of it, are updated, here or in the step
        itself.
        """
        self.inputs.grads[index] = grad
        self._versions[index] = self._changes_of(index)
        self.left[index] = num_parts
        self.order = [*self.order, *slots]
        self.pending.update(dict.fromkeys(slots))

    def _go_on_from(self, begun: StepRecord) -> None:
        self.changed_tiles += begun.changed_tiles
        for slot in begun.order:
            if slot in begun.pending:
                self.pending[slot] = begun.pending[slot]
            else:
                del self.pending[slot]
                self.let_go_of(slot)

    @property
    def begun(self) -> Collection[int]:
        """Parameters that it has, or had, the gradient of, by index."""
        return self._versions.keys()

    @property
    def situation(self) -> str:
        """Say in words what state the optimizer is in."""
        done, of_all = self.done, len(self.order)
        updated = "their parameters are updated, the others are not"
        if done in (0, of_all):
            updated = "all parameters are updated" if done else "no parameter is updated"
        return f"step {self.number} stopped after {done} of {of_all} subgroups: {updated}"

    @property
    def way_on(self) -> str:
        """Say in words what can be done about the situation."""
        has_only_begun = self.phase is StepPhase.BEGUN and not self.is_in_kernel
        if Need.REST_OF_STEP in self.lacks and not has_only_begun:
            gone = "Gradients or parameters that it needs are gone"
            why = "It was cut off inside an update" if self.is_in_kernel else gone
            return f"{why}, so that it cannot be finished: {self._way_back}"
        call, first = ("step()", "zero_grad(), then ") if has_only_begun else ("finish_step()", "")
        as_before = f"call {call} while the gradients are still as they were"
        return f"When the cause is removed, {as_before}, or {first}{self._way_back}"

    def check_grads(self, indices: Iterable[int]) -> None:
        """Raise StateError if a gradient of these parameters has changed since the step began."""
        held = (index for index in indices if index in self.inputs.grads)
        if any(self._changes_of(index) != self._versions[index] for index in held):
            raise self.gradients_changed()

    def _changes_of(self, index: int) -> tuple[int, int]:
        """Return what an in-place change of a gradient raises; on a tier, a later one in its place does so, too."""
        grad, shard = self.inputs.grads[index], self.inputs.shards.get(index)
        if isinstance(grad, PartitionStandIn):
            return grad.partition.num_changes, 0
        return version_of(grad), 0 if shard is None else version_of(shard)

    def gradients_changed(self) -> StateError:
        """Return the error for a gradient that is not what the step began with."""
        return StateError(
            self._owner,
            "gradients as they were when the step began",
            f"gradients that have changed since. {self.situation}; {self._way_back}",
        )


def count_parts(slots: Iterable[SlotRecord]) -> Counter[int]:
    """Return in how many of these subgroups each parameter has a part, by index."""
    return Counter(run.param for slot in slots for run in slot.subgroup.runs)
