"""Host memory with the three properties I/O asks for, which are three different things.

aligned
    Addresses are multiples of the page size: what O_DIRECT needs.
pinned
    Page-locked for a device (cudaHostRegister): what asynchronous copies between device and host need.
registered
    Known to the ring (IORING_REGISTER_BUFFERS): what spares a request the pinning of its pages.

Everything allocated here is aligned. Pinning is asked for here, registration at the engine.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from nvme_offload.aio_native.finalizing import finalize
from nvme_offload.aio_native.interrupt import DeferredInterrupt
from ..devices.device import page_lock, page_unlock
from ..units import format_bytes, round_up

HUGE_PAGE_BYTES = 2 << 20
"""Bytes of a huge page, on x86-64 and, with 4 KiB pages, on arm64."""

_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_of_parent: list[mmap.mmap] = []
# For good: who lets go of one unmaps what the child has at these addresses by then, such as memory of its malloc.
os.register_at_fork(after_in_child=lambda: _of_parent.extend(_maps))

MAX_REGISTERED_BYTES = 1 << 30
"""The kernel registers at most 1 GiB as one buffer (io_uring_register(2), IORING_REGISTER_BUFFERS)."""


class HostRegion:
    """Private anonymous pages, zero until first written and resident from then on. The system may refuse: MemoryError.

    Forked children do not inherit it (MADV_DONTFORK): direct I/O into memory that a fork made copy-on-write would land
    in the wrong process (open(2), O_DIRECT), and DataLoaders fork.

    Regions of 2 MiB and more ask for huge pages (MADV_HUGEPAGE) and start on one. A request of 1 MiB in 4 KiB pages is
    a list of 256 pieces, more than many drives take at once; in one huge page it is one. On a virtual drive that
    doubled the bandwidth (docs/storage.md).
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = round_up(max(size_bytes, 1), mmap.PAGESIZE)
        huge = self.size_bytes >= HUGE_PAGE_BYTES
        mapped_bytes = self.size_bytes + (HUGE_PAGE_BYTES if huge else 0)  # the slack is address space, never touched
        try:
            self._map = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"cannot map {format_bytes(self.size_bytes)} of host memory: {error}") from error
        _maps.add(self._map)
        self._map.madvise(mmap.MADV_DONTFORK)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = -start % HUGE_PAGE_BYTES if huge else 0
        self._huge_bytes = 0
        if huge:
            # Not behind the last whole one: a huge page there would take up to 2 MiB more than was asked for.
            end = self._start + self.size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            with suppress(OSError):  # a kernel built without them, or an administrator who forbids them
                self._map.madvise(mmap.MADV_HUGEPAGE, 0, end)
                self._map.madvise(mmap.MADV_NOHUGEPAGE, end, mapped_bytes - end)
                self._huge_bytes = end - self._start
        self._owner_pid = os.getpid()
        self.address = start + self._start
        self.pinned = False

    def view(self, dtype: torch.dtype, byte_offset: int, numel: int) -> torch.Tensor:
        """Return a 1D tensor [numel] of `dtype` over the bytes from `byte_offset`. Keeps the region alive."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=self._start + byte_offset)

    def lend(
        self,
        dtype: torch.dtype,
        numel: int,
        on_return: Callable[[weakref.ref[memoryview]], object] | None = None,
        byte_offset: int = 0,
    ) -> tuple[torch.Tensor, weakref.ref[memoryview]]:
        """Return a 1D tensor over the bytes from `byte_offset`, and what is dead when it and all views of it are gone.

        `on_return` is called with it then, in whatever thread lets the last one go.
        """
        start = self._start + byte_offset
        lent = memoryview(self._map)[start : start + max(numel, 1) * dtype.itemsize]
        return torch.frombuffer(lent, dtype=dtype)[:numel], weakref.ref(lent, on_return)

    def discard(self) -> None:
        """Give the pages back, which hold nothing that anybody needs and are not registered: they are zero next."""
        self.unpin()
        self._map.madvise(mmap.MADV_DONTNEED)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(address, size in bytes) of its huge pages, and of the small ones behind them.

        To be registered each by itself: of memory with pages of both sizes the kernel keeps a list of small ones only.
        """
        parts = [(0, self._huge_bytes), (self._huge_bytes, self.size_bytes - self._huge_bytes)]
        return [(self.address + start, size_bytes) for start, size_bytes in parts if size_bytes]

    def pin(self, device: torch.device) -> None:
        """Page-lock the region for copies to and from a device; RuntimeError says that the driver refuses.

        Memory from cudaHostAlloc is refused by some kernels as a registered buffer, so the order is mmap first,
        cudaHostRegister second. A region that is dropped without `unpin` is unpinned before its pages go (views that
        outlive it are not pinned): the driver would take for page-locked whatever is mapped at these addresses next.
        """
        if self.pinned:
            return
        with DeferredInterrupt():  # what is page-locked is known to be
            if error := page_lock(self.address, self.size_bytes, device):
                raise RuntimeError(f"cudaHostRegister refused {format_bytes(self.size_bytes)} (CUDA error {error})")
            self._unpin_when_dropped = finalize(self, _unlock, self._owner_pid, self.address, device, self._map)
            self._unpin_when_dropped.atexit = False  # the driver does it when the process ends
            self.pinned = True

    def unpin(self) -> None:
        """Undo `pin`. Idempotent."""
        if self.pinned:
            with DeferredInterrupt():
                self._unpin_when_dropped()
                self.pinned = False


def trim_heap() -> None:
    """Give memory back that was freed and that malloc keeps for later; not every C library can."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _unlock(owner_pid: int, address: int, device: torch.device, _held: mmap.mmap) -> None:
    """Undo cudaHostRegister, in the process that called it. `_held` is what keeps the pages mapped until then."""
    if os.getpid() == owner_pid:
        page_unlock(address, device)


class KeptMemory:
    """Memory that tensors borrow: as many regions as were ever in use at once. For one thread at a time.

    A region is free again when no tensor that borrowed it is left, nor any view of one; nobody gives it back. A new one
    is mapped only where none that is free is large enough, and takes the place of a smaller one.
    """

    def __init__(self) -> None:
        self._rooms: list[tuple[HostRegion, weakref.ref[memoryview]]] = []

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1D tensor [numel] of `dtype` on the CPU, with any values."""
        size_bytes = numel * dtype.itemsize
        free = sorted((room for room in self._rooms if room[1]() is None), key=lambda room: room[0].size_bytes)
        chosen = next((room for room in free if room[0].size_bytes >= size_bytes), free[-1] if free else None)
        if chosen is not None:
            self._rooms.remove(chosen)
        fits = chosen is not None and chosen[0].size_bytes >= size_bytes
        region = chosen[0] if chosen is not None and fits else HostRegion(size_bytes)
        tensor, loan = region.lend(dtype, numel)
        self._rooms.append((region, loan))
        return tensor

    @property
    def size_bytes(self) -> int:
        """Bytes of all regions, borrowed or not."""
        return sum(region.size_bytes for region, _ in self._rooms)
