"""Passes of a sharded module and updates of its parameters, and what is left of a step after an exception in one."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nvme_offload.offload.devices.device import refuse_capture
from nvme_offload.offload.errors import CorruptionError, StateError, SwapIOError
from ..optimizer import OffloadOptimizer
from ..ranks.peers import Peers
from ..state.condition import take_back_notes


class Passes:
    """Runs forwards and backwards, and gives up the step where one was cut off."""

    def __init__(self, module: nn.Module, optimizer: OffloadOptimizer, mesh: DeviceMesh, peers: Peers) -> None:
        self._module: Any = module
        self._optimizer = optimizer
        self._num_ranks = mesh.size()
        self._device = torch.device(mesh.device_type)
        self._peers = peers
        self._way_on = ""
        """The way on after a pass that could not be given up, in words."""

    @property
    def can_go_on(self) -> bool:
        """Whether every pass that was cut off could be given up."""
        return not self._way_on

    def run(
        self, where: str, begin_anew: Callable[[], None], is_done: Callable[[], bool] | None = None
    ) -> AbstractContextManager[None]:
        """Leave FSDP2 and the gradients as before the step, after an exception inside forward or backward.

        Where that cannot be, as after an I/O error on one of several ranks, no other pass begins, and the others are
        told. Another exception out of a forward leaves the gradients of earlier micro-batches. Within ``accumulate``
        all are dropped, by `begin_anew`, unless `is_done` says that the pass is whole. After Ctrl-C on several ranks
        nobody knows where the others are, and nothing is done.
        """
        self.check()
        refuse_capture(self._device)
        return _Pass(self, where, begin_anew, is_done)

    def check(self) -> None:
        """Raise StateError after a pass that could not be given up."""
        if self._way_on:
            raise StateError("the engine", "no pass that was cut off", f"one. {self._way_on}")

    def end(self, where: str, begin_anew: Callable[[], None], error: BaseException) -> None:
        """Give up the pass that an exception came out of, see `run`; PeerError where the failure is another rank's."""
        said = self._peers.instead_of(error)
        if said is not None:
            self._way_on = "Another rank failed: end them all and resume from a checkpoint."
            if said is not error:
                raise said from error
            return
        is_of_tier, is_ordinary = isinstance(error, SwapIOError | CorruptionError), isinstance(error, Exception)
        if self._num_ranks > 1 and isinstance(error, StateError):  # of a step that an I/O error stopped, here alone
            is_of_tier = self._optimizer.store.has_unfinished_step
        if self._way_on or not (is_ordinary or where == "accumulate" or self._num_ranks == 1):
            return
        keeps_gradients = where == "forward" and is_ordinary and not is_of_tier
        if is_of_tier and self._num_ranks > 1:
            self._way_on = "Other ranks wait for this one in a collective: end them all and resume from a checkpoint."
            self._peers.tell(where, error, goes_on=False)
        elif hasattr(self._module, "reset_iter_state"):
            self._module.reset_iter_state()
        elif not keeps_gradients:  # before torch 2.13
            self._way_on = "FSDP2 of this torch cannot leave a pass halfway: make a new engine, load a checkpoint."
        if keeps_gradients:
            return
        store = self._optimizer.store
        begun = store.condition.way_on
        if not self._way_on:
            begin_anew()
        if self._way_on or store.condition.way_on != begun:  # updates in backward may have said it
            take_back_notes(error, begun)
        note = self._way_on or self._what_dropping_left()
        if note not in getattr(error, "__notes__", ()):  # a forward within `accumulate` may have said it
            error.add_note(note)

    def _what_dropping_left(self) -> str:
        """Say what is left of the step. Where subgroups were updated in backward, it cannot be done again."""
        store = self._optimizer.store
        if not store.has_unfinished_step:
            ranks = ", on all ranks" * (self._num_ranks > 1)
            return f"The gradients of this step were dropped: do it again from its first micro-batch{ranks}."
        return f"The gradients of this step were dropped, and {store.condition.situation}. {store.condition.way_on}"


class _Pass(AbstractContextManager[None]):
    """See `Passes.run`. A generator that an exception left behind would drop the gradients of a later step."""

    def __init__(
        self, passes: Passes, where: str, begin_anew: Callable[[], None], is_done: Callable[[], bool] | None
    ) -> None:
        self._passes, self._where, self._begin_anew, self._is_done = passes, where, begin_anew, is_done

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and not (self._is_done is not None and self._is_done()):
            self._passes.end(self._where, self._begin_anew, error)


class Update:
    """Takes the optimizer's step once, however often it is asked to after exceptions."""

    def __init__(self, optimizer: OffloadOptimizer, peers: Peers) -> None:
        self._optimizer = optimizer
        self._peers = peers
        self._begun: tuple[int, int, int] | None = None
        """A step of the engine, and the updates done and skipped when that began with its own."""

    def has_begun(self, step: int) -> bool:
        """Whether `take` was called in this step of the engine."""
        return self._begun is not None and self._begun[0] == step

    def take(self, step: int, loss_scale: float | None) -> bool:
        """Update the parameters, or finish what an exception stopped; return False if the step was skipped."""
        if not self.has_begun(step):
            self._begun = step, *self._counts()
        try:
            if self._optimizer.has_unfinished_step:
                self._optimizer.finish_step()
                return True
            return self._optimizer.try_step(loss_scale)
        except BaseException as error:
            if isinstance(error, SwapIOError | CorruptionError):
                self._peers.tell("step", error, goes_on=True)
            if (taken := self.outcome(step)) is not None:
                what = "done" if taken else "skipped"
                error.add_note(f"The update of this step is {what}; engine.step() does what else belongs to the step.")
            elif self._optimizer.has_unfinished_step:
                error.add_note("engine.step() finishes the step, too, and does what else belongs to it.")
            raise

    def outcome(self, step: int) -> bool | None:
        """Whether an update that an exception came out of was done (True) or skipped (False); None: neither, so far.

        It may be done: Ctrl-C waits for the last subgroup, a warning can be an error, users may call ``finish_step``.
        """
        if self._begun is None or self._begun[0] != step or self._optimizer.has_unfinished_step:
            return None
        done, skipped = (now > before for now, before in zip(self._counts(), self._begun[1:], strict=True))
        return done if done or skipped else None

    def give_up(self) -> None:
        """Forget the step: its next `take` is the first."""
        self._begun = None

    def _counts(self) -> tuple[int, int]:
        return self._optimizer.num_steps, self._optimizer.num_skipped_steps
