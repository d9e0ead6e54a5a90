"""What a pinned step refers to, read past the tiers while the run goes on writing elsewhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import torch

from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.durable.seal import ExtentLayout, Sums, open_sealed
from nvme_offload.offload.durable.shadow import TABLE
from nvme_offload.offload.errors import StateError, SwapIOError
from nvme_offload.offload.host.region import HostRegion


class PinnedReader:
    """Reads whole extents of a step, one at a time, into memory of its own.

    For one thread, which may be another one than that which trains: it shares nothing with that but open files.

    Args:
        run: keeps the step until all is read.
        manifest: of the step.
        layouts: of its slots.
    """

    def __init__(self, run: DurableRun, manifest: Manifest, layouts: Sequence[ExtentLayout]) -> None:
        self._run = run
        self._layouts = list(layouts)
        self._written = [run.extents.written(manifest.tables[TABLE], slot) for slot in range(len(self._layouts))]
        self._memory = HostRegion(max((layout.size_bytes for layout in self._layouts), default=1))

    def read(self, slot: int) -> tuple[HostRegion, Sums]:
        """State, tail and trailer of a slot, and the sums that the first two must have.

        Raises:
            StateError: the step has nothing of this slot.
            SwapIOError: it cannot be read.
            CorruptionError: it is not what the step refers to.
        """
        layout, written = self._layouts[slot], self._written[slot]
        if written is None:
            raise StateError(f"slot {slot}", "an extent of the pinned step", "none")
        extent, sealed_as, root = written
        at = 0
        for fd, offset, size_bytes in extent.stripes:
            self._fill(fd, offset, at, size_bytes)
            at += size_bytes
        path = str(self._run.space.path_of(extent.stripes[-1].fd))
        return self._memory, open_sealed(self._memory, layout, sealed_as, root, path=path, what=f"slot {slot}")

    def _fill(self, fd: int, offset: int, at: int, size_bytes: int) -> None:
        target = self._memory.view(torch.uint8, at, size_bytes).numpy().data
        done, unit = 0, self._run.space.alignment
        while done < size_bytes:
            try:
                moved = os.preadv(fd, [target[done:]], offset + done)
            except OSError as error:
                raise self._error(error.errno or errno.EIO, fd, offset + done, size_bytes - done) from error
            if moved == 0:
                raise self._error(errno.EIO, fd, offset + done, size_bytes - done)
            done += moved
            done -= done % unit if done < size_bytes else 0  # direct I/O goes on where it may begin

    def _error(self, code: int, fd: int, offset: int, size_bytes: int) -> SwapIOError:
        path = self._run.space.path_of(fd)
        return SwapIOError(
            code, path=path, offset=offset, size_bytes=size_bytes, direction="read", extent="a pinned step"
        )
