"""What an optimizer offers of its durable run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from nvme_offload.offload._torch_private import not_compiled
from nvme_offload.offload.durable.rewrite_every import DurableBytes
from nvme_offload.offload.errors import StateError
from nvme_offload.optim.durable.commits import Commits
from nvme_offload.optim.durable.resume import Resumption
from nvme_offload.optim.layout.master import DTYPE_OF_FORM
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.stats import Meter
from nvme_offload.optim.wear import Wear


class DurableMethods(ABC):
    """Methods of an optimizer whose section says ``durable``; with any other they raise StateError."""

    param_groups: list[dict[str, Any]]
    _commits: Commits | None = None

    def _take_on_durable(self, store: StateStore, meter: Meter, norm_group: dist.ProcessGroup | None) -> None:
        """Commit each step from now on, where the store is that of a durable run."""
        if store.sealing is not None:
            self._commits = Commits(store, store.sealing, meter, norm_group)
        section = store.config.zero_optimization.offload_optimizer
        period = store.sealing.logs.period if store.sealing is not None else None
        self._wear = Wear(section, lambda: _written_by(store), lambda: _size_of(store), period)

    def _commit_step(self) -> None:
        """Commit the step that has ended, unless a training engine does when it has done its own part of it."""
        self._wear.note_step()
        if self._commits is not None and not self._commits.of_engine:
            self._commits.end_step(self.param_groups, self._commits.step + 1)

    def _end_commits(self) -> None:
        """Have the latest step last, and take no more."""
        if self._commits is not None:
            self._commits.close()

    @property
    def _commit_stats(self) -> dict[str, Any]:
        return self._wear.stats | (self._commits.stats if self._commits is not None else {})

    @abstractmethod
    def check_group(self, group: Mapping[str, Any], number: int) -> None:
        """See `OffloadOptimizer.check_group`."""

    @abstractmethod
    def place(self) -> None:
        """See `OffloadOptimizer.place`."""

    @property
    def commits(self) -> Commits:
        """The commits of the durable run, for a training engine.

        Raises:
            StateError: the section does not say ``durable``.
        """
        if self._commits is None:
            name = type(self).__name__
            raise StateError(name, "durable in offload_optimizer of the section", "state that ends with the process")
        return self._commits

    @property
    def is_durable(self) -> bool:
        """Whether each step is committed, so that a killed run goes on from there."""
        return self._commits is not None

    @property
    def client_state(self) -> dict[str, Any]:
        """What else is committed with each step: change it before `step`, or `commit` what was changed after it.

        Anything that ``torch.load(weights_only=True)`` reads: the position in the data, other random numbers.
        """
        return self.commits.client_state

    @client_state.setter
    def client_state(self, value: Mapping[str, Any]) -> None:
        self.commits.client_state = dict(value)

    @not_compiled
    def commit(self) -> None:
        """Commit what there is between two steps: `client_state`, hyperparameters, parameters changed by hand.

        It lasts when this returns.

        Raises:
            StateError: a step stopped halfway, or another rank could not.
            SwapIOError, OutOfSpaceError: the drive did not take it; the commit before is whole.
            ValueError: something cannot be committed; names it.
        """
        self.commits.commit(self.param_groups)

    @not_compiled
    def resume(self, snapshot: str | None = None) -> tuple[int, dict[str, Any]] | None:
        """Go on from the latest step that the durable run has committed. Call it before the first step.

        Parameters, state, hyperparameters and torch's random numbers are then as they were when that step ended.
        Where it is damaged, the step before is taken. With several ranks all of them call it.

        Args:
            snapshot: go on from the step that `snapshot` kept under this name instead; also between two steps.

        Returns:
            The step, which counts calls of `step` from the beginning of the run on, and `client_state` as it was
            committed; None where there is nothing to go on from.

        Raises:
            KeyError: there is no such snapshot.
            ResumeError: what was committed is of another model, group, section or rank, or damaged; names what.
            StateError: the run has begun already.
        """
        found = self.resumption()
        content = found.resume() if snapshot is None else found.resume_snapshot(snapshot)
        return None if content is None else (content.step, dict(content.client_state))

    def snapshot(self, name: str) -> int:
        """Keep the latest step under a name, until `remove_snapshot`: `resume` goes back to it. Returns the step.

        No byte of state is moved; the space that later steps need in its place is reserved.

        Raises:
            ValueError: the name is taken, or has other characters than letters, digits, dots, underscores and hyphens.
            OutOfSpaceError: there is no room; nothing is kept.
            StateError: a step stopped halfway, or does not last; or another rank could not.
        """
        return self.commits.snapshot(name)

    def remove_snapshot(self, name: str) -> None:
        """Give up what `snapshot` kept, and its space.

        Raises:
            KeyError: there is none of this name.
        """
        self.commits.remove_snapshot(name)

    @not_compiled
    def rewind(self, steps: int = 1) -> tuple[int, dict[str, Any]]:
        """Go back to an earlier step: to what `resume` would have found then. Call it between two steps.

        Args:
            steps: how many, at most `rewind_steps` of the section. Those that `step` skipped count.

        Returns:
            As `resume`.

        Raises:
            ValueError: no number of steps.
            StateError: there is no such step, or it is not whole any more.
            ResumeError: it is damaged.
        """
        content = self.resumption().rewind(steps)
        return content.step, dict(content.client_state)

    def resumption(self) -> Resumption:
        """What `resume` and `rewind` do of the optimizer, for a training engine, which has more to bring back.

        Raises:
            StateError: the section does not say ``durable``.
        """
        commits = self.commits
        commits.ranks().together(self.place)
        return Resumption(commits, self.param_groups, self.check_group)


def _written_by(store: StateStore) -> int:
    """Bytes of state, parameters and gradients that went to drives."""
    engines = [store.tier.stats()] if store.tier else []
    return sum(engine.bytes_written for engine in [*engines, *store.blocks.engine_stats])


def _size_of(store: StateStore) -> DurableBytes:
    """Of the state that is logged, with what a base has besides; of all of it where none is."""
    size, sealing = DurableBytes(state=0, tail=0, grad=0, numel=0), store.sealing
    logs = sealing is not None and sealing.logs.period > 1
    for slot in store.slots:
        if logs and sealing is not None and not sealing.is_logged(slot):
            continue
        subgroup = slot.subgroup
        dtype, numel = subgroup.tail_dtype, subgroup.numel
        grad = DTYPE_OF_FORM[subgroup.form].itemsize * numel
        size += DurableBytes(
            state=subgroup.size_bytes, tail=dtype.itemsize * numel if dtype else 0, grad=grad, numel=numel
        )
    return size
