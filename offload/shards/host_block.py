"""Blocks that stay in host memory beside a device: page-locked, so that copies run behind the host's back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nvme_offload.offload.host.page_locks import PageLocks
from nvme_offload.offload.host.region import HostRegion


@dataclass(eq=False)
class HostBlock:
    """A block that stays in host memory."""

    name: str
    size_bytes: int
    buffer: HostRegion | None
    """Its memory; None once it is closed."""

    def close(self) -> None:
        """Let its memory go, with its last user. No copy may be under way. Idempotent."""
        if self.buffer is not None:
            self.buffer.unpin()
            self.buffer = None


def host_blocks(
    blocks: Sequence[tuple[str, int]], device: torch.device | None, locks: PageLocks, key: str
) -> list[HostBlock]:
    """Make blocks by name and bytes, full of zeros, page-locked for a device. On an error nothing is kept."""
    made, remedy = [], f'write "nvme" for {key}.device, or lower host_budget'
    for name, size_bytes in blocks:
        region = HostRegion(size_bytes)
        if device is not None:
            locks.lock(region, device, remedy)
        made.append(HostBlock(name, size_bytes, region))
    return made
