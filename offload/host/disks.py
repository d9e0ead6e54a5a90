"""The kernel's view of the disks behind a file: directories below /sys."""

import os
from collections.abc import Iterator
from pathlib import Path

from .proc import SYS, Mount


def disk_of(device_number: int, mount: Mount | None) -> Path | None:
    """The whole disk of a file whose ``st_dev`` this is; None where no block device is known."""
    directory = _directory(device_number)
    if directory is None and mount is not None and mount.source.startswith("/dev/"):
        # btrfs: files have device numbers of their own. In a container the device file may be missing.
        try:
            directory = _directory(os.stat(mount.source).st_rdev)
        except OSError:
            link = SYS / "class/block" / Path(mount.source).name
            directory = link.resolve() if link.exists() else None
    return directory


def disks_below(directory: Path) -> Iterator[Path]:
    """The disks that a combination (LVM, RAID, dm-crypt) is made of; the disk itself where it is none."""
    slaves = directory / "slaves"
    members = sorted(slaves.iterdir()) if slaves.is_dir() else []
    for member in members:
        yield from disks_below(member.resolve())
    if not members:
        yield directory


def _directory(device_number: int) -> Path | None:
    link = SYS / f"dev/block/{os.major(device_number)}:{os.minor(device_number)}"
    if not link.exists():
        return None
    directory = link.resolve()
    return directory.parent if (directory / "partition").exists() else directory
