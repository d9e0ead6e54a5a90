"""The optimizer's part of a step, which an exception may leave not begun, begun or done."""

from nvme_offload.offload.errors import CorruptionError, SwapIOError
from nvme_offload.optim.optimizer import OffloadOptimizer
from nvme_offload.optim.ranks.peers import Peers


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
