"""Bytes are in extents: contiguous ranges of swap files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from nvme_offload.aio_native.engine import Segment
from ..host.buffer_pool import StagingBuffer


class Stripe(NamedTuple):
    """The part of an extent that lies on one path."""

    fd: int
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Extent:
    """A byte range of the swap space, in one stripe per path.

    Memory holds the stripes one after the other: with 100 bytes as 60 on path A and 40 on path B, bytes 0..59 of the
    buffer belong to A and 60..99 to B. Engines issue the requests of all stripes side by side, so that every drive
    works on every transfer.
    """

    size_bytes: int
    """Rounded up to the alignment of direct I/O."""
    stripes: tuple[Stripe, ...]
    is_of_others: ClassVar[bool] = False
    """Whether others wrote its bytes, and nobody here may."""

    def arrive(self, buffer: StagingBuffer) -> bool:
        """Bring what was read to its places in a buffer; False: it has to be read again. Here nothing is to be done."""
        return True

    def segments(self, address: int, start: int = 0, size_bytes: int | None = None) -> list[Segment]:
        """Return what an engine must move so that bytes start..start+size_bytes of the extent are at `address` on.

        `start` and `size_bytes` must be multiples of the alignment.
        """
        stop = self.size_bytes if size_bytes is None else start + size_bytes
        if not 0 <= start < stop <= self.size_bytes:
            raise ValueError(f"bytes {start}..{stop} do not lie in an extent of {self.size_bytes} bytes")
        segments = []
        stripe_start = 0
        for stripe in self.stripes:
            stripe_stop = stripe_start + stripe.size_bytes
            low, high = max(start, stripe_start), min(stop, stripe_stop)
            if low < high:
                offset = stripe.offset + low - stripe_start
                segments.append(Segment(stripe.fd, offset, address + low - start, high - low))
            stripe_start = stripe_stop
        return segments


class FreeList:
    """First-fit allocation of byte ranges in a file that grows at its end. Neighbouring free ranges are joined."""

    def __init__(self, end: int = 0, free: Iterable[tuple[int, int]] = ()) -> None:
        self.end = end
        """First byte after the last range ever handed out."""
        self._free = list(free)  # (offset, size), by offset

    def copy(self) -> FreeList:
        """Copy the ranges, to go back to."""
        return FreeList(self.end, self._free)

    def become(self, other: FreeList) -> None:
        """Have the ranges that another one has."""
        self.end, self._free = other.end, other.copy()._free

    def take(self, size_bytes: int) -> int:
        """Return the offset of a free range of this size, from a hole if one is large enough, else from the end."""
        for index, (offset, free_bytes) in enumerate(self._free):
            if free_bytes >= size_bytes:
                rest = (offset + size_bytes, free_bytes - size_bytes)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return offset
        offset = self.end
        self.end += size_bytes
        return offset

    def free_below(self, end: int) -> list[tuple[int, int]]:
        """Return offset and size of every range before `end` that nobody has, also behind the last one handed out."""
        ranges = [*self._free, (self.end, max(0, end - self.end))]
        return [(offset, min(size, end - offset)) for offset, size in ranges if size and offset < end]

    def claim(self, offset: int, size_bytes: int) -> None:
        """Take exactly this range; raises ValueError if part of it is taken."""
        stop = offset + size_bytes
        if offset >= self.end:
            if offset > self.end:
                self._free.append((self.end, offset - self.end))
            self.end = stop
            return
        for index, (start, free_bytes) in enumerate(self._free):
            if start <= offset and stop <= start + free_bytes:
                rests = [(start, offset - start), (stop, start + free_bytes - stop)]
                self._free[index : index + 1] = [rest for rest in rests if rest[1]]
                return
        raise ValueError(f"bytes {offset}..{stop} are taken already, or part of them is")

    def give_back(self, offset: int, size_bytes: int) -> None:
        """Make a range free again."""
        ranges = sorted([*self._free, (offset, size_bytes)])
        joined = [ranges[0]]
        for start, size in ranges[1:]:
            last_start, last_size = joined[-1]
            if start < last_start + last_size:
                raise AssertionError(f"bytes {start} on were given back twice")
            if start == last_start + last_size:
                joined[-1] = (last_start, last_size + size)
            else:
                joined.append((start, size))
        if joined[-1][0] + joined[-1][1] == self.end:
            self.end = joined.pop()[0]
        self._free = joined
