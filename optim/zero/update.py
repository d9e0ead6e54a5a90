"""The optimizer's part of a step, which an exception may leave not begun, begun or done."""

from __future__ import annotations

from nvme_offload.offload.errors import CorruptionError, SwapIOError
from nvme_offload.optim.optimizer import OffloadOptimizer
from nvme_offload.optim.zero.peers import Peers


class Update:
    """Takes the optimizer's step once, however often it is asked to after exceptions.

    Args:
        optimizer: whose step it is.
        peers: told of an I/O error.
    """

    def __init__(self, optimizer: OffloadOptimizer, peers: Peers) -> None:
        self._optimizer = optimizer
        self._peers = peers
        self._counts_before: tuple[int, int] | None = None
        """Updates done and skipped when the step under way began with its own."""

    @property
    def has_begun(self) -> bool:
        """Whether `take` was called in the step under way."""
        return self._counts_before is not None

    def take(self, loss_scale: float | None) -> bool:
        """Update the parameters, or finish what an exception stopped.

        Args:
            loss_scale: of the gradients; None where they are not scaled.

        Returns:
            Whether it was done; otherwise it was skipped.
        """
        if self._counts_before is None:
            self._counts_before = self._counts()
        try:
            if self._optimizer.has_unfinished_step:
                self._optimizer.finish_step()
                return True
            return self._optimizer.try_step(loss_scale)
        except BaseException as error:
            if isinstance(error, SwapIOError | CorruptionError):
                self._peers.tell("step", error, goes_on=True)
            if (taken := self.outcome) is not None:
                what = "done" if taken else "skipped"
                error.add_note(f"The update of this step is {what}; engine.step() does what else belongs to the step.")
            elif self._optimizer.has_unfinished_step:
                error.add_note("engine.step() finishes the step, too, and does what else belongs to it.")
            raise

    @property
    def outcome(self) -> bool | None:
        """Whether an update that an exception came out of was done (True) or skipped (False); None: neither, so far.

        It may have been done: Ctrl-C waits for the last subgroup, a warning can be an error, and the user may have
        called ``finish_step``.
        """
        if self._counts_before is None or self._optimizer.has_unfinished_step:
            return None
        done, skipped = (now > before for now, before in zip(self._counts(), self._counts_before, strict=True))
        return done if done or skipped else None

    def end(self) -> None:
        """The step is over; the next `take` is of another."""
        self._counts_before = None

    def _counts(self) -> tuple[int, int]:
        return self._optimizer.num_steps, self._optimizer.num_skipped_steps
