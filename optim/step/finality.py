"""Notice when gradients are final: no backward adds to them before the step."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from nvme_offload.offload._torch_private import base_of, local_tensor, num_backwards_left
from ..layout.flat import PartitionStandIn
from ..state.body import StepState
from ..state.slots import SlotRecord
from ..state.table import ParamRecord
from ..tiers.parts import parts_of
from .begin import EarlyStep
from .hiding import Schedules


class StepCommits(Protocol):
    """A durable run has commits, which make its steps last."""

    @property
    def is_settled(self) -> bool:
        """Whether it is known of the step before that it lasts."""

    def settle(self) -> object:
        """Know it. Collective where several ranks step together."""

    def explain(self, error: BaseException) -> None:
        """Add to an error that a step ends with what it means for the run."""


class Backward(NamedTuple):
    """The backward that runs, or runs next."""

    is_last: bool
    """Whether it is the last one of its step for the parameters that it comes to."""
    by_turns: bool = False
    """Whether it goes block by block, and `Finality.catch_up` is called after each."""


class _HeldBack:
    """Gradients that were added up in one tensor, `whole`, to which more may be added."""

    def __init__(self, whole: torch.Tensor | None = None) -> None:
        self.whole = whole
        self.records: dict[torch.Tensor, ParamRecord] = {}


class Finality:
    """Hands gradients that are final to the step that begins with them.

    Args:
        early: the step that begins in backward.
        commits: of a durable run on several ranks: none of them writes before all know of the latest one.
    """

    def __init__(
        self, store: StepState, schedules: Schedules, early: EarlyStep, commits: StepCommits | None = None
    ) -> None:
        self.backward = Backward((store.config.gradient_accumulation_steps or 1) == 1)
        self._store = store
        self._schedules = schedules
        self.early = early
        """The step that begins in backward."""
        self._commits = commits if early.is_asked else None
        self._hooked: set[int] = set()
        self._places: dict[int, int] = {}
        self._held = _HeldBack()

    def expect_step(self, backward: Backward) -> None:
        """Know what backward comes next."""
        self.backward = backward
        if self.early.is_asked:
            self._store.blocks.keep_gathered(backward.by_turns)  # `catch_up` updates them where they were gathered

    def catch_up(self) -> None:
        """Update what is final in `StepJob.take_turn`. No backward is under way."""
        if not self.early.is_asked:
            return
        self._hand_in_held()  # first: with backward over, nothing is added to the last unit either
        worker = self._store.worker
        while self.early.begun is not None and worker.take_turn():
            pass
        worker.raise_failure()  # a turn keeps its error and says that there was none

    def watch(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Look at the gradients of all parameters of these groups when they arrive."""
        if not self.early.is_asked:
            return
        self.early.take(groups)
        for param in (param for group in groups for param in group["params"]):
            record = self._store.table.of(param)
            if record.index not in self._hooked and param.requires_grad:  # one hook each, however often groups change
                self._hooked.add(record.index)
                param.register_post_accumulate_grad_hook(_hook(weakref.ref(self)))

    @property
    def must_agree(self) -> bool:
        """Whether the ranks must agree that the step before lasts on all of them before an update begins."""
        return self._commits is not None and not self._commits.is_settled

    def begins_with(self, slots: Iterable[SlotRecord]) -> bool:
        """Return whether the next step begins in backward with any of these, if that goes as the latest one did."""
        if not self.early.begins_next:
            return False
        params = (run.param for slot in slots for run in slot.subgroup.runs)
        return any(self._may_begin(self._store.table[index]) for index in params)

    def arrive(self, leaf: torch.Tensor) -> None:
        """Note that a gradient was added to ``leaf.grad``, and hand it in if it is final.

        It raises StateError if the gradient was final before, and an I/O error if what was updated with it cannot be
        taken back.
        """
        store = self._store
        record, parts = store.table.of(leaf), parts_of(leaf)
        whole = None if leaf.grad is None else self._added_up_in(record.index, local_tensor(leaf.grad))
        if whole is not self._held.whole:  # another unit: nothing is added to the one before any more
            self._hand_in_held()
        begun = self.early.begun
        if begun is not None and record.index in begun.claims.final:
            self.early.way.meet_another(record.name)
            return
        may_begin = self.backward.is_last and self.early.begins_next and not self.must_agree
        may_begin = may_begin and self._may_begin(record)
        if store.is_closed or not may_begin:  # the hook outlives a close
            return
        # FSDP2 knows of its own units whether backward adds to what has arrived; DDP may still reduce a plain gradient.
        if dist.is_initialized() if parts is None else num_backwards_left(parts.owner):
            return
        if whole is None:
            self.early.hand_in(record, leaf, self._may_begin)
        else:  # not yet: what adds to the next one of its unit would look like a change of this one
            self._held = self._held if self._held.whole is whole else _HeldBack(whole)
            self._held.records[leaf] = record

    def _added_up_in(self, index: int, local: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor in which a gradient was added up with others of its unit; None for one by itself.

        FSDP2 reduces the gradients of a unit into one tensor and, where there were some already, adds to them one by
        one. They share a version, which says that one has changed when another is added to.
        """
        if isinstance(local, PartitionStandIn):
            return None
        is_old, self._places[index] = self._places.get(index) == local.data_ptr(), local.data_ptr()
        return base_of(local) if is_old else None  # new ones come whole, all at once

    def _may_begin(self, record: ParamRecord) -> bool:
        blocks = self._store.blocks
        # In the midst of a backward nobody takes the turn that some blocks need; block by block `catch_up` does.
        is_own = self.backward.by_turns or not blocks.takes_turns(blocks.number_of(record.leaf))
        return is_own and self._schedules.of(record.index).begins_in_backward

    def _hand_in_held(self) -> None:
        """Hand in the gradients of a unit once the next unit has one. Those of the last unit are left to the step."""
        held = self._held
        self._held = _HeldBack()  # first: after an error none is handed in twice
        for leaf, record in held.records.items():
            self.early.hand_in(record, leaf, self._may_begin)

    def end_backward(self) -> None:
        """Leave what is held back to the step."""
        if self.early.is_asked:
            self._held = _HeldBack()
            self._store.blocks.keep_gathered(False)

    def drop_begun(self) -> None:
        """Give up the step that began in backward, and take back what was guessed; else only a checkpoint leads on."""
        self.end_backward()
        if self.early.is_asked:
            self.early.drop()


def _hook(of: weakref.ref[Finality]) -> Callable[[torch.Tensor], None]:
    """Return a hook that keeps no optimizer alive."""

    def on_arrival(leaf: torch.Tensor) -> None:
        final = of()
        if final is not None:
            final.arrive(leaf)

    return on_arrival
