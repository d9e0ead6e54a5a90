"""How far apart trainings end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nvme_offload.perf.experiments.peers.worker import model_of


class Distance:
    """From a training, in units of the way that its weights have come.

    Args:
        size: Layers and width of the model.
        reference: File with the master weights at the end of that training, by name.
    """

    def __init__(self, size: str, reference: Path) -> None:
        self._reference = load(reference)
        start = dict(model_of(size).named_parameters())
        self._way = sum(float((end - start[name].detach()).double().square().sum()) for name, end in self._items())

    def of(self, weights: Path) -> float:
        """Norm of the difference over the norm of the way; 0 where all bits are the same.

        Raises:
            KeyError: a parameter is missing.
        """
        others = load(weights)
        apart = sum(float((others[name] - end).double().square().sum()) for name, end in self._items())
        return float((apart / self._way) ** 0.5)

    def _items(self) -> list[tuple[str, Tensor]]:
        return list(self._reference.items())


def same_bits(some: Path, others: Path) -> bool:
    """Whether two files have the same weights, bit for bit."""
    first, second = load(some), load(others)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def load(path: Path) -> Mapping[str, Tensor]:
    """Weights by name, mapped from a file and not read."""
    weights: Mapping[str, Tensor] = torch.load(path, mmap=True, weights_only=True)
    return weights
