"""Host memory that tensors are read back into, used again as soon as nobody has it."""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict, deque

import torch


class TargetPool:
    """Lends memory as tensors, and takes it back when the last of them is gone. From any thread.

    Memory that comes from the system for each read is zeroed page by page before it is used. Where malloc gave freed
    memory back at once, that halved the rate of reads, at four times the processor time.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._free: defaultdict[int, deque[mmap.mmap]] = defaultdict(deque)
        self._lent: dict[int, tuple[weakref.ref[memoryview], mmap.mmap]] = {}

    def take(self, size_bytes: int) -> torch.Tensor:
        """Lend memory: a tensor of bytes, 1D uint8 [size_bytes], at least 1, with any values."""
        try:
            region = self._free[size_bytes].popleft()
        except IndexError:
            region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A storage keeps what it was made from, and this is what only the storage keeps.
        lent = memoryview(region)
        gone = weakref.ref(lent, self._take_back)
        self._lent[id(gone)] = gone, region
        return torch.frombuffer(lent, dtype=torch.uint8)

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody uses."""
        return sum(size_bytes * len(regions) for size_bytes, regions in list(self._free.items()))

    def _take_back(self, gone: weakref.ref[memoryview]) -> None:
        # Called by whatever thread let the tensor go, perhaps in a garbage collection: so there is no lock.
        _, region = self._lent.pop(id(gone))
        if self.free_bytes + len(region) <= self._kept_bytes:
            self._free[len(region)].append(region)
