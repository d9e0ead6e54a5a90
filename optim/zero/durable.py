"""A training engine offers its durable run, and adds to what is committed with each step."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from nvme_offload.offload.errors import ResumeError
from ..checkpoint.bases import Bases, as_json, changes
from ..durable.content import Content
from ..durable.object import Durable
from ..optimizer import OffloadOptimizer
from ..precision.loss_scale import LossScaler


class EnginePart:
    """A training engine adds this to each commit: loss scale, schedule, buffers."""

    def __init__(self, module: nn.Module, scaler: LossScaler | None, bases: Bases) -> None:
        self._bases = bases
        self.scaler = scaler
        self._module = module
        self._kept: list[str] | None = None

    def scale_by(self, scaler: LossScaler) -> None:
        """See `OffloadEngine.scale_by`."""
        self.scaler = scaler

    def taken(self, lr_scheduler: LRScheduler | None) -> dict[str, Any]:
        """Return it as it is now."""
        return {
            "loss_scale": self.scaler.state_dict() if self.scaler else None,
            "lr_scheduler": lr_scheduler.state_dict() if lr_scheduler else None,
            "lr_scheduler_type": type(lr_scheduler).__name__ if lr_scheduler else None,
            "bases": as_json(self._bases),
            "buffers": {name: buffer.detach() for name, buffer in self._buffers().items()},
        }

    def restore(self, part: Mapping[str, Any], lr_scheduler: LRScheduler | None, folder: Path) -> None:
        """Bring back what was committed. ResumeError: one side lacks a loss scale or schedule, or a base changed."""
        for what, own in (("loss_scale", self.scaler), ("lr_scheduler", lr_scheduler)):
            if (own is None) != (part.get(what) is None):
                raise ResumeError(folder, f"was committed {'with' if own is None else 'without'} a {what}")
        if problems := changes(part.get("bases", {}), self._bases):
            raise ResumeError(folder, "; ".join(problems))
        if self.scaler is not None:
            self.scaler.load_state_dict(part["loss_scale"])
        if lr_scheduler is not None:
            lr_scheduler.load_state_dict(part["lr_scheduler"])
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                if name in part["buffers"]:
                    buffer.copy_(part["buffers"][name])

    def _buffers(self) -> dict[str, torch.Tensor]:
        buffers = dict(self._module.named_buffers())
        if self._kept is None:
            kept = self._module.state_dict(keep_vars=True).keys()
            self._kept = [name for name in buffers if name in kept]
        return {name: buffers[name] for name in self._kept if name in buffers}


class DurableTraining(Durable):
    """The durable run of a training engine: ``engine.durable``. Each of its methods is the engine's, too.

    Every rank must call each of them. Buffers, schedule and loss scale are committed and brought back with the rest,
    and steps are `global_steps`; those that were skipped count. StateError of ``commit``, ``snapshot`` and ``rewind``
    says, too, that micro-batches of an unfinished step are there.
    """

    _is_engines = True

    def __init__(
        self,
        optimizer: OffloadOptimizer,
        part: EnginePart,
        lr_scheduler: LRScheduler | None,
        between_steps: Callable[[str], int],
        go_on_from: Callable[[int], None],
    ) -> None:
        super().__init__(optimizer.durable.commits, optimizer)
        self._part = part
        self._lr_scheduler = lr_scheduler
        self._go_on_from = go_on_from
        self._complete = between_steps

    def end_step(self, global_steps: int) -> None:
        """Commit the step that has ended, behind the caller's back."""
        self.commits.end_step(self._owner.param_groups, global_steps, self._added())

    def _between_steps(self, method: str) -> int:
        return self._complete(method)

    def _added(self) -> dict[str, Any]:
        return self._part.taken(self._lr_scheduler)

    def _take_over(self, content: Content) -> tuple[int, dict[str, Any]]:
        self.commits.ranks().together(partial(self._restore, content))
        return super()._take_over(content)

    def _restore(self, content: Content) -> None:
        self._part.restore(content.engine, self._lr_scheduler, self.commits.run.folder)
        self._go_on_from(content.step)
