"""The block device behind a path."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.offload.host.disks import disk_of, disks_below
from nvme_offload.offload.host.proc import Mount, mount_of, read, read_int


@dataclass(frozen=True)
class Drive:
    """A whole disk, or what combines several (LVM, RAID, dm-crypt)."""

    name: str
    model: str | None
    members: tuple[str, ...]  # names of the disks below it, for a combination
    rotational: bool | None
    scheduler: str | None
    nr_requests: int | None
    max_sectors_kb: int | None


def find_drive(device_number: int, mount: Mount | None) -> Drive | None:
    """The drive of a file whose ``st_dev`` this is; None where no block device is known."""
    directory = disk_of(device_number, mount)
    return _read_drive(directory) if directory else None


def _read_drive(directory: Path) -> Drive:
    queue = directory / "queue"
    scheduler = read(queue / "scheduler")
    active = re.search(r"\[(\S+)\]", scheduler) if scheduler else None
    rotational = read_int(queue / "rotational")
    return Drive(
        name=directory.name,
        model=read(directory / "device/model"),
        members=tuple(sorted(disk.name for disk in disks_below(directory) if disk != directory)),
        rotational=None if rotational is None else bool(rotational),
        scheduler=active[1] if active else scheduler,
        nr_requests=read_int(queue / "nr_requests"),
        max_sectors_kb=read_int(queue / "max_sectors_kb"),
    )


def drive_of(path: Path) -> Drive | None:
    """The drive under a folder; None where no block device is known, or the folder is not there."""
    try:
        folder = Descriptor(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    with folder as fd:
        return find_drive(os.fstat(fd).st_dev, mount_of(fd))
