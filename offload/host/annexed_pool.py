"""Staging buffers of which parts are there only while they are used.

What visits a buffer may need less memory while it stays there than while it is read, changed and written: of a
durable run's subgroup the state stays, and what is read or written besides, the parameters of its base and its log, is
of no use any more once it is written. So a buffer is a body and, for a while, some annexes, which all bodies share::

    bodies     [ state 1 ][ state 2 ][ state 3 ][ state 4 ][ state 5 ]
    annexes    [ of 3 ]   [ of 4 ][ of 4 ][ of 4 ]   [ of 5 ][ of 5 ][ of 5 ]

In the memory of four whole buffers there may be five bodies: 5 is read, 4 is changed, 3 is written, for which it has
but the annex that is written with it, and what stays in a body is not read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nvme_offload.offload.host.buffer_pool import BufferOwner, BufferPool, Lease, Parts, StagingBuffer
from nvme_offload.offload.host.region import HostRegion


class AnnexedBuffer(StagingBuffer):
    """A body with the owner's bytes up to the first of his `splits`; an annex has those from one to the next."""

    def __init__(self, pool: AnnexedPool, place: int, region: HostRegion, byte_offset: int, size_bytes: int) -> None:
        super().__init__(pool, place, region, byte_offset, size_bytes)
        self._pool_of_annexes = pool.annexes
        self._starts: tuple[int, ...] = ()
        self._annexes: tuple[Lease, ...] = ()

    def prepare_for(self, owner: BufferOwner) -> None:
        """Called before it is leased, and no annex is."""
        annexes = tuple(Lease() for _ in owner.splits)
        # No call in between: a signal handler sees as many of the one as of the other.
        self._starts = owner.splits
        self._annexes = annexes

    @property
    def size_bytes(self) -> int:
        """The byte behind the last one that is there."""
        return max(end for _, end, annex in self._parts() if annex is None or annex.buffer is not None)

    @property
    def is_extended(self) -> bool:
        """Whether it has all annexes that its owner has bytes for."""
        return all(annex.buffer is not None for annex in self._annexes)

    @property
    def has_annex(self) -> bool:
        """Whether it has any annex."""
        return any(annex.buffer is not None for annex in self._annexes)

    def extend(self) -> bool:
        """Get the annexes that it lacks, where they are free; whether it has all."""
        return all(
            annex.buffer is not None or self._pool_of_annexes.try_acquire(annex) is not None for annex in self._annexes
        )

    def shrink(self, start: int = 0, end: int = 0) -> None:
        """Give back the annexes, with all that is in them, but for those with bytes from `start` to `end`."""
        for low, high, annex in self._parts():
            if annex is not None and annex.buffer is not None and (high <= start or end <= low):
                annex.buffer.release()

    def view(self, dtype: torch.dtype, byte_offset: int, numel: int) -> torch.Tensor:
        """1D tensor [numel] of `dtype` over the bytes from `byte_offset`, which are in one part."""
        start, end, annex = next(part for part in self._parts() if byte_offset < part[1])
        if byte_offset + numel * dtype.itemsize > end:
            raise AssertionError(f"bytes {byte_offset} on are not in one piece: the next begins at {end}")
        if annex is None:
            return super().view(dtype, byte_offset, numel)
        return _there(annex).view(dtype, byte_offset - start, numel)

    def places(self, start: int, size_bytes: int) -> list[tuple[int, int]]:
        """Where so many bytes from byte `start` on are in memory: (address, size in bytes), one after the other."""
        found = []
        for low, high, annex in self._parts():
            first, last = max(start, low), min(start + size_bytes, high)
            if first < last:
                address = self.address if annex is None else _there(annex).address
                found.append((address + first - low, last - first))
        return found

    def _parts(self) -> Iterator[tuple[int, int, Lease | None]]:
        """Of each part its first byte, the one behind its last, and the lease of an annex; None for the body."""
        if not self._starts:
            yield 0, self._own_bytes, None
            return
        yield 0, self._starts[0], None
        ends = (*self._starts[1:], self._starts[-1] + self._pool_of_annexes.buffer_bytes)
        yield from zip(self._starts, ends, self._annexes, strict=True)


