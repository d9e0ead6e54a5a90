"""Models that are measured: layers that compute, layers that sleep, and how long iterations of them take."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from nvme_offload import OffloadEngine, initialize

Shape = Literal["layers", "lm"]

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
        backward = self.seconds * BACKWARD_SHARE
        waited: torch.Tensor = _Wait.apply(hidden, self.seconds - backward, backward)  # type: ignore[no-untyped-call]
        return hidden + _NARROW * torch.tanh(waited * self.weight.weight.mean(0))


class SleepingModel(nn.Module):
    """As many parameters as `count` square matrices of this width; one subgroup each.

    Of the shape "lm" an eighth is an embedding and an eighth a head, which do not sleep; else all are layers.
    """

    def __init__(self, width: int, count: int, shape: Shape) -> None:
        super().__init__()
        in_ends = count // 8 if shape == "lm" else 0
        self.embedding = nn.Embedding(width * in_ends, width) if in_ends else None
        self.layers = nn.ModuleList(SleepingLayer(width) for _ in range(count - 2 * in_ends))
        self.head = nn.Linear(width, width * in_ends, bias=False) if in_ends else None
        self.sample = torch.zeros(2, dtype=torch.long) if in_ends else torch.randn(2, width)
        """An input: two tokens, or two hidden states."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The output of the last layer or, with a head, logits."""
        hidden = self.embedding(batch) if self.embedding is not None else batch
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden) if self.head is not None else hidden

    def compute_for(self, seconds: float) -> None:
        """Let forward and backward together take so long."""
        for layer in self.layers:
            assert isinstance(layer, SleepingLayer)
            layer.seconds = seconds / len(self.layers)


class Layer(nn.Module):
    """A norm and a feed-forward network with four times the width, on a residual stream: 8 x width^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [tokens, width] after this layer."""
        changed: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return hidden + changed


def layered_model(layers: int, width: int) -> nn.Sequential:
    """`layers` layers, with values of torch's generator, or on the device of the context."""
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


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


def bf16_params(count: int, numel: int) -> list[nn.Parameter]:
    """Make parameters of so many elements each, which have gradients."""
    params = [nn.Parameter(torch.randn(numel).mul_(0.05).bfloat16()) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(numel).bfloat16()
    return params


class Training(AbstractContextManager["Training"]):
    """A model in `initialize`, given the same batch each time, with some iterations behind it.

    Until all state exists, the order of the gathers is known, and guesses are made, 6 `births` are needed.
    """

    def __init__(self, model: nn.Module, batch: torch.Tensor, section: dict[str, Any], births: int = 6) -> None:
        self._batch = batch
        self.engine: OffloadEngine = initialize(model, section)
        self.iterations(births)

    def __exit__(self, *exception: object) -> None:
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
            parts = [0.0, 0.0, 0.0]
            for _ in range(self.engine.gradient_accumulation_steps):
                moments = [time.perf_counter()]
                loss = self.engine(self._batch).float().square().mean()
                moments.append(time.perf_counter())
                self.engine.backward(loss)
                moments.append(time.perf_counter())
                self.engine.step()
                moments.append(time.perf_counter())
                parts = [part + moments[i + 1] - moments[i] for i, part in enumerate(parts)]
            yield Iteration(*parts)
