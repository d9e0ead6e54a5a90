"""Host memory as a tier."""

from __future__ import annotations

from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.storage.memory_tier import MemoryTier


class HostTier(MemoryTier):
    """Anonymous memory of the host, in pages, which are zero and take no memory until they are written."""

    name = "host memory"

    def _region(self, size_bytes: int) -> HostRegion:
        return HostRegion(size_bytes)
