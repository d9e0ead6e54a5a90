"""Files that somebody else wrote are read where they are: never written, and copied nowhere.

A direct read beyond the end of a file would write zeros over all that was asked for, so what lies behind the last whole
page is read once, when the file is opened.
"""

import ctypes
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.aio_native.engine import Failure, Segment
from ..errors import SwapIOError, WeightFileError
from ..host.buffer_pool import StagingBuffer
from ..units import round_up
from . import drive
from .extent import Extent
from .file_ranges import PAGE, FileIdentity, RangeLayout
from .swap_file import NO_DIRECT_IO, DirectPolicy, move_all, reported_alignment


class ForeignFile:
    """A file of somebody else's, open for reads.

    Raises:
        WeightFileError: it cannot be opened, or is not what it was.
    """

    def __init__(self, path: Path, identity: FileIdentity, direct: DirectPolicy) -> None:
        self.path = path
        self.identity = identity
        try:
            self._descriptor = self._opened(direct)
            self.check()
            self.tail = self._read_tail()
        except WeightFileError:
            raise
        except SwapIOError as error:
            raise WeightFileError(error.errno or errno.EIO, path, "it cannot be opened") from error

    @property
    def fd(self) -> int:
        """The open file; -1 when it is closed."""
        return self._descriptor.fileno()

    @property
    def whole_bytes(self) -> int:
        """Count the bytes of its whole pages."""
        return self.identity.size_bytes // PAGE * PAGE

    def check(self) -> None:
        """Raise WeightFileError if it is not what it was."""
        now = FileIdentity.of(drive.ask(self.path, os.fstat, self.fd, direction="read"))
        if now != self.identity:
            raise WeightFileError(errno.ESTALE, self.path, self.identity.differences(now))

    def close(self) -> None:
        """Close the descriptor."""
        self._descriptor.close()

    def _open(self, flags: int = 0) -> Descriptor:
        return drive.ask(self.path, Descriptor, os.open, self.path, os.O_RDONLY | os.O_CLOEXEC | flags)

    def _opened(self, direct: DirectPolicy) -> Descriptor:
        if direct != "disabled" and (opened := self._opened_direct()) is not None:
            return opened
        if direct == "required":
            raise WeightFileError(errno.EINVAL, self.path, "its file system has no direct I/O (O_DIRECT)")
        return self._open()

    def _opened_direct(self) -> Descriptor | None:
        try:
            opened = self._open(os.O_DIRECT)
        except SwapIOError as error:
            if error.errno != errno.EINVAL:
                raise
            return None
        reported = reported_alignment(opened.fileno())
        return opened if reported != NO_DIRECT_IO and max(reported or (0,)) <= PAGE else None

    def _read_tail(self) -> bytearray:
        tail = bytearray(self.identity.size_bytes - self.whole_bytes)
        with self._open() as fd:
            move_all(drive.read_at, fd, self.path, "read", self.whole_bytes, memoryview(tail), unit=1)
        return tail


class FileExtent(Extent):
    """An extent of ranges of files. Nobody writes to it."""

    def __init__(self, layout: RangeLayout, files: Iterable[ForeignFile]) -> None:
        super().__init__(layout.size_bytes, ())
        self.offsets = layout.offsets
        """Each tensor begins here in a buffer, in bytes."""
        by_path = {file.path: file for file in files}
        self._runs = [(run, by_path[run.path]) for run in layout.runs]
        self.files = list(dict.fromkeys(file for _, file in self._runs))
        self._arranging = False

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    is_of_others = True

    def segments(self, address: int, start: int = 0, size_bytes: int | None = None) -> list[Segment]:
        """Return what an engine must read for `arrive`; always all of it."""
        assert start == 0
        assert size_bytes is None
        self._arranging = False
        found = []
        for run, file in self._runs:
            stop = min(round_up(run.end, PAGE), file.whole_bytes)
            if run.page < stop:
                found.append(Segment(file.fd, run.page, address + run.place, stop - run.page))
        return found

    def arrive(self, buffer: StagingBuffer) -> bool:
        """Bring what was read to its places; False where an exception cut that short before, so read it again.

        Raises:
            WeightFileError: a file is not what it was.
        """
        if self._arranging:
            return False
        self.check()
        self._arranging = True  # what follows moves bytes onto others, and cannot be done twice
        for run, file in self._runs:
            if run.end > file.whole_bytes:
                behind = max(run.page - file.whole_bytes, 0)
                tail = bytes(file.tail[behind : run.end - file.whole_bytes])
                ctypes.memmove(buffer.address + run.place + file.whole_bytes + behind - run.page, tail, len(tail))
            if run.source != run.target:
                ctypes.memmove(buffer.address + run.target, buffer.address + run.source, run.size_bytes)
        return True

    def check(self) -> None:
        """Raise WeightFileError if a file is not what it was."""
        for file in self.files:
            file.check()

    def path_of(self, fd: int) -> Path:
        """Return the file behind a descriptor."""
        return next(file.path for file in self.files if file.fd == fd)

    def error_of(self, failure: Failure, what: str) -> SwapIOError:
        """Return what to raise for a read that failed: that a file is not what it was, where that is so."""
        try:
            self.check()
        except SwapIOError as error:
            return error
        size_bytes, offset = failure.size_bytes, failure.offset
        problem = f"{size_bytes} bytes at offset {offset} ({what}) cannot be read"
        return WeightFileError(failure.errno, self.path_of(failure.fd), problem)

    def describe(self) -> str:
        """Name the files."""
        return ", ".join(str(file.path) for file in self.files)
