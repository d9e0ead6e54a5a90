"""Host memory that tensors are copied and read into, used again as soon as nobody has it."""

import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from ..host.region import HostRegion
from ..units import round_up


class TargetPool:
    """Lends memory as tensors, and takes it back when the last of them is gone. From any thread.

    Memory that comes from the system for each read is zeroed page by page before it is used. Where malloc gave freed
    memory back at once, that halved the rate of reads, at four times the processor time. So at most `kept_bytes` that
    nobody uses are kept. `prepare` is called with each new region.
    """

    def __init__(self, kept_bytes: int, prepare: Callable[[HostRegion], object] = lambda region: None) -> None:
        self._kept_bytes = kept_bytes
        self._prepare = prepare
        self._free: defaultdict[int, deque[HostRegion]] = defaultdict(deque)
        self._lent: dict[int, tuple[weakref.ref[memoryview], HostRegion]] = {}

    def take(self, size_bytes: int) -> torch.Tensor:
        """Lend memory: a tensor of bytes, 1D uint8 [size_bytes], at least 1, with any values."""
        try:
            region = self._free[round_up(size_bytes, mmap.PAGESIZE)].popleft()
        except IndexError:
            for gone, _ in list(self._lent.values()):
                if gone() is None:  # an exception took the word of it
                    self._take_back(gone)
            if self.free_bytes + size_bytes > self._kept_bytes:
                self._free.clear()  # of other sizes
            region = HostRegion(size_bytes)
            self._prepare(region)
        # A storage keeps what it was made from, and this is what only the storage keeps.
        tensor, gone = region.lend(torch.uint8, size_bytes, self._take_back)
        self._lent[id(gone)] = gone, region
        return tensor

    def clear(self) -> None:
        """Keep nothing that nobody uses."""
        self._free.clear()

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody uses."""
        return sum(size_bytes * len(regions) for size_bytes, regions in list(self._free.items()))

    def _take_back(self, gone: weakref.ref[memoryview]) -> None:
        # Called by whatever thread let the tensor go, perhaps in a garbage collection: so there is no lock.
        _, region = self._lent.pop(id(gone), (None, None))
        if region is not None and self.free_bytes + region.size_bytes <= self._kept_bytes:
            self._free[region.size_bytes].append(region)
