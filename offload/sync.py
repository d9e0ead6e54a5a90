"""A power loss leaves the bytes of a file that was synced, and its name if its folder was.

A drive may have the rest in any part and order: a name before the bytes of its file, one name of a folder and not
another that is older. So whoever renames syncs the file before and the folder afterwards. Nothing is synced past here.
"""

import os
from pathlib import Path

from nvme_offload.aio_native.descriptor import Descriptor

LASTING = os.O_DSYNC
"""To open with: every write through the descriptor is on the drive when it returns, and that alone."""


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


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, the name of each on the drive; no-op if it is there."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)
