"""Record what is where, once for each subgroup."""

from nvme_offload.offload.staging.home import Home
from nvme_offload.offload.staging.slot import Residency, Slot
from nvme_offload.offload.storage.extent import Extent
from ..layout.subgroup import Subgroup
from ..updates.log_state import LogState
from ..updates.work import Updater

__all__ = ["Residency", "SlotRecord"]


class SlotRecord(Slot):
    """A slot with the state of a subgroup, where that is, and how it is updated.

    Args:
        updater: None: the state is read only.
        log: of a durable run; None: the state ends with the process.
    """

    def __init__(self, subgroup: Subgroup, updater: Updater | None = None, log: LogState | None = None) -> None:
        super().__init__(subgroup.index, f"optimizer state of subgroup {subgroup.index}", subgroup.size_bytes)
        self.subgroup = subgroup
        self.updater = updater
        self.log = log

    @property
    def can_be_behind(self) -> bool:
        """Whether its updater can work behind a step."""
        return self.updater is not None and not self.updater.inside

    def place(self, home: Home, extent: Extent | None = None) -> None:
        """Say where it is, once."""
        # No call in between: a signal handler sees both or neither.
        self.home = home
        self.extent = extent
