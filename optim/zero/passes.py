"""Forward and backward of a sharded module, and what is left of a step after an exception inside one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from nvme_offload.offload.errors import CorruptionError, PeerError, StateError, SwapIOError
from nvme_offload.optim.zero.peers import Peers
from nvme_offload.optim.zero.sharding import reset_pass


class Passes:
    """Runs forwards and backwards, and gives up the step where one was cut off.

    Args:
        module: as it was sharded.
        num_ranks: of the whole mesh.
        peers: told of an error of this rank; name that of another.
    """

    def __init__(self, module: nn.Module, num_ranks: int, peers: Peers) -> None:
        self._module = module
        self._num_ranks = num_ranks
        self._peers = peers
        self._way_on = ""
        """What is left to do after a pass that could not be given up, in words."""

    @contextmanager
    def run(self, where: str, begin_anew: Callable[[], None]) -> Iterator[None]:
        """Leave FSDP2 and the gradients as before the step, after an I/O error or Ctrl-C inside forward or backward.

        Where that cannot be, no other pass begins, and the other ranks are told. Any other exception out of a backward
        leaves gradients of which nobody knows how much is in them: on one rank, the same.

        Args:
            where: ``forward`` or ``backward``, for messages.
            begin_anew: drops the gradients of the step.
        """
        if self._way_on:
            raise StateError("the engine", "no pass that an I/O error cut off", f"one. {self._way_on}")
        try:
            with self._peers.named():
                yield
        except PeerError:
            self._way_on = "Another rank failed: end them all and resume from a checkpoint."
            raise
        except BaseException as error:
            is_of_tier = isinstance(error, SwapIOError | CorruptionError)
            if not is_of_tier and (self._num_ranks > 1 or (where == "forward" and isinstance(error, Exception))):
                raise
            if self._num_ranks > 1:
                self._way_on = (
                    "Other ranks wait for this one in a collective: end them all and resume from a checkpoint."
                )
                self._peers.tell(where, error, goes_on=False)
            elif not reset_pass(self._module):
                self._way_on = "FSDP2 of this torch cannot leave a pass halfway: make a new engine, load a checkpoint."
            else:
                begin_anew()
            error.add_note(
                self._way_on or "The gradients of this step were dropped: do it again from its first micro-batch."
            )
            raise
