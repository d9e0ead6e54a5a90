"""The loader that ``deepspeed.initialize`` makes of training data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


def loader_of(
    data: Dataset[Any],
    size: int | None,
    collate_fn: Callable[[Any], Any] | None = None,
    sampler: Any = None,
    *,
    workers: int = 0,
    pin: bool = False,
    shuffle: bool = True,
) -> DataLoader[Any]:
    """Return a loader of batches of a size, of another part of the data on each rank. ValueError: there is no size."""
    if size is None:
        raise ValueError("deepspeed.initialize: training_data needs train_micro_batch_size_per_gpu in the section")
    if sampler is None and not isinstance(data, IterableDataset):
        sampler = DistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=shuffle)
    return DataLoader(data, size, sampler=sampler, collate_fn=collate_fn, num_workers=workers, pin_memory=pin)


class RepeatingLoader:
    """Goes through a loader again and again, and never ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._items = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._items = iter(self.loader)
            return next(self._items)
