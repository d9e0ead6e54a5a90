"""The bytes of a slot have one home, which is decided when the slot is placed."""

from dataclasses import dataclass
from typing import Literal

from ..host.buffer_pool import BufferPool
from ..storage.tier import Memory

TierName = Literal["device", "host", "nvme"]
"""See `tier_plan.Tier`."""


@dataclass(frozen=True, eq=False)
class Home:
    """A place for the bytes of one slot, or of many."""

    tier: TierName
    memory: Memory | None = None
    """The bytes themselves, where they are in memory for good. None: they come to a staging buffer."""
    pool: BufferPool | None = None
    """A buffer that nobody else gets: bytes that are in it are written from it and not read again."""

    @property
    def on_device(self) -> bool:
        """Whether the bytes are on a device."""
        return self.tier == "device"

    @property
    def is_visited(self) -> bool:
        """Whether the slot comes and goes through the staging buffers that all share."""
        return self.memory is None and self.pool is None


VISITING = Home("nvme")
"""An extent on NVMe: the slot visits the staging buffers of all."""
