"""What a training engine offers of its durable run, and what it commits with each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from nvme_offload.offload.errors import ResumeError
from nvme_offload.optim.durable.content import Content
from nvme_offload.optim.optimizer import OffloadOptimizer
from nvme_offload.optim.precision.loss_scale import LossScaler


class DurableEngine(ABC):
    """Methods of an engine whose section says ``durable``; with any other they raise StateError."""

    module: nn.Module
    optimizer: OffloadOptimizer
    lr_scheduler: LRScheduler | None
    global_steps: int
    _scaler: LossScaler | None
    _kept_buffers: list[str] | None = None

    @abstractmethod
    def _end_step_under_way(self, method: str) -> None:
        """Do what is left of a step that an exception stopped; raise StateError between two micro-batches."""

    @abstractmethod
    def _go_on_from(self, global_steps: int) -> None:
        """Forget gathered weights and gradients: those of the model are others now."""

    @property
    def client_state(self) -> dict[str, Any]:
        """What else is committed with each step: change it before `step`, or `commit` what was changed after it.

        Anything that ``torch.load(weights_only=True)`` reads: the position in the data, other random numbers. Each
        rank has its own.
        """
        return self.optimizer.client_state

    @client_state.setter
    def client_state(self, value: Mapping[str, Any]) -> None:
        self.optimizer.client_state = dict(value)

    def commit(self) -> None:
        """Commit what there is between two steps: `client_state`, parameters and buffers changed by hand.

        Every rank must call it. It lasts when this returns. See `OffloadOptimizer.commit`.

        Raises:
            StateError: micro-batches of an unfinished step, a step that stopped halfway, or another rank could not.
            SwapIOError, OutOfSpaceError, ValueError: see `OffloadOptimizer.commit`.
        """
        commits = self.optimizer.commits
        self._end_step_under_way("commit")
        commits.step = self.global_steps
        commits.commit(self.optimizer.param_groups, self._own_part())

    def snapshot(self, name: str) -> int:
        """Keep the latest step under a name, until `remove_snapshot`; every rank must call it. Returns the step.

        Raises:
            ValueError, OutOfSpaceError, StateError: see `OffloadOptimizer.snapshot`.
        """
        commits = self.optimizer.commits
        self._end_step_under_way("snapshot")
        return commits.snapshot(name)

    def remove_snapshot(self, name: str) -> None:
        """Give up what `snapshot` kept, and its space; every rank must call it.

        Raises:
            KeyError: there is none of this name.
        """
        self.optimizer.remove_snapshot(name)

    def resume(self, snapshot: str | None = None) -> tuple[int, dict[str, Any]] | None:
        """Go on from the latest step that all ranks of the durable run have committed; every rank must call it.

        Call it after `initialize`, before the first step. Parameters, buffers, state, schedule, loss scale and torch's
        random numbers are then as they were when that step ended.

        Args:
            snapshot: go on from the step that `snapshot` kept under this name instead; also between two steps.

        Returns:
            `global_steps` and `client_state` as they were committed; None where there is nothing to go on from.

        Raises:
            KeyError, ResumeError, StateError: see `OffloadOptimizer.resume`.
        """
        resumption = self.optimizer.resumption()
        content = resumption.resume() if snapshot is None else resumption.resume_snapshot(snapshot)
        return None if content is None else self._take_over(content)

    def rewind(self, steps: int = 1) -> tuple[int, dict[str, Any]]:
        """Go back to an earlier step; every rank must call it, between two steps.

        Args:
            steps: how many, at most `rewind_steps` of the section. Those that were skipped count.

        Returns:
            As `resume`.

        Raises:
            ValueError, StateError, ResumeError: see `OffloadOptimizer.rewind`.
        """
        resumption = self.optimizer.resumption()
        self._end_step_under_way("rewind")
        return self._take_over(resumption.rewind(steps))

    def _commit_step(self) -> None:
        """Commit the step that has ended."""
        if self.optimizer.is_durable:
            self.optimizer.commits.end_step(self.optimizer.param_groups, self.global_steps, self._own_part())

    def _commit_loaded(self, client_state: Mapping[str, Any]) -> None:
        """Commit what a checkpoint has brought: what was before is not gone back to."""
        if self.optimizer.is_durable:
            self.optimizer.client_state = dict(client_state)
            self.commit()

    def _own_part(self) -> dict[str, Any]:
        return {
            "loss_scale": self._scaler.state_dict() if self._scaler else None,
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler else None,
            "lr_scheduler_type": type(self.lr_scheduler).__name__ if self.lr_scheduler else None,
            "buffers": {name: buffer.detach() for name, buffer in self._buffers().items()},
        }

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Those that a checkpoint has, too."""
        buffers = dict(self.module.named_buffers())
        if self._kept_buffers is None:
            kept = self.module.state_dict().keys()
            self._kept_buffers = [name for name in buffers if name in kept]
        return {name: buffers[name] for name in self._kept_buffers if name in buffers}

    def _take_over(self, content: Content) -> tuple[int, dict[str, Any]]:
        self.optimizer.commits.ranks().together(partial(self._restore, content))
        return content.step, dict(content.client_state)

    def _restore(self, content: Content) -> None:
        own, part = self._own_part(), content.engine
        folder = self.optimizer.commits.run.folder
        for what in ("loss_scale", "lr_scheduler"):
            if (own[what] is None) != (part.get(what) is None):
                raise ResumeError(folder, f"was committed {'without' if own[what] else 'with'} a {what}")
        if self._scaler is not None:
            self._scaler.load_state_dict(part["loss_scale"])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(part["lr_scheduler"])
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                if name in part["buffers"]:
                    buffer.copy_(part["buffers"][name])
        self._go_on_from(content.step)
