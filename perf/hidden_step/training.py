"""A model in training with one schedule, and how long its iterations take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from nvme_offload import OffloadEngine, initialize
from nvme_offload.perf.hidden_step.models import BACKWARD_SHARE, Shape, SleepingModel
from nvme_offload.perf.planning.schedule import (
    GroupTime,
    IterationTime,
    OverlapStep,
    SubgroupTime,
    Work,
    iteration_time,
)

BYTES_PER_PARAMETER = 20
"""Read and written in one step with AdamW in bf16."""
BIRTHS = 3
"""Iterations until all state exists and the order of the gathers is known."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model and what it has to make do with."""

    width: int = 512
    subgroups: int = 48
    buffers: int = 4
    shape: Shape = "layers"

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return self.subgroups * self.width**2

    @property
    def bytes_moved(self) -> int:
        """Bytes that move in an iteration in which every subgroup is read and written."""
        return self.numel * BYTES_PER_PARAMETER

    def bound(self, overlap_step: OverlapStep, compute: float, nvme: float) -> IterationTime:
        """What the model of `offload plan` says of an iteration.

        Args:
            overlap_step: the schedule.
            compute: seconds of forward and backward.
            nvme: seconds in which all bytes move.
        """
        ends = self.subgroups // 8 if self.shape == "lm" else 0
        layers = self.subgroups - 2 * ends
        layer = GroupTime(forward=compute * (1 - BACKWARD_SHARE) / layers, backward=compute * BACKWARD_SHARE / layers)
        end = (GroupTime(forward=0.0, backward=0.0),) if ends else ()
        groups = (*end, *(layer for _ in range(layers)), *end)
        homes = [0] * ends + [number + bool(ends) for number in range(layers)] + [layers + 1] * ends
        half = nvme / 2 / self.subgroups
        subgroups = tuple(SubgroupTime(first=home, last=home, read=half, update=0.0, write=half) for home in homes)
        return iteration_time(Work(groups=groups, subgroups=subgroups, num_buffers=self.buffers), overlap_step)

    def model(self) -> SleepingModel:
        """A new model, with the same weights each time."""
        torch.manual_seed(0)
        return SleepingModel(self.width, self.subgroups, self.shape)


def section(
    overlap_step: OverlapStep, path: Path | None, *, sub_group_size: int, buffers: int, engine: str = "auto"
) -> dict[str, Any]:
    """A configuration section. Clipping is on, but with ``backward``, where nothing may come between.

    Args:
        overlap_step: the schedule.
        path: folder on the drive; None keeps the state in host memory.
        sub_group_size: parameters of a subgroup.
        buffers: staging buffers.
        engine: what does the I/O.
    """
    drive: dict[str, Any] = {"device": "cpu"}
    if path is not None:
        drive = {"device": "nvme", "nvme_path": str(path), "buffer_count": buffers}
    schedule: dict[str, Any] = {"gradient_clipping": 1.0}
    if overlap_step == "backward":
        schedule = {"gradient_clipping": 0.0, "skip_non_finite": False}
    if overlap_step != "off":
        schedule["overlap_step"] = overlap_step
    return {
        "zero_optimization": {"stage": 3, "sub_group_size": sub_group_size, "offload_optimizer": drive},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "aio": {"engine": engine},
        **schedule,
    }


@dataclass(frozen=True)
class Iteration:
    """Seconds of one iteration, from one `engine.step()` to the next."""

    forward: float
    backward: float
    step: float

    @property
    def seconds(self) -> float:
        """Seconds of all of it."""
        return self.forward + self.backward + self.step


class Training(AbstractContextManager["Training"]):
    """A model in `initialize` with some iterations behind it.

    Args:
        model: gives a tensor for `batch`.
        batch: the same in each iteration.
        section: the configuration section.
    """

    def __init__(self, model: nn.Module, batch: torch.Tensor, section: dict[str, Any]) -> None:
        self._batch = batch
        self.engine: OffloadEngine = initialize(model, section)
        self.iterations(BIRTHS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()

    def iterations(self, count: int) -> list[Iteration]:
        """Train for `count` iterations, one after the other; then wait for all that runs.

        Before the first one nothing runs: it is shorter than those after it.
        """
        taken = list(self._train(count))
        self.engine.optimizer.synchronize()
        return taken

    def _train(self, count: int) -> Iterator[Iteration]:
        for _ in range(count):
            began = time.perf_counter()
            loss = self.engine(self._batch).float().square().mean()
            computed = time.perf_counter()
            self.engine.backward(loss)
            back = time.perf_counter()
            self.engine.step()
            yield Iteration(computed - began, back - computed, time.perf_counter() - back)
