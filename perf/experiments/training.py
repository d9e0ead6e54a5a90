"""Models that are measured: layers that compute, layers that sleep, and how long iterations of them take."""

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvme_offload import OffloadEngine, initialize
from nvme_offload.offload.config.section import SectionLike
from nvme_offload.offload.devices.device import is_device, wait_for_all

BACKWARD_SHARE = 2 / 3  # the share of an iteration's computing that backward has; forward has the rest

_NARROW = 0.1  # of a layer's output: activations stay of one size through any number of layers


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grads[0], None, None


class SleepingLayer(nn.Module):
    """A square matrix, and the time that a layer of a real model would compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, width, bias=False)
        self.seconds = 0.0  # the time of forward and backward together

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [..., width] and a little more, without a product, which takes time; sleeps, in backward too."""
        return hidden + _NARROW * torch.tanh(sleep(hidden, self.seconds) * self.weight.weight.mean(0))


def sleep(hidden: torch.Tensor, seconds: float) -> torch.Tensor:
    """Return the values after a sleep, so long with that of backward."""
    backward = seconds * BACKWARD_SHARE
    slept: torch.Tensor = _Wait.apply(hidden, seconds - backward, backward)  # type: ignore[no-untyped-call]
    return slept


class SleepingModel(nn.Module):
    """As many parameters as `count` square matrices of this width; one subgroup each."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SleepingLayer(width) for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [tokens, width] after the last layer."""
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def compute_for(self, seconds: float) -> None:
        """Let forward and backward together take so long."""
        for layer in self.layers:
            assert isinstance(layer, SleepingLayer)
            layer.seconds = seconds / len(self.layers)


class Training(AbstractContextManager["Training"]):
    """A model in `initialize`, given the same batch each time, with some iterations behind it.

    Until all state exists, the order of the gathers is known, and guesses are made, 6 `births` are needed.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: torch.Tensor,
        section: SectionLike,
        births: int = 6,
        weights: Path | None = None,
    ) -> None:
        self.engine: OffloadEngine = initialize(model, section, weights=weights)
        self._batches = [batch] * self.engine.gradient_accumulation_steps
        self._iterate(births)

    def __exit__(self, *exception: object) -> None:
        self.engine.close()

    def seconds(self, count: int) -> float:
        """Train; return the mean seconds of `count` iterations behind one that does not count, and end what runs on.

        Before the first one nothing runs: it is shorter than those after it.
        """
        first, *_, last = self._iterate(1 + count)
        return (last - first) / count

    def moved(self) -> dict[str, int]:
        """Return the bytes that were read and written until now, by kind and way."""
        stats = self.engine.optimizer.stats()
        names = [f"{kind}bytes_{way}" for kind in ("", "param_", "grad_") for way in ("read", "written")]
        moved = {name: getattr(stats, name) for name in names}
        if self.engine.activations is not None:
            kept = self.engine.activations.stats()
            moved |= {"kept_bytes_read": kept.read_bytes, "kept_bytes_written": kept.written_bytes}
        return moved

    def _iterate(self, count: int) -> list[float]:
        """Return the moments at which `count` iterations had ended; a device has computed all of the last one."""
        moments = []
        for _ in range(count):
            self.engine.accumulate(lambda batch: self.engine(batch).float().square().mean(), self._batches)
            self.engine.step()
            moments.append(time.perf_counter())
        if is_device(device := self._batches[0].device):
            wait_for_all(device)
            moments[-1] = time.perf_counter()
        self.engine.optimizer.synchronize()
        return moments
