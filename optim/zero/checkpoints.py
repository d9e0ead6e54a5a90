"""A training engine saves checkpoints while it waits, or beside the steps that follow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from nvme_offload.optim.checkpoint import save_load as checkpoint
from nvme_offload.optim.checkpoint.background import BackgroundSave, begin_save
from nvme_offload.optim.checkpoint.run_state import TrainingParts
from nvme_offload.optim.optimizer import OffloadOptimizer
from nvme_offload.optim.zero.durable import DurableTraining, EnginePart


class CheckpointEngine(ABC):
    """Methods of an engine that write and read checkpoints."""

    optimizer: OffloadOptimizer
    lr_scheduler: LRScheduler | None
    global_steps: int
    _part: EnginePart
    _background: BackgroundSave | None = None

    @property
    @abstractmethod
    def _training(self) -> TrainingParts:
        """Return what a checkpoint is of, as it is now."""

    @property
    @abstractmethod
    def durable(self) -> DurableTraining:
        """The durable run of the training."""

    @abstractmethod
    def _between_steps(self, method: str) -> int:
        """Do what is left of a step that an exception stopped; return `global_steps`."""

    @abstractmethod
    def _go_on_from(self, global_steps: int) -> None:
        """Forget gathered weights and gradients: those of the model are others now."""

    def save_checkpoint(
        self,
        dir: str | Path,  # noqa: A002  # the public name
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        background: bool = False,
        share: float = 0.25,
    ) -> bool:
        """Write a checkpoint into the folder `tag` of `dir`, and make it the latest; every rank must call it.

        It gets its name only when it is whole: killed while saving, the checkpoint before is the one that is loaded.

        Args:
            dir: a folder that all ranks share; made if it is missing.
            tag: by default ``global_step`` and the number of steps.
            client_state: what else to keep: anything that ``torch.load(weights_only=True)`` can load. Rank 0's counts.
            background: return when the step is pinned, and write the same files while training goes on. Of a `durable`
                run, which reserves the space of another step for this. `wait_for_checkpoint`, `close` and the next save
                or load wait for it; ``stats().checkpoint_progress`` of the optimizer says how far it is.
            share: of the time that writing in the background may take, above 0, at most 1.

        Returns:
            True.

        Raises:
            StateError: micro-batches of an unfinished step, a step that stopped halfway, or another run saving there;
                `background` without a durable run.
            OutOfSpaceError: there is no room to pin the step; nothing has begun.
            ValueError: the tag, `client_state` or something else cannot be saved; nothing was written.
            FileExistsError: something that is no checkpoint has this name.
            CheckpointWriteError, SwapIOError: the drive is full or failed, or a tier did. Nothing of it is left.
        """
        if not 0 < share <= 1:
            raise ValueError(f"save_checkpoint: share = {share!r} of the time; write a number above 0, at most 1")
        self._between_steps("save_checkpoint")
        self._join_checkpoint()
        if background:
            self._save_in_background(Path(dir), tag, client_state, share)
        else:
            checkpoint.save(self._training, Path(dir), tag, client_state)
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is written in the background has its name; every rank must call it.

        Raises:
            CheckpointWriteError, SwapIOError, CorruptionError: what it failed with: nothing of it is left.
        """
        failure = self._join_checkpoint()
        if failure is not None:
            raise failure

    def load_checkpoint(
        self,
        dir: str | Path,  # noqa: A002  # the public name
        tag: str | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint, saved by any number of ranks on any tier; every rank must call it.

        Args:
            dir: as for `save_checkpoint`.
            tag: by default the latest.

        Returns:
            Its folder and the `client_state`; None twice where `dir` holds no checkpoint at all;
            a warning if it holds anything else.

        Raises:
            CheckpointError, ValueError: it is damaged, unsafe or does not fit; nothing was changed.
            SwapIOError: a tier failed on the way; load again.
        """
        self._join_checkpoint()
        loaded = checkpoint.load(self._training, Path(dir), tag, lambda found: self._go_on_from(found.global_steps))
        if loaded is None:
            return None, None
        if self.optimizer.is_durable:  # what was before is not gone back to
            self.durable.client_state = loaded.client_state
            self.durable.commit()
        return str(loaded.path), loaded.client_state

    def _save_in_background(
        self, root: Path, tag: str | None, client_state: Mapping[str, Any] | None, share: float
    ) -> None:
        commits = self.optimizer.durable.commits
        manifest = commits.pin(self.optimizer.param_groups, self._part.taken(self.lr_scheduler), self.global_steps)
        try:
            save = begin_save(self._training, manifest, root, tag, client_state, share)
        except BaseException:
            commits.unpin()
            raise
        self._background = save
        commits.watch(save)

    def _join_checkpoint(self) -> BaseException | None:
        """Wait for the checkpoint that is written in the background, and return what it failed with, if it did."""
        save, self._background = self._background, None
        if save is None:
            return None
        save.join()
        self.optimizer.durable.commits.unpin()
        return save.failure