class AnnexedPool(BufferPool):
    """Bodies of one size, and annexes of one size. Never grows.

    What is acquired is a body alone: see `StagingBuffer.extend`. With a buffer its annexes are released.

    Args:
        shape: how many of each, and their sizes, which are rounded up to whole pages.
    """

    _kind_of_buffer = AnnexedBuffer

    def __init__(self, shape: PoolShape) -> None:
        self.annexes = BufferPool(shape.num_annexes, shape.parts.annex_bytes)
        super().__init__(shape.num_buffers, shape.parts.body_bytes)
        self.most_bytes = shape.parts.whole_bytes
        self.num_whole = min(shape.num_buffers, shape.num_annexes // shape.parts.num_annexes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all bodies and annexes together."""
        return super().size_bytes + self.annexes.size_bytes

    def holds(self, parts: Parts) -> bool:
        """Whether each of the buffers holds such parts, in its body and its annexes."""
        fits = parts.body_bytes <= self.buffer_bytes and parts.annex_bytes <= self.annexes.buffer_bytes
        return fits and _num_annexes(parts, 1) <= self.annexes.num_buffers

    @property
    def pinned(self) -> bool:
        """Whether all of it is page-locked for a device."""
        return super().pinned and self.annexes.pinned

    def pin(self, device: torch.device) -> None:
        """Page-lock all of it for a device, or none. Idempotent. See `HostRegion.pin`."""
        super().pin(device)
        try:
            self.annexes.pin(device)
        except BaseException:
            self._unpin()
            raise

    @property
    def regions(self) -> list[tuple[int, int]]:
        """(address, size in bytes) of the memory behind it, each at most 1 GiB: what an engine registers."""
        return super().regions + self.annexes.regions

    def close(self) -> None:
        """Wake whoever waits, unpin, and let the memory go with its last view. Idempotent."""
        super().close()
        self.annexes.close()


@dataclass(frozen=True)
class PoolShape:
    """How many buffers of which size there are."""

    num_buffers: int
    parts: Parts
    num_annexes: int = 0
    """0: the body is all of a buffer."""

    @classmethod
    def whole(cls, count: int, parts: Parts) -> PoolShape:
        """So many buffers, with all that belongs to them at any time."""
        return cls(count, Parts(parts.whole_bytes, parts.whole_bytes))

    @classmethod
    def within(cls, count: int, parts: Parts, moving_bytes: int) -> PoolShape:
        """As many bodies as there is room for in the memory of `count` whole buffers; these, where that is no more.

        Args:
            count: of whole buffers.
            parts: of a buffer.
            moving_bytes: what has to be under way to keep the drive busy.
        """
        body_bytes = max(1, parts.body_bytes)
        num_annexes = _num_annexes(parts, max(1, -(-moving_bytes // body_bytes)))
        num_buffers = (count * parts.whole_bytes - num_annexes * parts.annex_bytes) // body_bytes
        return cls(num_buffers, parts, num_annexes) if num_buffers > count else cls.whole(count, parts)

    def pool(self) -> BufferPool:
        """A pool of it."""
        return AnnexedPool(self) if self.num_annexes else BufferPool(self.num_buffers, self.parts.whole_bytes)


def _num_annexes(parts: Parts, num_read: int) -> int:
    """All of so many buffers that are read into, and of one that is changed; and one of a buffer that is written."""
    return (num_read + 1) * parts.num_annexes + 1 if parts.num_annexes else 0


def _there(annex: Lease) -> StagingBuffer:
    if annex.buffer is None:
        raise AssertionError("the annex of a staging buffer is used and not there")
    return annex.buffer
