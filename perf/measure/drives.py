"""The block device behind a path."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.offload.host.proc import SYS, Mount, mount_of, read, read_int


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
    directory = _directory(device_number)
    if directory is None and mount is not None and mount.source.startswith("/dev/"):
        # btrfs: files have device numbers of their own. In a container the device file may be missing.
        try:
            directory = _directory(os.stat(mount.source).st_rdev)
        except OSError:
            link = SYS / "class/block" / Path(mount.source).name
            directory = link.resolve() if link.exists() else None
    return _read_drive(directory) if directory else None


def _directory(device_number: int) -> Path | None:
    link = SYS / f"dev/block/{os.major(device_number)}:{os.minor(device_number)}"
    if not link.exists():
        return None
    directory = link.resolve()
    return directory.parent if (directory / "partition").exists() else directory


def _read_drive(directory: Path) -> Drive:
    queue = directory / "queue"
    scheduler = read(queue / "scheduler")
    active = re.search(r"\[(\S+)\]", scheduler) if scheduler else None
    rotational = read_int(queue / "rotational")
    return Drive(
        name=directory.name,
        model=read(directory / "device/model"),
        members=tuple(sorted(_members(directory))),
        rotational=None if rotational is None else bool(rotational),
        scheduler=active[1] if active else scheduler,
        nr_requests=read_int(queue / "nr_requests"),
        max_sectors_kb=read_int(queue / "max_sectors_kb"),
    )


def _members(directory: Path) -> Iterator[str]:
    slaves = directory / "slaves"
    for slave in sorted(slaves.iterdir()) if slaves.is_dir() else ():
        yield from list(_members(slave.resolve())) or [slave.name]


def drive_of(path: Path) -> Drive | None:
    """The drive under a folder; None where no block device is known, or the folder is not there."""
    try:
        folder = Descriptor(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    with folder as fd:
        return find_drive(os.fstat(fd).st_dev, mount_of(fd))
