"""A step under way: what it works with, what is done, and whether the rest can still be done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nvme_offload.offload._torch_private import version_of
from nvme_offload.offload.errors import StateError
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.tiers.grad_tier import PartitionStandIn
from nvme_offload.optim.tiles import StepScalars
from nvme_offload.optim.whole_params import WholeParams

_CHECKPOINT = "load a checkpoint with load_state_dict, "
_MODEL_FIRST = "the model's before the optimizer's (fp32 parameters are in no other)"
_MODEL_LAST = "the optimizer's, then the model's (split parameters cannot be written before)"


@dataclass(frozen=True)
class StepInputs:
    """What a step needs besides the state; fixed when the step begins."""

    grads: dict[int, torch.Tensor]
    """Flat gradient by parameter index; parameters without a gradient are absent. Those of an update behind the step
    are taken out when it is done."""
    scalars: Mapping[int, StepScalars]
    """Scalars by parameter index: the bias corrections follow each parameter's own step."""
    whole: WholeParams
    """Parameters that their rule needs whole."""


class UnfinishedStep:
    """Progress of the step under way; stays behind only when it stops early.

    Args:
        number: of the step, counted from 1.
        order: subgroups in the order of this step: first those that are updated inside it, then those behind it.
        inputs: gradients and scalars, as they were when the step began.
        counts: updates that each parameter will have had, by index.
        split: whether there are split parameters, of which the state has a half.
        owner: name of the optimizer, for messages.
        begun: what has been done of it in backward; its subgroups are in `order` too.
    """

    def __init__(
        self,
        number: int,
        order: Sequence[SlotRecord],
        inputs: StepInputs | None,
        counts: Mapping[int, int],
        *,
        split: bool,
        owner: str,
        begun: UnfinishedStep | None = None,
    ) -> None:
        self.number = number
        self.order = order
        self.inputs = inputs
        self.counts = counts
        self.pending = dict.fromkeys(order)
        """Subgroups that have not been updated yet, in the order of the step."""
        self.behind = False
        """Whether what is pending is done behind `step()`, or was to be: whoever reads a parameter waits for it."""
        self.wanted: list[int] = []
        """Parameters that somebody waits for, by index: they come next."""
        self._left = count_parts(order)
        self._spoilt = False
        self.updating = False
        """True while a kernel works. Left true, nobody knows how far it got."""
        self.changed_tiles = 0
        """Tiles of 65536 elements found changed by somebody else."""
        self.is_open = False
        """Whether updates have begun in backward, and the step itself is still to come."""
        self.final: set[int] = set()
        """Parameters whose gradient was final in that backward, by index: they may be updated at any moment."""
        self.way_back: Callable[[], None] | None = None
        """Takes back what was updated in backward, so that nothing of the step has happened; None: nothing can."""
        self._found: str | None = None
        self._versions = {index: _version(grad) for index, grad in inputs.grads.items()} if inputs else {}
        self._owner = owner
        if begun is not None:
            self._go_on_from(begun)
        self._checkpoint = _CHECKPOINT + (_MODEL_LAST if split else _MODEL_FIRST)

    @property
    def done(self) -> int:
        """Number of subgroups that have been updated."""
        return len(self.order) - len(self.pending)

    def concerns(self, index: int) -> bool:
        """Whether a part of this parameter is still to be updated, or nobody knows. From any thread."""
        return index in self._left or self._spoilt

    def ends_with(self, slot: SlotRecord, index: int) -> bool:
        """Whether nothing of this parameter is left to be updated when this subgroup is."""
        return self._left.get(index) == sum(run.param == index for run in slot.subgroup.runs)

    def let_go_of(self, slot: SlotRecord) -> None:
        """Keep no gradient of parameters that are updated, as this subgroup is, in all of their parts."""
        for run in slot.subgroup.runs:
            if run.param not in self._left:
                continue
            self._left[run.param] -= 1
            if not self._left[run.param]:
                del self._left[run.param]
                if self.inputs is not None:
                    self.inputs.grads.pop(run.param, None)

    def keep_pending_only(self) -> None:
        """Let go of all that is updated, before the rest is left to be done behind the step."""
        self._left = count_parts(self.pending)
        if self.inputs is not None:
            for index in [index for index in self.inputs.grads if index not in self._left]:
                del self.inputs.grads[index]

    def take_on(self, index: int, grad: torch.Tensor, num_parts: int, slots: Sequence[SlotRecord]) -> None:
        """Add a parameter to a step that began in backward.

        Args:
            index: of the parameter.
            grad: its gradient, flat. It is kept until all parts are updated, here or in the step itself.
            num_parts: in how many subgroups it has a part.
            slots: subgroups that may be updated now.
        """
        assert self.inputs is not None
        self.inputs.grads[index] = grad
        self._versions[index] = _version(grad)
        self._left[index] = num_parts
        self.order = [*self.order, *slots]
        self.pending.update(dict.fromkeys(slots))

    def _go_on_from(self, begun: UnfinishedStep) -> None:
        self.changed_tiles += begun.changed_tiles
        for slot in begun.order:
            if slot not in begun.pending:
                del self.pending[slot]
                self.let_go_of(slot)

    @property
    def begun(self) -> Collection[int]:
        """Parameters of which it has, or had, the gradient, by index."""
        return self._versions.keys()

    def spoil(self) -> None:
        """Note that what is done cannot be undone, and the rest cannot be done any more."""
        self.updating = self.behind = self._spoilt = True
        self.is_open = False

    @classmethod
    def of_load(cls, *, split: bool, owner: str) -> UnfinishedStep:
        """The record that an interrupted ``load_state_dict`` leaves: a state that is neither old nor new."""
        broken = cls(0, [], None, {}, split=split, owner=owner)
        broken.updating = True
        return broken

    @classmethod
    def of_found_run(cls, name: str, *, owner: str) -> UnfinishedStep:
        """The record of a durable run that was found and not taken up: what is in memory will not be its state."""
        found = cls(0, [], None, {}, split=False, owner=owner)
        found.updating, found._found = True, name
        return found

    @property
    def is_found_run(self) -> bool:
        """Whether this is no step at all, but a run that was found; see `of_found_run`."""
        return self._found is not None

    @property
    def situation(self) -> str:
        """What state the optimizer is in, in words."""
        if self._found is not None:
            return f"nvme_path holds the durable run {self._found!r}, which has not been resumed"
        if self.inputs is None:
            return "loading a state dict stopped halfway: part of the state is new and part is old"
        return (
            f"step {self.number} stopped after {self.done} of {len(self.order)} subgroups: "
            "their parameters are updated, the others are not"
        )

    @property
    def way_on(self) -> str:
        """What can be done about the situation, in words."""
        if self._found is not None:
            return (
                "Call resume() to go on from its latest step, load a checkpoint to go on from there, or begin anew "
                f"after `offload runs remove {self._found}`, or under another name"
            )
        if self.updating:
            return f"It was cut off inside an update and cannot be finished: {self._checkpoint}"
        return (
            "When the cause is removed, call finish_step() while the gradients are still as they were, "
            f"or {self._checkpoint}"
        )

    def refusal(self, expected: str) -> StateError:
        """The error for whoever wants something that needs `expected`."""
        if self.is_found_run:
            expected = "a run that was resumed"
        return StateError(self._owner, expected, f"{self.situation}. {self.way_on}")

    def check_resumable(self) -> StepInputs:
        """Check that what the rest of the step works with is as it was when the step began.

        Raises:
            StateError: it was cut off inside an update, or a gradient has changed since.
        """
        if self.updating or self.inputs is None:
            raise self.refusal("a step that can be finished")
        self.check_grads(self.inputs.grads)
        return self.inputs

    def check_grads(self, indices: Iterable[int]) -> None:
        """Check that the gradients of these parameters are as they were when the step began.

        Raises:
            StateError: one has changed.
        """
        grads = self.inputs.grads if self.inputs is not None else {}
        if any(_version(grads[index]) != self._versions[index] for index in indices if index in grads):
            raise self.gradients_changed()

    def gradients_changed(self) -> StateError:
        """The error for a gradient that is not what the step began with."""
        return StateError(
            self._owner,
            "gradients as they were when the step began",
            f"gradients that have changed since. {self.situation}; {self._checkpoint}",
        )


def count_parts(slots: Iterable[SlotRecord]) -> Counter[int]:
    """In how many of these subgroups each parameter has a part, by index."""
    return Counter(run.param for slot in slots for run in slot.subgroup.runs)


def _version(grad: torch.Tensor) -> int:
    """Version counter of a gradient: in-place changes after the step began show in it.

    On a tier a gradient of a later backward takes the place of the one before: that is a change too.
    """
    return grad.partition.num_changes if isinstance(grad, PartitionStandIn) else version_of(grad)
