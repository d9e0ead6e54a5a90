"""A model in training with one schedule, and how long its iterations take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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

READ_PER_PARAMETER, WRITTEN_PER_PARAMETER = 10, 10
"""Bytes in one step with AdamW in bf16."""
DURABLE_PER_PARAMETER = 2
"""Bytes that a durable run writes besides."""
BIRTHS = 6
"""Iterations until all state exists, the order of the gathers is known, and what can be guessed is guessed."""
LIMIT = 1e3
"""Norm from which on the sections clip: far above that of these models."""


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

    def bytes_moved(self, overlap_step: OverlapStep) -> int:
        """Bytes that move in an iteration in which every subgroup is read and written."""
        return self.numel * (READ_PER_PARAMETER + _written(overlap_step))

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
        write = nvme / self.subgroups * _written(overlap_step) / (READ_PER_PARAMETER + _written(overlap_step))
        read = nvme / self.subgroups - write
        subgroups = tuple(SubgroupTime(first=home, last=home, read=read, update=0.0, write=write) for home in homes)
        return iteration_time(Work(groups=groups, subgroups=subgroups, num_buffers=self.buffers), overlap_step)

    def model(self) -> SleepingModel:
        """A new model, with the same weights each time."""
        torch.manual_seed(0)
        return SleepingModel(self.width, self.subgroups, self.shape)


def _written(overlap_step: OverlapStep) -> int:
    return WRITTEN_PER_PARAMETER + (DURABLE_PER_PARAMETER if overlap_step == "speculate" else 0)


def section(
    overlap_step: OverlapStep,
    path: Path | None,
    *,
    sub_group_size: int,
    buffers: int,
    engine: str = "auto",
    durable: bool | str = False,
) -> dict[str, Any]:
    """A configuration section. Clipping is on, but with ``backward``, where nothing may come between.

    Args:
        overlap_step: the schedule.
        path: folder on the drive; None keeps the state in host memory.
        sub_group_size: parameters of a subgroup.
        buffers: staging buffers.
        engine: what does the I/O.
        durable: whether the state outlives the run, or its name; ``speculate`` needs it.
    """
    drive: dict[str, Any] = {"device": "cpu"}
    if path is not None:
        drive = {"device": "nvme", "nvme_path": str(path), "buffer_count": buffers, "durable": durable}
    clipping: dict[str, Any] = {"gradient_clipping": LIMIT}
    if overlap_step == "backward":
        clipping = {"gradient_clipping": 0.0, "skip_non_finite": False}
    return {
        "zero_optimization": {"stage": 3, "sub_group_size": sub_group_size, "offload_optimizer": drive},
        "bf16": {"enabled": True},
        "overlap_step": overlap_step,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "aio": {"engine": engine},
        **clipping,
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
        self.scale: Callable[[], float] = lambda: 1.0
        """What the next loss is multiplied by."""
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
            loss = self.engine(self._batch).float().square().mean() * self.scale()
            computed = time.perf_counter()
            self.engine.backward(loss)
            back = time.perf_counter()
            self.engine.step()
            yield Iteration(computed - began, back - computed, time.perf_counter() - back)
