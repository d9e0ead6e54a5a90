"""Host memory for what comes and goes by the megabyte: kept for the next one, where malloc would map new pages."""

import weakref

import torch

from nvme_offload.offload.host.region import HostRegion


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
