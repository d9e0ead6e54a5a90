"""An optimizer offers this of its durable run."""

from collections.abc import Mapping
from typing import Any, Protocol

from nvme_offload.offload._torch_private import not_compiled
from nvme_offload.offload.errors import StateError
from nvme_offload.offload.warn import door
from .commits import Commits
from .content import Content
from .resume import Resumption


class OptimizerOfRun(Protocol):
    """The optimizer whose run it is."""

    param_groups: list[dict[str, Any]]

    def place(self) -> None:
        """See `OffloadOptimizer.place`."""

    def check_group(self, group: Mapping[str, Any], number: int) -> None:
        """See `OffloadOptimizer.check_group`."""


class Durable:
    """The durable run of an optimizer: ``optimizer.durable``. Each of its methods is the optimizer's, too.

    Where several ranks step together, all of them call each method.

    Args:
        commits: of the optimizer.
        owner: the optimizer.
    """

    _is_engines = False

    def __init__(self, commits: Commits, owner: OptimizerOfRun) -> None:
        self.commits = commits
        self._owner = owner

    @property
    def client_state(self) -> dict[str, Any]:
        """Return what else is committed with each step: change it before `step`, or `commit` what was changed after it.

        Anything that ``torch.load(weights_only=True)`` reads: the position in the data, other random numbers. Each
        rank has its own.
        """
        return self.commits.client_state

    @client_state.setter
    def client_state(self, value: Mapping[str, Any]) -> None:
        self.commits.client_state = dict(value)

    @property
    def num_copies(self) -> int:
        """Return how many copies of the run are whole on this rank; less than the section's where a drive was lost."""
        return self.commits.run.num_copies

    @not_compiled
    def commit(self) -> None:
        """Commit what there is between two steps: `client_state`, hyperparameters, parameters changed by hand.

        It lasts when this returns.

        Raises:
            StateError: a step stopped halfway, or another rank could not.
            SwapIOError, OutOfSpaceError: the drive did not take it; the commit before is whole.
            ValueError: something cannot be committed; names it.
        """
        step = self._between_steps("commit")
        self.commits.commit(self._owner.param_groups, self._added(), step)

    @door
    @not_compiled
    def resume(self, snapshot: str | None = None) -> tuple[int, dict[str, Any]] | None:
        """Go on from the latest step that the durable run has committed. Call it before the first step.

        Parameters, state, hyperparameters and torch's random numbers are then as they were when that step ended.
        Where it is damaged, the step before is taken. It goes on, too, after an error that stopped a step or a load.

        Args:
            snapshot: go on from the step that `snapshot` kept under this name instead; also between two steps.

        Returns:
            The step, which counts calls of `step` from the beginning of the run on, and `client_state` as it was
            committed; None where there is nothing to go on from.

        Raises:
            KeyError: there is no such snapshot.
            ResumeError: what was committed is of another model, group, section or rank, or damaged; names what.
            StateError: the run has begun already, and neither a step nor a load stopped halfway.
        """
        resumption = self._resumption("resume")
        content = resumption.resume() if snapshot is None else resumption.resume_snapshot(snapshot)
        return None if content is None else self._take_over(content)

    def snapshot(self, name: str) -> int:
        """Keep the latest step under a name, until `remove_snapshot`: `resume` goes back to it. Returns the step.

        No byte of state is moved; the space that later steps need in its place is reserved.

        Raises:
            ValueError: the name is taken, or has other characters than letters, digits, dots, underscores and hyphens.
            OutOfSpaceError: there is no room; nothing is kept.
            StateError: a step stopped halfway, or does not last; or another rank could not.
        """
        self._between_steps("snapshot")
        return self.commits.snapshot(name)

    def remove_snapshot(self, name: str) -> None:
        """Give up what `snapshot` kept, and its space.

        Raises:
            KeyError: there is none of this name.
        """
        self.commits.remove_snapshot(name)

    @door
    @not_compiled
    def rewind(self, steps: int = 1) -> tuple[int, dict[str, Any]]:
        """Go back to an earlier step: to what `resume` would have found then. Call it between two steps.

        Args:
            steps: how many, at most `rewind_steps` of the section. Those that `step` skipped count.

        Returns:
            As `resume`.

        Raises:
            ValueError: no number of steps.
            StateError: there is no such step, or it is not whole any more; nothing has changed.
            ResumeError: it is not the same on all ranks.
        """
        resumption = self._resumption("rewind")
        self._between_steps("rewind")
        return self._take_over(resumption.rewind(steps))

    def _resumption(self, method: str) -> Resumption:
        """Return what brings committed steps back, when all parameters have their place."""
        self._check_owner(method)
        self.commits.ranks().together(self._owner.place)
        return Resumption(self.commits, self._owner.param_groups, self._owner.check_group)

    def _take_over(self, content: Content) -> tuple[int, dict[str, Any]]:
        return content.step, dict(content.client_state)

    def _between_steps(self, method: str) -> int | None:
        """Complete a step that an exception stopped; return how many were taken, None if the run counts them."""
        self._check_owner(method)
        return None

    def _check_owner(self, method: str) -> None:
        """Raise StateError where an engine counts steps, and commits more than its optimizer."""
        if self.commits.engines_model is not None and not self._is_engines:
            raise StateError(f"optimizer.{method}", f"engine.{method} for the run of an engine", "its optimizer's")

    def _added(self) -> dict[str, Any]:
        return {}
