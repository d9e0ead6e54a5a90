"""The bytes of a slot have one home, which is decided when the slot is placed."""

from __future__ import annotations

from typing import Literal

from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.storage.tier import Memory

TierName = Literal["device", "host", "nvme"]
"""See `tier_plan.Tier`."""


class Home:
    """A place for the bytes of one slot, or of many."""

    memory: Memory | None = None
    """The bytes themselves, where they are in memory for good. None: they come to a staging buffer."""
    pool: BufferPool | None = None
    """A buffer that nobody else gets: bytes that are in it stay there. None: a buffer is one of those of all."""
    is_visited = False
    """Whether the slot comes and goes through the staging buffers that all share."""

    def __init__(self, tier: TierName) -> None:
        self.tier = tier
        self.on_device = tier == "device"


class Visiting(Home):
    """An extent on NVMe: the slot visits the staging buffers of all."""

    is_visited = True


class Staying(Home):
    """One staging buffer of the slot's own, which is written from: what is in it is not read again."""

    def __init__(self, pool: BufferPool) -> None:
        super().__init__("host")
        self.pool = pool


class Resident(Home):
    """Memory of the host or of a device; nothing is moved."""

    def __init__(self, memory: Memory, tier: TierName) -> None:
        super().__init__(tier)
        self.memory = memory


VISITING = Visiting("nvme")
