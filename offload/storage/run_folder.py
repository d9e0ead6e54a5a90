"""The one way to open a file in a run's folder, which lies where others may make folders and links, too.

A folder is a run's if it is a folder and no link, is this user's, and only this user may write in it: then nobody else
made what is in it. Files are opened from there by name, links are not followed, and what is made has mode 0600 whatever
the umask.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from nvme_offload.aio_native.descriptor import Descriptor
from ..errors import ForeignFolderError, SwapIOError
from ..sync import LASTING, sync_file, sync_folder
from . import drive

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OWN_FILE, _OWN_FOLDER = 0o600, 0o700


@contextmanager
def folder_open(folder: Path) -> Iterator[int]:
    """Open a run's folder, or raise ForeignFolderError; work goes by its descriptor, whoever exchanges the name."""
    with _opened(folder) as place:
        _check_own(folder, drive.ask(folder, os.fstat, place))
        yield place


def make_run_folder(folder: Path) -> None:
    """Make a run's folder with mode 0700, or find it there; its name lasts. ForeignFolderError: it is not ours."""
    try:
        drive.ask(folder, folder.mkdir, _OWN_FOLDER)
        if stat.S_IMODE(drive.ask(folder, folder.lstat).st_mode) != _OWN_FOLDER:  # the umask takes from its owner, too
            drive.ask(folder, folder.chmod, _OWN_FOLDER)
    except FileExistsError:
        pass
    with folder_open(folder):
        drive.ask(folder.parent, sync_folder, folder.parent)


def names_in(folder: Path) -> list[str]:
    """Return the names in a run's folder, sorted. Raises as `folder_open` does."""
    with folder_open(folder) as place:
        return sorted(drive.ask(folder, os.listdir, place))


def open_in(folder: Path, name: str, flags: int) -> Descriptor:
    """Open a file in a run's folder; with O_CREAT it may be made.

    One that has to be new (O_EXCL) is ours wherever it is. Whose the folder is, is not asked then: file systems that
    are not of this machine may say of a folder that was made just now that it is somebody else's.

    Raises ForeignFolderError where the folder is not this user's alone, or the name is of a link or of no file.
    """
    path = folder / name
    with _opened(folder) as place:
        if not flags & os.O_EXCL:
            _check_own(folder, drive.ask(folder, os.fstat, place))
            with suppress(FileNotFoundError):
                _check_file(path, drive.ask(path, partial(os.stat, name, dir_fd=place, follow_symlinks=False)))
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        file = drive.ask(path, Descriptor, partial(os.open, dir_fd=place), name, flags, _OWN_FILE)
        if flags & os.O_CREAT and stat.S_IMODE(drive.ask(path, os.fstat, file.fileno()).st_mode) != _OWN_FILE:
            drive.ask(path, os.fchmod, file.fileno(), _OWN_FILE)
    return file


def read_in(folder: Path, name: str) -> bytes:
    """Return all bytes of a file in a run's folder. Raises as `open_in` does."""
    with open_in(folder, name, os.O_RDONLY) as fd:
        return drive.ask(folder / name, drive.read_all, fd, direction="read")


def write_in(folder: Path, name: str, content: bytes, *, synced: bool = False) -> None:
    """Write a file in a run's folder, over what is there. Raises SwapIOError if the drive does not take it."""
    with open_in(folder, name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        about: dict[str, Any] = {"direction": "write", "size_bytes": len(content)}
        drive.ask(folder / name, drive.write_all, fd, content, **about)
        if synced:
            drive.ask(folder / name, sync_file, fd, **about)


def open_synced(folder: Path, name: str, *, direct: bool) -> Descriptor:
    """Open a file that exists: every write through its descriptor is on the drive when it returns, and that alone.

    `direct` goes past the page cache; then address, offset and size must be aligned.
    """
    return open_in(folder, name, os.O_RDWR | LASTING | (os.O_DIRECT if direct else 0))


def replace_in(folder: Path, name: str, content: bytes) -> None:
    """Give a file this content: after a crash it has all of it, or what it had before, or is not there if it was not.

    What a crash leaves beside it ends in ``.new``. Raises SwapIOError if the drive does not take it; the file has what
    it had before.
    """
    new = folder / f"{name}.new"
    try:
        write_in(folder, new.name, content, synced=True)
        rename_in(folder, new.name, name)
    except ForeignFolderError:
        raise
    except SwapIOError as error:
        with suppress(OSError):
            drive.ask(new, new.unlink, True)
        error.path = folder / name
        raise


def rename_in(folder: Path, before: str, after: str) -> None:
    """Give a file in a run's folder another name, which lasts."""
    drive.ask(folder / before, (folder / before).rename, folder / after, direction="write")
    drive.ask(folder, sync_folder, folder, direction="write")


def delete_in(folder: Path, *names: str) -> None:
    """Delete files of a run's folder, for good. Those that are not there are no error."""
    for name in names:
        drive.ask(folder / name, (folder / name).unlink, True, direction="write")
    drive.ask(folder, sync_folder, folder, direction="write")


def is_at(path: Path, fd: int) -> bool:
    """Whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(drive.ask(path, os.lstat, path), drive.ask(path, os.fstat, fd))
    except FileNotFoundError:
        return False


def _opened(folder: Path) -> Descriptor:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return drive.ask(folder, Descriptor, os.open, folder, flags)
    except SwapIOError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and drive.ask(folder, folder.is_symlink):
            raise ForeignFolderError(folder, "is a link, and no folder") from error
        raise


def _check_own(folder: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise ForeignFolderError(folder, f"belongs to user {found.st_uid}, and this process is of {os.geteuid()}")
    if found.st_mode & _OTHERS_MAY_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        raise ForeignFolderError(folder, f"has mode {mode:04o}: others may write in it")


def _check_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = "a link" if stat.S_ISLNK(found.st_mode) else "no file"
        raise ForeignFolderError(path, f"is {what}, which no run puts there")
