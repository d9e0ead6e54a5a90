"""Memory as a tier, of the host or of a device: its extents are memory already, and need no staging buffer."""

import mmap
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from nvme_offload.aio_native.engine import EngineStats, Op
from nvme_offload.aio_native.operation import PythonOperation
from ..host.buffer_pool import BufferPool, StagingBuffer
from ..host.region import HostRegion
from ..units import format_bytes, round_up
from .extent import Extent, Stripe
from .tier import Memory
from .transfer import Transfer

NO_FILE = -1
"""Descriptor of stripes that are in no file."""


class _Region(Memory, Protocol):
    size_bytes: int


class MemoryTier(ABC):
    """A `Tier` whose extents are memory, to be worked on in place; `read` and `write` copy, and are done at once."""

    name: str
    alignment = mmap.PAGESIZE

    def __init__(self) -> None:
        self._regions: weakref.WeakKeyDictionary[Extent, _Region] = weakref.WeakKeyDictionary()
        self._num_extents = 0
        self._bytes_by_kind: Counter[tuple[Op, str]] = Counter()

    @abstractmethod
    def _region(self, size_bytes: int) -> _Region:
        """Memory for an extent."""

    def reserve(self, sizes: Sequence[int]) -> list[Extent]:
        """Return one extent per size, in bytes, each in memory of its own. On MemoryError nothing is kept."""
        regions = [self._region(size) for size in sizes]
        numbers = range(self._num_extents, self._num_extents + len(regions))
        extents = [
            Extent(region.size_bytes, (Stripe(NO_FILE, number, region.size_bytes),))
            for number, region in zip(numbers, regions, strict=True)
        ]
        self._num_extents += len(regions)
        self._regions |= dict(zip(extents, regions, strict=True))
        return extents

    def free(self, extent: Extent) -> None:
        """Let the memory of an extent go, with its last user."""
        self._regions.pop(extent, None)

    def memory(self, extent: Extent) -> _Region:
        """Return the bytes of an extent themselves."""
        return self._regions[extent]

    def path_of(self, extent: Extent) -> Path:
        """Return the tier's name: there is no file."""
        return Path(self.name)

    def describe(self, extent: Extent) -> str:
        """The place of an extent, in words."""
        return f"{format_bytes(extent.size_bytes)} of {self.name}"

    def register(self, pools: Sequence[BufferPool]) -> None:
        """Nothing to do: nobody has to know the memory of staging buffers beforehand."""
        return

    def read(
        self, extent: Extent, buffer: StagingBuffer, *, what: str, kind: str, size_bytes: int | None = None
    ) -> Transfer[StagingBuffer]:
        """Copy the first `size_bytes` (all by default) of an extent into a buffer; see `Tier.read`."""
        source, target = self._both(extent, buffer, size_bytes)
        target.copy_(source)
        return self._done(Op.READ, buffer, kind, source.numel())

    def write(
        self,
        extent: Extent,
        buffer: StagingBuffer,
        *,
        what: str,
        kind: str,
        start: int = 0,
        size_bytes: int | None = None,
    ) -> Transfer[StagingBuffer]:
        """Copy a buffer, from byte `start` on, to the first `size_bytes` of an extent; see `Tier.write`."""
        target, source = self._both(extent, buffer, size_bytes, start)
        target.copy_(source)
        return self._done(Op.WRITE, buffer, kind, source.numel())

    def quiesce(self, buffer: StagingBuffer) -> None:
        """Nothing to do: no transfer outlives the call that started it."""
        return

    def bytes_of_kind(self, op: Op, kind: str) -> int:
        """Return the bytes copied in this direction under this kind, since construction."""
        return self._bytes_by_kind[op, kind]

    def stats(self) -> EngineStats:
        """Bytes copied since construction."""
        moved = Counter[Op]()
        for (op, _), count in self._bytes_by_kind.items():
            moved[op] += count
        return EngineStats(bytes_read=moved[Op.READ], bytes_written=moved[Op.WRITE])

    def close(self) -> None:
        """Let all memory go, with its last users. Idempotent."""
        self._regions.clear()

    def _both(
        self, extent: Extent, buffer: StagingBuffer, size_bytes: int | None, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        numel = extent.size_bytes if size_bytes is None else size_bytes
        return self.memory(extent).view(torch.uint8, 0, numel), buffer.view(torch.uint8, start, numel)

    def _done(self, op: Op, buffer: StagingBuffer, kind: str, size_bytes: int) -> Transfer[StagingBuffer]:
        self._bytes_by_kind[op, kind] += size_bytes
        return done_at_once(op, buffer)


class HostTier(MemoryTier):
    """Anonymous memory of the host, in pages, which are zero and take no memory until they are written."""

    name = "host memory"

    def _region(self, size_bytes: int) -> HostRegion:
        return HostRegion(size_bytes)


class DeviceRegion:
    """Memory of a device."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = round_up(size_bytes, mmap.PAGESIZE)
        self.whole = torch.empty(self.size_bytes, dtype=torch.uint8, device=device)

    def view(self, dtype: torch.dtype, byte_offset: int, numel: int) -> torch.Tensor:
        """1D tensor [numel] of `dtype` over the bytes from `byte_offset`, on the device."""
        return self.whole[byte_offset : byte_offset + numel * dtype.itemsize].view(dtype)


class DeviceTier(MemoryTier):
    """Memory of one device. Whoever works there queues it on his stream, as with any tensor of the device."""

    name = "device memory"

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def _region(self, size_bytes: int) -> DeviceRegion:
        try:
            return DeviceRegion(size_bytes, self.device)
        except torch.OutOfMemoryError as error:
            what = f"{self.device} has no {format_bytes(size_bytes)} left for optimizer state"
            raise MemoryError(f"{what}: lower device_budget") from error


def done_at_once(op: Op, buffer: StagingBuffer) -> Transfer[StagingBuffer]:
    """Make a transfer with nothing left to wait for."""
    operation = PythonOperation(op, ())
    operation.complete(None)
    return Transfer(operation, lambda failure: OSError(failure.errno, "a transfer without I/O"), buffer)
