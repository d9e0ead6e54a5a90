"""Memory of a device as a tier."""

from __future__ import annotations

import mmap

import torch

from nvme_offload.offload.storage.memory_tier import MemoryTier
from nvme_offload.offload.units import format_bytes


class DeviceRegion:
    """Memory of a device."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._bytes = torch.empty(self.size_bytes, dtype=torch.uint8, device=device)

    def view(self, dtype: torch.dtype, byte_offset: int, numel: int) -> torch.Tensor:
        """1D tensor [numel] of `dtype` over the bytes from `byte_offset`, on the device."""
        return self._bytes[byte_offset : byte_offset + numel * dtype.itemsize].view(dtype)


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
            raise MemoryError(
                f"{self.device} has no {format_bytes(size_bytes)} left for optimizer state: lower device_budget"
            ) from error
