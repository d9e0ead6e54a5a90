"""A model in training, and how long its iterations take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import mean
from types import TracebackType
from typing import Any

import torch
from torch import nn

from nvme_offload import OffloadEngine, initialize


@dataclass(frozen=True)
class Iteration:
    """Seconds of one iteration, from the end of one `engine.step()` to the end of the next."""

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
        births: iterations that are taken at once; until all state exists, the order of the gathers is known, and what
            can be guessed is guessed, 6 are needed.
    """

    def __init__(self, model: nn.Module, batch: torch.Tensor, section: dict[str, Any], births: int = 6) -> None:
        self._batch = batch
        self.scale: Callable[[], float] = lambda: 1.0
        """Gives what the next loss is multiplied by."""
        self.engine: OffloadEngine = initialize(model, section)
        self.iterations(births)

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

    def seconds(self, count: int) -> float:
        """Train for one iteration, and for `count` more; give the mean seconds of these."""
        return mean(one.seconds for one in self.iterations(1 + count)[1:])

    def _train(self, count: int) -> Iterator[Iteration]:
        for _ in range(count):
            parts = [0.0, 0.0, 0.0]
            for _ in range(self.engine.gradient_accumulation_steps):
                moments = [time.perf_counter()]
                loss = self.engine(self._batch).float().square().mean() * self.scale()
                moments.append(time.perf_counter())
                self.engine.backward(loss)
                moments.append(time.perf_counter())
                self.engine.step()
                moments.append(time.perf_counter())
                parts = [part + moments[i + 1] - moments[i] for i, part in enumerate(parts)]
            yield Iteration(*parts)
