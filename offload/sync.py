"""What outlives a power loss: the bytes of a file that was synced, and its name if its folder was.

A drive may have the rest in any part and order: a name before the bytes of its file, one name of a folder and not
another that is older. So whoever renames syncs the file before and the folder afterwards. Nothing is synced past here.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.offload.errors import SwapIOError


def sync_file(descriptor: int) -> None:
    """Bring the bytes and the length of an open file to the drive."""
    os.fsync(descriptor)


def sync_data(descriptor: int) -> None:
    """Bring the bytes of an open file to the drive, with what is needed to find them, and not its times."""
    os.fdatasync(descriptor)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the drive."""
    with Descriptor(os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as descriptor:
        sync_file(descriptor)


def open_synced(path: Path, *, direct: bool) -> Descriptor:
    """A file that exists: every write through its descriptor is on the drive when it returns, and that alone.

    Args:
        path: the file.
        direct: past the page cache; then address, offset and size must be aligned.
    """
    return Descriptor(os.open, path, os.O_RDWR | os.O_CLOEXEC | os.O_DSYNC | (os.O_DIRECT if direct else 0))


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, the name of each on the drive; no-op if it is there."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Give a file this content: after a crash it has all of it, or what it had before, or is not there if it was not.

    What a crash leaves beside it ends in ``.new``.

    Raises:
        SwapIOError: the drive does not take it; the file has what it had before.
    """
    new = path.with_name(path.name + ".new")
    try:
        with Descriptor(os.open, new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600) as descriptor:
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(content)
            sync_file(descriptor)
        new.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        code = error.errno or errno.EIO
        raise SwapIOError(code, path=path, offset=0, size_bytes=len(content), direction="write") from error
