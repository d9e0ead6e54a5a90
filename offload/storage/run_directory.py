"""Directories of runs that share a path: each locked by its run, and removed by the next one if its run died."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

from nvme_offload.offload.errors import SwapIOError
from nvme_offload.offload.units import format_bytes

logger = logging.getLogger(__name__)

PREFIX = "nvme-offload-"
LOCK_NAME = "lock"
SWAP_NAME = "swap"
FIO_NAME = "fio"
FILE_NAMES = (SWAP_NAME, FIO_NAME, LOCK_NAME)
"""All that is ever put into a run directory: the swap file, or the file of a comparison with fio, and the lock."""

_RUN_NAME = re.compile(re.escape(PREFIX) + r"\d+-\d+")


class RunDirectory:
    """A directory of mode 0700 below `path` that belongs to this object while its lock file is locked.

    The lock is flock(2), which the kernel drops when the process dies however it dies. Making the directory and
    looking for dead ones happens under a lock on `path` itself, so that a directory between its creation and its lock
    is never taken for a dead one.

    Raises:
        SwapIOError: `path` is missing, not a directory, read-only or not ours.
    """

    def __init__(self, path: Path) -> None:
        self._owner_pid = os.getpid()
        try:
            with _locked_directory(path):
                remove_leftovers(path)
                self.path = _make_unique(path)
                self._lock_fd = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SwapIOError(
                error.errno or 0, path=path, offset=0, size_bytes=0, direction="allocate", extent="nvme_path"
            ) from error
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock_fd, self._owner_pid)
        _live.add(self)

    def remove(self) -> None:
        """Delete the directory with everything in it and drop the lock. Idempotent; does nothing in a forked child."""
        self._finalizer()

    def _drop_in_child(self) -> None:
        # A lock taken by flock belongs to the open file, which a forked child shares: as long as the child kept it
        # open, a run killed with SIGKILL would look alive.
        self._finalizer.detach()
        os.close(self._lock_fd)


_live: weakref.WeakSet[RunDirectory] = weakref.WeakSet()


def _drop_all_in_child() -> None:
    for directory in list(_live):
        if directory._finalizer.alive:
            directory._drop_in_child()


os.register_at_fork(after_in_child=_drop_all_in_child)


def remove_leftovers(path: Path) -> int:
    """Remove the directories of dead runs below `path`; returns the bytes set free. Live runs are left alone."""
    freed = 0
    for directory in path.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            if not _is_ours(directory):
                continue
            # O_CREAT: a run that died between making its directory and its lock left a directory without one.
            lock_fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its run is alive
                size = sum(entry.stat().st_blocks * 512 for entry in directory.iterdir())
                _delete(directory)
            finally:
                os.close(lock_fd)
            freed += size
            logger.warning("removed what a dead run left behind: %s (%s)", directory, format_bytes(size))
    return freed


def _is_ours(directory: Path) -> bool:
    """Whether a run of this package, and nobody else, made the directory and everything in it."""
    found = directory.lstat()
    named = _RUN_NAME.fullmatch(directory.name) is not None
    if not (named and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()):
        return False
    return all(entry.name in FILE_NAMES and entry.is_file(follow_symlinks=False) for entry in os.scandir(directory))


def _delete(directory: Path) -> None:
    """Remove what a run put there, file by file; anything else stays, and the directory with it."""
    for name in FILE_NAMES:
        (directory / name).unlink(missing_ok=True)
    directory.rmdir()


@contextlib.contextmanager
def _locked_directory(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _make_unique(path: Path) -> Path:
    number = 0
    while True:
        candidate = path / f"{PREFIX}{os.getpid()}-{number}"
        try:
            candidate.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return candidate


def _remove(path: Path, lock_fd: int, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return
    with contextlib.suppress(OSError):  # somebody else put something there
        _delete(path)
    os.close(lock_fd)
