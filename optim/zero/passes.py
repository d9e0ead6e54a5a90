"""Forward and backward of a sharded module, and what is left of a step after an exception inside one of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nvme_offload.offload.devices.device import refuse_capture
from nvme_offload.offload.errors import CorruptionError, StateError, SwapIOError
from nvme_offload.optim.optimizer import OffloadOptimizer
from nvme_offload.optim.ranks.peers import Peers
from nvme_offload.optim.state.condition import take_back_notes


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
