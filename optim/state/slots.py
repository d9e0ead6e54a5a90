"""What is where: one record per subgroup, and the one place where a record changes its residency."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from nvme_offload.offload.errors import StateError
from nvme_offload.offload.host.buffer_pool import StagingBuffer
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.transfer import Transfer
from nvme_offload.optim.layout.subgroup import Subgroup


class Residency(enum.Enum):
    """Where the valid copy of a subgroup's state is."""

    UNBORN = "unborn"
    """Nowhere: moments are zero and the master equals the parameter. No byte has been written yet."""
    HOST = "host"
    """In host memory of its own, for good (the cpu tier, or within the host budget)."""
    ON_TIER = "on tier"
    """Only in its extent."""
    READING = "reading"
    """In its extent, and on its way to a staging buffer."""
    STAGED = "staged"
    """In its extent and, equal to it, in a staging buffer: the buffer may be taken away (evict)."""
    DIRTY = "dirty"
    """Only in a staging buffer, which must not be given up before it is written."""
    WRITING = "writing"
    """In a staging buffer, and on its way to its extent."""


_ALLOWED = {
    (Residency.UNBORN, Residency.DIRTY),
    (Residency.UNBORN, Residency.HOST),
    (Residency.ON_TIER, Residency.READING),
    (Residency.ON_TIER, Residency.DIRTY),
    (Residency.READING, Residency.STAGED),
    (Residency.READING, Residency.ON_TIER),
    (Residency.STAGED, Residency.DIRTY),
    (Residency.STAGED, Residency.ON_TIER),
    (Residency.DIRTY, Residency.WRITING),
    (Residency.WRITING, Residency.STAGED),
    (Residency.WRITING, Residency.DIRTY),
}


@dataclass(eq=False)
class SlotRecord:
    """A subgroup, where its state lives, and what is happening to it."""

    subgroup: Subgroup
    extent: Extent | None = None
    """On NVMe: where in the swap space. None: the state lives in host memory."""
    region: HostRegion | None = None
    """Without an extent: the memory itself, once born."""
    residency: Residency = Residency.UNBORN
    buffer: StagingBuffer | None = None
    """Held while READING, STAGED, DIRTY or WRITING."""
    transfer: Transfer[StagingBuffer] | None = None
    """Under way while READING or WRITING."""
    checksums: torch.Tensor | None = None
    """int64, of what was last written; None with checksums off, or before."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"optimizer state of subgroup {self.subgroup.index}"

    def move_to(self, residency: Residency) -> None:
        """Change the residency.

        Raises:
            StateError: there is no such transition.
        """
        if (self.residency, residency) not in _ALLOWED:
            raise StateError(self.name, f"a state that may become {residency.value}", self.residency.value)
        self.residency = residency
