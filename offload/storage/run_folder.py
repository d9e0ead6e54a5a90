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

from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.offload.errors import ForeignFolderError, SwapIOError
from nvme_offload.offload.sync import LASTING, sync_file, sync_folder

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OWN_FILE, _OWN_FOLDER = 0o600, 0o700


@contextmanager
def folder_open(folder: Path) -> Iterator[int]:
    """Open a run's folder, or raise ForeignFolderError; work goes by its descriptor, whoever exchanges the name."""
    with _opened(folder) as place:
        _check_own(folder, os.fstat(place))
        yield place


def make_run_folder(folder: Path) -> None:
    """Make a run's folder with mode 0700, or find it there; its name lasts. ForeignFolderError: it is not ours."""
    try:
        folder.mkdir(_OWN_FOLDER)
        if stat.S_IMODE(folder.lstat().st_mode) != _OWN_FOLDER:  # the umask takes from its owner, too
            folder.chmod(_OWN_FOLDER)
    except FileExistsError:
        pass
    with folder_open(folder):
        sync_folder(folder.parent)


def names_in(folder: Path) -> list[str]:
    """Return the names in a run's folder, sorted. Raises as `folder_open` does."""
    with folder_open(folder) as place:
        return sorted(os.listdir(place))


def open_in(folder: Path, name: str, flags: int) -> Descriptor:
    """Open a file in a run's folder; with O_CREAT it may be made.

    One that has to be new (O_EXCL) is ours wherever it is. Whose the folder is, is not asked then: file systems that
    are not of this machine may say of a folder that was made just now that it is somebody else's.

    Raises ForeignFolderError where the folder is not this user's alone, or the name is of a link or of no file.
    """
    with _opened(folder) as place:
        if not flags & os.O_EXCL:
            _check_own(folder, os.fstat(place))
            with suppress(FileNotFoundError):
                _check_file(folder / name, os.stat(name, dir_fd=place, follow_symlinks=False))
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        file = Descriptor(partial(os.open, dir_fd=place), name, flags, _OWN_FILE)
        if flags & os.O_CREAT and stat.S_IMODE(os.fstat(file.fileno()).st_mode) != _OWN_FILE:
            os.fchmod(file.fileno(), _OWN_FILE)
    return file


def read_in(folder: Path, name: str) -> bytes:
    """Return all bytes of a file in a run's folder. Raises as `open_in` does."""
    with open_in(folder, name, os.O_RDONLY) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        return file.read()


def write_in(folder: Path, name: str, content: bytes, *, synced: bool = False) -> None:
    """Write a file in a run's folder, over what is there. Raises SwapIOError if the drive does not take it."""
    try:
        with open_in(folder, name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            with os.fdopen(fd, "wb", closefd=False) as file:
                file.write(content)
            if synced:
                sync_file(fd)
    except ForeignFolderError:
        raise
    except OSError as error:
        code = error.errno or errno.EIO
        raise SwapIOError(code, path=folder / name, size_bytes=len(content), direction="write") from error


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
    new = f"{name}.new"
    try:
        write_in(folder, new, content, synced=True)
        (folder / new).rename(folder / name)
        sync_folder(folder)
    except ForeignFolderError:
        raise
    except OSError as error:
        with suppress(OSError):
            (folder / new).unlink(missing_ok=True)
        code = error.errno or errno.EIO
        raise SwapIOError(code, path=folder / name, size_bytes=len(content), direction="write") from error


def is_at(path: Path, fd: int) -> bool:
    """Whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _opened(folder: Path) -> Descriptor:
    try:
        return Descriptor(os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and folder.is_symlink():
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
