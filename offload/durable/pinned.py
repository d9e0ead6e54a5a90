"""A pinned step is read past the tiers while the run goes on writing elsewhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import torch

from nvme_offload.offload.durable.chain import Chain
from nvme_offload.offload.errors import CorruptionError, StateError, SwapIOError
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.storage.swap_space import SwapSpace


class PinnedReader:
    """Reads chains of slots, one at a time, into memory of its own; somebody keeps them until all is read.

    It is for one thread, which need not be the one that trains: the two share nothing but open files.
    """

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self._memory = HostRegion(1)

    def read(self, chain: Chain, check: Callable[[HostRegion], object] = id) -> HostRegion:
        """Read a base and the log behind it, valid until the next is read. Raises StateError if there is no base.

        `check` raises CorruptionError for what is not as it was written: then another copy is read, if there is one.
        """
        copy, memory = self._space.copies.whole[0], self._read(chain)
        try:
            check(memory)
        except CorruptionError as error:
            if not self._space.copies.lose(copy, error):
                raise
            return self.read(chain, check)
        return memory

    def _read(self, chain: Chain) -> HostRegion:
        if chain.base is None:
            raise StateError("a pinned step", "a base of each slot", "none of one")
        extent = chain.reading(base_bytes=chain.base.content.size_bytes)
        if extent.size_bytes > self._memory.size_bytes:
            self._memory = HostRegion(extent.size_bytes)
        at = 0
        for fd, offset, size_bytes in extent.stripes:
            self._fill(fd, offset, at, size_bytes)
            at += size_bytes
        return self._memory

    def _fill(self, fd: int, offset: int, at: int, size_bytes: int) -> None:
        target = self._memory.view(torch.uint8, at, size_bytes).numpy().data
        done, unit, copies = 0, self._space.alignment, self._space.copies
        while done < size_bytes:
            read_at = copies.read_at(fd)
            try:
                moved = os.preadv(read_at, [target[done:]], offset + done)
            except OSError as error:
                if copies.lose_at(read_at, error):
                    continue
                raise self._error(error.errno or errno.EIO, read_at, offset + done, size_bytes - done) from error
            if done + moved < size_bytes:
                moved -= moved % unit  # direct I/O goes on where it may begin
            if moved == 0:
                raise self._error(errno.EIO, read_at, offset + done, size_bytes - done)
            done += moved

    def _error(self, code: int, fd: int, offset: int, size_bytes: int) -> SwapIOError:
        path = self._space.path_of(fd)
        return SwapIOError(
            code, path=path, offset=offset, size_bytes=size_bytes, direction="read", extent="a pinned step"
        )
