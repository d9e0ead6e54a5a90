"""What is where: one record per subgroup."""

from __future__ import annotations

from typing import NamedTuple

from nvme_offload.offload.durable.seal import Sums
from nvme_offload.offload.staging.slot import Residency, Slot, WriteTarget
from nvme_offload.offload.storage.device_tier import DeviceTier
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.tier import Memory, Tier
from nvme_offload.optim.layout.subgroup import Subgroup

__all__ = ["Residency", "SlotRecord"]


class Draft(NamedTuple):
    """The entry of a log in a slot's buffer, which nobody has sealed yet."""

    start: int
    """Byte of the buffer at which it begins."""
    size_bytes: int
    """Without its trailer."""
    place: int
    """Which entry of the log it is."""


class SlotRecord(Slot):
    """A slot with the state of a subgroup, and the tier that it is on.

    Of a durable run its extent may have a base, and behind that a log of the updates since.
    """

    def __init__(self, subgroup: Subgroup) -> None:
        super().__init__(subgroup.index, f"optimizer state of subgroup {subgroup.index}", subgroup.size_bytes)
        self.subgroup = subgroup
        self.tier: Tier | None = None
        self.num_logged = 0
        """Entries of the log that are read along with the base."""
        self.is_behind = False
        """Whether the state in the buffer is that of the base: the updates in the log are still to be done."""
        self.updated: frozenset[int] = frozenset()
        """Parameters that had a gradient in the update that the buffer is to be written for, by index."""
        self.draft: Draft | None = None
        """What that update appends to the log; None: all of the buffer is written."""
        self.sums: Sums | None = None
        """Of all that is in the buffer, which that update has completed for writing; None: it is to be completed."""
        self.target: WriteTarget | None = None
        """Where what is in the buffer was sealed for; None: it has changed since."""

    def open_version(self) -> None:
        """What was to be written is not what comes next."""
        self.target = None
        self.draft = None
        self.sums = None
        self.updated = frozenset()

    def begin_anew(self) -> None:
        """Nothing of what it was is kept."""
        self.open_version()
        self.num_logged = 0
        self.is_behind = False

    def place(self, tier: Tier, extent: Extent) -> None:
        """Say where it is, once."""
        # No call in between: a signal handler sees both or neither.
        self.tier = tier
        self.extent = extent

    @property
    def memory(self) -> Memory | None:
        """The state itself, where its tier is memory."""
        return self.tier.memory(self.extent) if self.tier is not None and self.extent is not None else None

    @property
    def is_resident(self) -> bool:
        """Whether it is in memory for good, and visits none of the staging buffers that all share."""
        return self.own_pool is not None or self.memory is not None

    @property
    def is_on_device(self) -> bool:
        """Whether that memory is a device's, where the subgroup is updated then."""
        return isinstance(self.tier, DeviceTier)
