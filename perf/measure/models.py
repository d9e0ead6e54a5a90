"""Models that are planned or measured: layers that compute, and layers that sleep as a processor does beside a GPU."""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from torch import nn

Shape = Literal["layers", "lm"]

BACKWARD_SHARE = 2 / 3
"""Of the time of an iteration's computing; forward has the rest."""

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
        self.seconds = 0.0
        """Of forward and backward together."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [..., width] and a little more; sleeps here and in backward."""
        backward = self.seconds * BACKWARD_SHARE
        waited: torch.Tensor = _Wait.apply(hidden, self.seconds - backward, backward)  # type: ignore[no-untyped-call]
        return hidden + _NARROW * torch.tanh(self.weight(waited))


class SleepingModel(nn.Module):
    """As many parameters as `count` square matrices of this width; one subgroup each.

    Args:
        width: of the matrices.
        count: of the matrices.
        shape: "layers": all are layers. "lm": an eighth is an embedding and an eighth a head, which do not sleep.
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
