"""Committed steps are read past the staging buffers: nothing is changed, nor is anything made or promised."""

from collections.abc import Callable

import torch

from ..errors import CorruptionError, StateError, SwapIOError
from ..host.region import HostRegion
from ..storage import drive
from ..storage.swap_file import move_all
from ..storage.swap_space import SwapSpace
from .chain import Chain


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
        copies, unit = self._space.copies, self._space.alignment
        while True:
            fd_read = copies.read_at(fd)
            path = self._space.path_of(fd_read)
            try:
                return move_all(drive.read_at, fd_read, path, "read", offset, target, unit=unit, extent="a pinned step")
            except SwapIOError as error:
                if not copies.lose_at(fd_read, error):
                    raise
