"""What is where: one record per subgroup."""

from __future__ import annotations

from nvme_offload.offload.staging.slot import Residency, Slot
from nvme_offload.offload.storage.device_tier import DeviceTier
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.tier import Memory, Tier
from nvme_offload.optim.layout.subgroup import Subgroup
from nvme_offload.optim.updates.slot_logs import LogState
from nvme_offload.optim.updates.updater import Updater

__all__ = ["Residency", "SlotRecord"]


class SlotRecord(Slot):
    """A slot with the state of a subgroup, the tier that it is on, and how it is updated.

    Args:
        subgroup: whose state it is.
        updater: updates it; None: it is read only.
        log: in a durable run; None: the state ends with the process.
    """

    def __init__(self, subgroup: Subgroup, updater: Updater | None = None, log: LogState | None = None) -> None:
        super().__init__(subgroup.index, f"optimizer state of subgroup {subgroup.index}", subgroup.size_bytes)
        self.subgroup = subgroup
        self.updater = updater
        self.log = log
        self.tier: Tier | None = None

    @property
    def can_be_behind(self) -> bool:
        """Whether the way it is updated lets that be done behind a step."""
        return self.updater is not None and not self.updater.inside

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
