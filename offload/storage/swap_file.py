"""One swap file: opened for direct I/O, mode 0600, with its space promised before it is used."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from nvme_offload.aio_native import _native
from nvme_offload.aio_native.descriptor import Descriptor
from ..errors import Direction, OutOfSpaceError, SwapIOError
from . import drive
from .extent import FreeList, Stripe
from .run_folder import open_in

logger = logging.getLogger(__name__)

DirectPolicy = Literal["required", "optional", "disabled"]

MIN_ALIGNMENT = 4096
"""Extents are aligned to this even where the drive would take less: one page, one physical sector."""

NO_DIRECT_IO = (0, 0)
"""statx reports this of a file without direct I/O, see `reported_alignment`."""

_STAT_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own (stat(2))

_NO_PROMISES = (errno.EOPNOTSUPP, errno.EINVAL)
"""fallocate(2) is refused so; EINVAL where the C library writes single bytes instead, through direct I/O."""
_PIECE_BYTES = 4 << 20

_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
"""FS_IOC_GETFLAGS and FS_IOC_SETFLAGS of linux/fs.h, for a long of 8 bytes; what follows are flags of it."""
_COMPRESSED, _NO_COPY_ON_WRITE = 0x4, 0x800000

_said_buffered: set[int] = set()
_said_filled: set[int] = set()


class SwapFile:
    """A file that grows by whole ranges and never shrinks while open.

    Args:
        path: where; must not exist.
        direct: as ``aio.direct`` in the configuration.
        keep: it may exist, and what is in it stays. All of it is free: `claim` what somebody refers to.
        read_only: it exists, what is in it stays, and nothing can be written; also on a file system that is read-only.
    """

    def __init__(self, path: Path, direct: DirectPolicy, *, keep: bool = False, read_only: bool = False) -> None:
        self.path = path
        making = os.O_CREAT if keep else os.O_CREAT | os.O_EXCL
        self._descriptor, alignment = _open(path, direct, os.O_RDONLY if read_only else os.O_RDWR | making)
        self.direct = alignment is not None
        self.alignment = alignment or MIN_ALIGNMENT
        self.ranges = FreeList()
        self._promised = 0
        self._counts_blocks = False
        if keep:
            # What an earlier process was promised still is, where no range of the file lacks its blocks.
            found = self.status()
            if found.st_blocks * _STAT_BLOCK_BYTES >= found.st_size:
                self._note_promise(found.st_size)

    @property
    def fd(self) -> int:
        """The open file; -1 when it is closed."""
        return self._descriptor.fileno()

    def status(self) -> os.stat_result:
        """Return what the file system says of the open file, or raise SwapIOError."""
        return drive.ask(self.path, os.fstat, self.fd, direction="read")

    @property
    def end(self) -> int:
        """First byte after the last range handed out."""
        return self.ranges.end

    def share_ranges(self, other: SwapFile) -> None:
        """Have the ranges that another file hands out, for a copy of it."""
        self.ranges = other.ranges

    def take(self, size_bytes: int) -> Stripe:
        """Take a range of this file, not promised yet: `reserve` everything up to `end` before it is used."""
        return Stripe(self.fd, self.ranges.take(size_bytes), size_bytes)

    def claim(self, stripe: Stripe) -> None:
        """Take exactly this range, and `reserve` as after `take`; raises ValueError where somebody has part of it."""
        self.ranges.claim(stripe.offset, stripe.size_bytes)

    def reserve(self, size_bytes: int) -> None:
        """Make the file at least so long, its space promised by the file system, or raise and change nothing."""
        missing = size_bytes - self._promised
        if missing <= 0:
            return
        self.check_whole()  # a file that grew is long enough again, and its blocks are counted anew
        # Asked first because some file systems (and glibc's emulation) fill the disk before they say no.
        self.check_room(size_bytes)
        try:
            promise(self.fd, self.path, self._promised, missing)
        except SwapIOError:
            with suppress(OSError):  # left longer it does no harm, and what went wrong first is what must be told
                drive.ask(self.path, os.ftruncate, self.fd, self._promised)
            raise
        self._note_promise(size_bytes)

    def reserve_again(self, size_bytes: int) -> None:
        """Do what `reserve` does for a file of which somebody may have taken a part."""
        try:
            self.check_whole()
        except SwapIOError:
            self._note_promise(0)
        self.reserve(size_bytes)

    def check_room(self, size_bytes: int) -> None:
        """Raise OutOfSpaceError where the file system has no room for a file of that length."""
        missing = size_bytes - self._promised
        # ramfs counts no blocks at all (f_blocks is 0): nothing to ask.
        system = drive.ask(self.path, os.fstatvfs, self.fd)
        if system.f_blocks and (free_bytes := system.f_bavail * system.f_frsize) < missing:
            raise OutOfSpaceError(path=self.path, needed_bytes=missing, free_bytes=free_bytes)

    def _note_promise(self, size_bytes: int) -> None:
        self._promised = size_bytes
        # Copy-on-write and compressing file systems count blocks as they like: there only the length is watched.
        self._counts_blocks = self.status().st_blocks * _STAT_BLOCK_BYTES >= size_bytes

    def check_whole(self) -> None:
        """Raise SwapIOError, with ENODATA and the size found, if somebody shortened the file or took space from it.

        What was cut off would read as zeros once a later write has made the file long enough again, so the blocks are
        counted too, where the file system gave them when they were promised.
        """
        found = self.status()
        held_bytes = found.st_blocks * _STAT_BLOCK_BYTES if self._counts_blocks else found.st_size
        if min(found.st_size, held_bytes) >= self._promised:
            return
        raise SwapIOError(
            errno.ENODATA,
            path=self.path,
            offset=min(found.st_size, self._promised),
            size_bytes=self._promised,
            direction="read",
            extent=f"the file should hold {self._promised} bytes and has {min(found.st_size, held_bytes)}",
        )

    def give_up_reserve(self) -> None:
        """Give back what was promised and not handed out. Raises as `check_whole` does, and then gives nothing back."""
        if self._promised > self.end:
            self.check_whole()
            drive.ask(self.path, os.ftruncate, self.fd, self.end)
            self._note_promise(self.end)

    def copy_from(self, other: SwapFile, offset: int, memory: memoryview) -> None:
        """Copy a range of another file to the same place, through memory as large as it is, which is aligned."""
        move_all(drive.read_at, other.fd, other.path, "read", offset, memory, unit=other.alignment)
        move_all(os.pwrite, self.fd, self.path, "write", offset, memory, unit=self.alignment)

    def free(self, stripe: Stripe) -> None:
        """Give a range back for later ``take`` calls."""
        self.ranges.give_back(stripe.offset, stripe.size_bytes)

    def close_in_children(self) -> None:
        """Close the descriptor in what this process forks, which would share its lock."""
        self._descriptor.close_in_children()

    def close(self) -> None:
        """Close the descriptor. The file itself belongs to its run directory."""
        drive.ask(self.path, self._descriptor.close)


def promise(fd: int, path: Path, offset: int, size_bytes: int, extent: str = "") -> None:
    """Have the file system promise the space of a range; OutOfSpaceError where it has none, or a quota is used up."""
    system = drive.ask(path, os.fstatvfs, fd)
    about: dict[str, Any] = {"offset": offset, "size_bytes": size_bytes, "extent": extent}
    if offset == 0:
        _overwrite_in_place(fd, path)
    try:
        try:
            drive.ask(path, os.posix_fallocate, fd, offset, size_bytes, **about)
        except SwapIOError as error:
            if error.errno not in _NO_PROMISES:
                raise
            _fill(fd, path, offset, size_bytes, extent)
    except SwapIOError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free_bytes, code = system.f_bavail * system.f_frsize, error.errno
            raise OutOfSpaceError(path=path, needed_bytes=size_bytes, free_bytes=free_bytes, errno=code) from error
        raise


def _overwrite_in_place(fd: int, path: Path) -> None:
    """Have an empty file's blocks overwritten where they are, on btrfs too: without its checksums of them.

    With them, a promise is good for one write of a block, and direct writes go through the page cache. Other file
    systems refuse the wish, and btrfs ignores that of a file with bytes.
    """
    wishes = array("l", [0])
    with suppress(OSError):
        drive.ask(path, fcntl.ioctl, fd, _GET_FLAGS, wishes)
        wishes[0] = wishes[0] & ~_COMPRESSED | _NO_COPY_ON_WRITE
        drive.ask(path, fcntl.ioctl, fd, _SET_FLAGS, wishes)


def _fill(fd: int, path: Path, offset: int, size_bytes: int, extent: str) -> None:
    """Write every block of a range, with what is there or zeros: a promise by any file system that overwrites."""
    if (device := drive.ask(path, os.fstat, fd).st_dev) not in _said_filled:
        _said_filled.add(device)
        logger.warning("%s cannot promise space (fallocate): all of it is written once, which takes long", path.parent)
    memory = memoryview(mmap.mmap(-1, min(size_bytes, _PIECE_BYTES)))
    for at in range(offset, offset + size_bytes, _PIECE_BYTES):
        piece = memory[: offset + size_bytes - at]
        found = drive.ask(path, drive.read_at, fd, piece, at, direction="read", extent=extent)
        piece[found:] = bytes(len(piece) - found)
        move_all(os.pwrite, fd, path, "allocate", at, piece, extent=extent)


def move_all(
    call: Callable[[int, memoryview, int], int],
    fd: int,
    path: Path,
    direction: Direction,
    offset: int,
    memory: memoryview,
    *,
    unit: int = MIN_ALIGNMENT,
    extent: str = "",
) -> None:
    """Read or write all of some memory, past an engine; raise SwapIOError, which says what of it was left.

    `call` is `drive.read_at` or `os.pwrite`; `unit` is where direct I/O may begin.
    """
    done = 0
    while done < len(memory):
        about: dict[str, Any] = {"offset": offset + done, "size_bytes": len(memory) - done, "extent": extent}
        moved = drive.ask(path, call, fd, memory[done:], offset + done, direction=direction, **about)
        if done + moved < len(memory):
            moved -= moved % unit  # a short one goes on where direct I/O may begin
        if not moved:
            raise SwapIOError(errno.EIO, path=path, direction=direction, **about)
        done += moved


def _open(path: Path, direct: DirectPolicy, how: int) -> tuple[Descriptor, int | None]:
    if direct == "disabled":
        return open_in(path.parent, path.name, how), None
    opened = _open_direct(path, how)
    if opened is not None:
        return opened
    if direct == "required":
        raise SwapIOError(
            errno.EINVAL, path=path, direction="allocate", extent="this file system has no direct I/O (O_DIRECT)"
        )
    file = open_in(path.parent, path.name, how)
    if (device := drive.ask(path, os.fstat, file.fileno()).st_dev) not in _said_buffered:
        _said_buffered.add(device)
        logger.warning(
            "%s has no direct I/O: swapping through the page cache, which takes host memory and is slower "
            '(aio.direct = "optional" allows it)',
            path.parent,
        )
    return file, None


def _open_direct(path: Path, flags: int) -> tuple[Descriptor, int] | None:
    """The open file and the alignment; None, and no file of ours, where the file system has no direct I/O."""
    try:
        file = open_in(path.parent, path.name, flags | os.O_DIRECT)
    except SwapIOError as error:
        # EINVAL is how a file system says that it has no direct I/O. Linux makes the file before it finds out.
        if error.errno != errno.EINVAL:
            raise
    else:
        reported = reported_alignment(file.fileno())
        if not flags & os.O_EXCL and reported and max(reported) > MIN_ALIGNMENT:
            reported = _unless_shared(path, reported)
        if reported != NO_DIRECT_IO:
            return file, max(MIN_ALIGNMENT, *(reported or (0, 0)))
        file.close()
    if flags & os.O_EXCL:
        drive.ask(path, path.unlink, True)
    return None


def _unless_shared(path: Path, reported: tuple[int, int]) -> tuple[int, int]:
    """Return what the file system asks of a new file beside this one, by which extents of this one were placed.

    XFS asks for whole blocks of a file that ever shared blocks with a copy, and writes less than that all the same.
    """
    making = os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    with suppress(OSError), drive.ask(path, Descriptor, os.open, path.parent, making) as new:
        if (asked := reported_alignment(new) or reported) != reported:
            logger.warning(
                "%s shared its blocks with a copy (cp --reflink): writes of less than %d bytes go through the page "
                "cache. A copy by `cp -r --reflink=never` in place of its folder does not",
                path,
                max(reported),
            )
            return asked
    return reported


def reported_alignment(fd: int) -> tuple[int, int] | None:
    """Return what statx reports for direct I/O on an open file, in memory and in the file; None where it does not say.

    `NO_DIRECT_IO` of a file that opens with O_DIRECT all the same and then goes through the page cache: on ext4 with
    data=journal, or an encrypted one.
    """
    try:
        return _native.direct_io_alignment(fd)
    except OSError:  # a seccomp filter that does not know statx: as good as a kernel that does not say
        return None
