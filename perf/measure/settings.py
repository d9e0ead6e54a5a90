"""The knobs of a measurement, named as in fio."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nvme_offload.offload.storage.swap_file import DirectPolicy
from nvme_offload.offload.units import GiB

Rw = Literal["read", "write", "mixed"]

MAX_STAGING_BYTES = GiB
"""Host memory for the staging buffers of a benchmark, whatever depth was asked for."""
BUFFERS_PER_RING = 8
"""Transfers under way for each ring, of a quarter of its queue each: half of them fill it while the others come and go.
More memory than two full queues makes a fast drive slower, because the buffers no longer stay in the caches."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The knobs of one target, named as in fio."""

    paths: tuple[Path, ...]
    size: int
    """Bytes of the region that is worked on."""
    bs: int
    iodepth: int
    numjobs: int
    """Number of rings: fio's jobs, without a process for each."""
    ioengine: str
    direct: DirectPolicy
    device: str = "cpu"

    @property
    def num_buffers(self) -> int:
        """Staging buffers of the raw target."""
        return BUFFERS_PER_RING * self.numjobs

    @property
    def transfer_bytes(self) -> int:
        """Bytes of one transfer: a quarter of a full queue, but so little that every buffer is used at least twice."""
        most = min(MAX_STAGING_BYTES // self.num_buffers, self.size // (2 * self.num_buffers))
        return max(1, min(self.iodepth // 4, most // self.bs)) * self.bs
