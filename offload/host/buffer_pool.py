"""The fixed set of staging buffers between memory and files.

Who holds a buffer is said in one place, the pool's list of owners. What is free is what nobody holds: there is no
second list that an exception between two instructions could leave behind.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import ClosedError
from ..units import round_up
from .region import MAX_REGISTERED_BYTES, HostRegion

_LOOK_AGAIN_SECONDS = 0.1  # an exception may come between a release and the word of it


class BufferOwner(Protocol):
    """Who holds a buffer; the pool sets and clears what he holds."""

    buffer: StagingBuffer | None


@dataclass(eq=False)
class Lease:
    """The owner of a buffer that was acquired without one."""

    buffer: StagingBuffer | None = None


class StagingBuffer:
    """One buffer of a pool, held by whoever acquired it until ``release()``. Also a context manager."""

    def __init__(self, pool: BufferPool, place: int, region: HostRegion, byte_offset: int, size_bytes: int) -> None:
        self.place = place
        """The buffer's number in its pool."""
        self._pool = weakref.ref(pool)  # no cycle: the memory goes with its last user, not with the garbage collector
        self._region = region
        self._byte_offset = byte_offset
        self.size_bytes = size_bytes
        self.address = region.address + byte_offset

    def view(self, dtype: torch.dtype, byte_offset: int, numel: int) -> torch.Tensor:
        """Return a 1D tensor [numel] of `dtype` over the buffer's bytes from `byte_offset`."""
        return self._region.view(dtype, self._byte_offset + byte_offset, numel)

    def lend(
        self, byte_offset: int, size_bytes: int, on_return: Callable[[weakref.ref[memoryview]], object]
    ) -> tuple[torch.Tensor, weakref.ref[memoryview]]:
        """Return a 1D uint8 tensor over some bytes, as `HostRegion.lend` does."""
        return self._region.lend(torch.uint8, size_bytes, on_return, self._byte_offset + byte_offset)

    def release(self) -> None:
        """Give the buffer back. No request may be using it any more."""
        pool = self._pool()
        if pool is not None:
            pool._take_back(self)

    def __enter__(self) -> StagingBuffer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class BufferPool:
    """Aligned staging buffers, at least one, of `buffer_bytes` each, rounded up to whole pages. Never grows."""

    def __init__(self, num_buffers: int, buffer_bytes: int) -> None:
        self.buffer_bytes = round_up(buffer_bytes, HostRegion(1).size_bytes)
        self.num_buffers = num_buffers
        size = self.buffer_bytes
        per_region = max(1, MAX_REGISTERED_BYTES // size)  # no buffer crosses the limit of a registered region
        numbers = [min(per_region, num_buffers - start) for start in range(0, num_buffers, per_region)]
        self._regions = [HostRegion(number * size) for number in numbers]
        places = [(region, offset) for region in self._regions for offset in range(0, region.size_bytes, size)]
        self._buffers = [StagingBuffer(self, number, *place, size) for number, place in enumerate(places)]
        self._owners: list[BufferOwner | None] = [None] * num_buffers
        self._lock = threading.RLock()  # re-entrant: a signal handler may use what it interrupted
        self._released = threading.Condition(self._lock)
        self._closed = False

    @property
    def pinned(self) -> bool:
        """Whether all buffers are page-locked for a device."""
        return all(region.pinned for region in self._regions)

    def pin(self, device: torch.device) -> None:
        """Page-lock all buffers for a device, or none; also while they are held. Idempotent. See `HostRegion.pin`."""
        try:
            for region in self._regions:
                region.pin(device)
        except BaseException:
            self._unpin()
            raise

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers together."""
        return self.num_buffers * self.buffer_bytes

    @property
    def num_free(self) -> int:
        """Count the buffers that nobody holds; all of them when nothing leaked."""
        with self._lock:
            return self.num_buffers - len(self.owners)

    @property
    def owners(self) -> list[Any]:
        """Return the owner of every buffer that is held."""
        return [owner for owner in self._owners if owner is not None]

    @property
    def regions(self) -> list[tuple[int, int]]:
        """(address, size in bytes) of the memory behind the buffers, each at most 1 GiB: what an engine registers."""
        return [
            (address + start, min(MAX_REGISTERED_BYTES, size_bytes - start))
            for region in self._regions
            for address, size_bytes in region.parts
            for start in range(0, size_bytes, MAX_REGISTERED_BYTES)
        ]

    def try_acquire(self, owner: BufferOwner | None = None) -> StagingBuffer | None:
        """Return a free buffer, or None at once. From now on it is ``owner.buffer``."""
        owner = owner or Lease()
        with self._lock:
            self._check_open()
            for buffer in self._buffers:
                if self._owners[buffer.place] is None:
                    # No call in between: a signal handler sees both ends of the lease or neither.
                    owner.buffer = buffer
                    self._owners[buffer.place] = owner
                    return buffer
        return None

    def acquire(self, timeout: float | None = None) -> StagingBuffer:
        """Return a free buffer, or raise TimeoutError if none came free within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while (buffer := self.try_acquire()) is None:
                left = _LOOK_AGAIN_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"all {self.num_buffers} staging buffers are held after {timeout} s")
                self._released.wait(min(left, _LOOK_AGAIN_SECONDS))
            return buffer

    def discard(self) -> None:
        """Give the memory of all buffers back until they are used; AssertionError if one is held."""
        assert not self.owners, "staging buffers are held"
        for region in self._regions:
            region.discard()

    def close(self) -> None:
        """Wake whoever waits, unpin, and let the memory go with its last view. Idempotent."""
        with self._lock:
            self._closed = True
            self._released.notify_all()
        self._unpin()

    def _take_back(self, buffer: StagingBuffer) -> None:
        with self._lock:
            owner = self._owners[buffer.place]
            if owner is None:
                raise AssertionError("a staging buffer was released twice")
            # No call in between, as in `try_acquire`.
            owner.buffer = None
            self._owners[buffer.place] = None
            self._released.notify()

    def _unpin(self) -> None:
        for region in self._regions:
            region.unpin()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("buffer pool")
