"""Layers as models have them, to measure and to verify with."""

import torch
from torch import nn


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
