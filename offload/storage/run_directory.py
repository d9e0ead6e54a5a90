"""Directories of runs that share a path: each locked by its run, and removed by the next one if its run died."""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import stat
import weakref
from pathlib import Path

from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.aio_native.finalizing import finalize
from ..errors import ExistsError, MissingError, SwapIOError
from ..units import format_bytes
from . import drive
from .run_folder import is_at, open_in
from .swap_file import DirectPolicy, SwapFile

logger = logging.getLogger(__name__)

PREFIX = "nvme-offload-"
LOCK_NAME = "lock"
SWAP_NAME = "swap"
FIO_NAME = "fio"
RECORD_NAME = "record.json"
RECORD_NAME_NEW = "record.json.new"
FILE_NAMES = (SWAP_NAME, FIO_NAME, RECORD_NAME, RECORD_NAME_NEW, LOCK_NAME)
"""All that is ever put into a run directory: the swap file, or the file of a comparison with fio, what the run says of
itself, and the lock."""

_UNLOCKED = "."
"""Prefix of the name of a directory that has no lock yet."""
_RUN_NAME = re.compile(r"\.?" + re.escape(PREFIX) + r"\d+-\d+")
_numbers = itertools.count()
_MOST_ATTEMPTS = 100
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own (stat(2))


class _Claim:
    """A run directory as its maker knows it, from before there is any of it."""

    def __init__(self) -> None:
        self.names: tuple[Path, ...] = ()
        """It may be called this, hidden and then not. Whatever has one of these names may also be somebody else's."""
        self.lock: Descriptor | None = None
        """The lock file, locked, of the last of `names`, which is ours from then on."""

    def make_locked(self, path: Path) -> Path:
        """Make a new directory with a lock file that is locked.

        It is made under a hidden name, which whoever looks for dead runs may take away before it is locked: then
        another one is made.
        """
        failure: OSError | None = None
        for _ in range(_MOST_ATTEMPTS):
            name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
            hidden = path / f"{_UNLOCKED}{name}"
            self.names = (hidden, path / name)
            try:
                drive.ask(hidden, hidden.mkdir, 0o700)
            except FileExistsError as error:
                failure = error
                continue
            try:
                self.lock = _lock_and_rename(hidden, path / name)
                self.lock.close_in_children()  # with it open in one, a killed run would look alive
                return path / name
            except (FileExistsError, FileNotFoundError, BlockingIOError) as error:
                failure = error
                with contextlib.suppress(OSError):
                    _delete(hidden)
        raise SwapIOError((failure and failure.errno) or errno.EEXIST, path=path, direction="allocate") from failure

    def give_up(self) -> None:
        """Delete the directory, or what there is of it, and drop the lock."""
        if self.lock is None:
            for name in self.names:
                with contextlib.suppress(OSError):
                    _delete_if_dead(name)
            return
        with contextlib.suppress(OSError):  # somebody else put something there
            _delete(self.names[-1])
        self.lock.close()


class RunDirectory:
    """A directory of mode 0700 below `path` that belongs to this object while its lock file is locked.

    The lock is flock(2), which the kernel drops when the process dies however it dies. A directory gets its name when
    it is locked, so one between its creation and its lock is never taken for a dead one, and nobody waits for anybody.
    What the working folder is later makes no difference.
    """

    def __init__(self, path: Path) -> None:
        self._owner_pid = os.getpid()
        self._claim = _Claim()
        # First of all: whatever an exception cuts short from here on is given up with this object.
        self._finalizer = finalize(self, _give_up, self._claim, self._owner_pid)
        remove_leftovers(path)
        self.path = self._claim.make_locked(path.absolute())
        _live.add(self)

    def open_swap(self, direct: DirectPolicy) -> SwapFile:
        """Make the swap file."""
        return SwapFile(self.path / SWAP_NAME, direct)

    def leave(self) -> None:
        """Remove it: nobody needs what is in it any more."""
        self.remove()

    def remove(self) -> None:
        """Delete the directory with everything in it and drop the lock. Idempotent; does nothing in a forked child."""
        if self._finalizer.alive:
            # Not by the finalizer, which runs once: what is interrupted here is done by the next call.
            _give_up(self._claim, self._owner_pid)
            self._finalizer.detach()
        _live.discard(self)


_live: weakref.WeakSet[RunDirectory] = weakref.WeakSet()


def remove_leftovers(path: Path) -> int:
    """Remove the directories of dead runs below `path`; returns the bytes set free. Live runs are left alone."""
    freed = 0
    living = {directory.path.name for directory in _live}  # by name: `path` may be another way to where they are
    names = drive.ask(path, os.listdir, path, extent="nvme_path")
    for name in [name for name in names if _RUN_NAME.fullmatch(name) and name not in living]:
        with contextlib.suppress(OSError):
            if size := _delete_if_dead(path / name):  # an empty one may be of a rank that starts
                logger.warning("removed what a dead run left behind: %s (%s)", path / name, format_bytes(size))
                freed += size
    return freed


def _delete_if_dead(directory: Path) -> int:
    """Return the bytes set free; 0 if it is not ours, or that of another run by now. OSError: alive, or gone."""
    if not _is_ours(directory):
        return 0
    # O_CREAT: a run that died between making its directory and its lock left a directory without one.
    lock = open_in(directory, LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        drive.ask(directory, fcntl.flock, lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its run is alive
        if not is_at(directory / LOCK_NAME, lock.fileno()):
            return 0  # somebody else removed it meanwhile, and a run that began made another
        size = bytes_in(directory)
        _delete(directory)
    finally:
        lock.close()
    return size


def _is_ours(directory: Path) -> bool:
    found = drive.ask(directory, directory.lstat)
    if not (stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()):
        return False
    return all(name in FILE_NAMES and stat.S_ISREG(found.st_mode) for name, found in stats_in(directory))


def stats_in(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Return what is in a folder, by name; links are not followed. Raises SwapIOError."""
    files = [folder / name for name in drive.ask(folder, os.listdir, folder)]
    return [(file.name, drive.ask(file, file.lstat)) for file in files]


def bytes_in(folder: Path) -> int:
    """Return the bytes of a drive that the files of a folder take."""
    return sum(found.st_blocks * _BLOCK_BYTES for _, found in stats_in(folder))


def _delete(directory: Path) -> None:
    """Remove what a run put there, file by file; anything else stays, and the directory with it."""
    for file in [directory / name for name in FILE_NAMES]:
        drive.ask(file, file.unlink, True)
    drive.ask(directory, directory.rmdir)


def _lock_and_rename(hidden: Path, final: Path) -> Descriptor:
    lock = open_in(hidden, LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        drive.ask(hidden, fcntl.flock, lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if drive.ask(final, os.path.lexists, final):
            raise ExistsError(errno.EEXIST, path=final, direction="allocate")
        drive.ask(hidden, hidden.rename, final)
        if not is_at(final / LOCK_NAME, lock.fileno()):
            with contextlib.suppress(OSError):
                drive.ask(final, final.rmdir)
            raise MissingError(errno.ENOENT, path=final / LOCK_NAME, direction="allocate")
    except BaseException:
        lock.close()
        raise
    return lock


def _give_up(claim: _Claim, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        claim.give_up()
