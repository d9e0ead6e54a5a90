"""What is where: one record per subgroup."""

from __future__ import annotations

from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.staging.slot import Residency, Slot
from nvme_offload.optim.layout.subgroup import Subgroup

__all__ = ["Residency", "SlotRecord"]


class SlotRecord(Slot):
    """A slot with the state of a subgroup. Without an extent the state lives in host memory of its own."""

    def __init__(self, subgroup: Subgroup) -> None:
        super().__init__(subgroup.index, f"optimizer state of subgroup {subgroup.index}", subgroup.size_bytes)
        self.subgroup = subgroup
        self.region: HostRegion | None = None
        """Without an extent: the memory itself, once born."""
