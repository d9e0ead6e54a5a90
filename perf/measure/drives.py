"""The block device behind a path, as /sys describes it: what it is, where it is, how warm it is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvme_offload.offload.host.proc import SYS, Mount, mount_of, read, read_int


@dataclass(frozen=True)
class Drive:
    """A whole disk, or what combines several (LVM, RAID, dm-crypt)."""

    name: str
    model: str | None
    members: tuple[str, ...]
    """Names of the disks below it, for a combination."""
    rotational: bool | None
    scheduler: str | None
    logical_block_bytes: int | None
    physical_block_bytes: int | None
    nr_requests: int | None
    max_sectors_kb: int | None
    max_hw_sectors_kb: int | None
    discard_bytes: int | None
    """Bytes of the largest discard; 0 where there is none."""
    numa_node: int | None = None
    """NUMA node whose processors are nearest; None where there is one, or nobody says."""

    @property
    def near_cpus(self) -> set[int]:
        """Processors of its NUMA node; empty where there is none, or nobody says."""
        return set() if self.numa_node is None else set(_cpus(read(_cpu_list(self.numa_node)) or ""))

    @property
    def disks(self) -> tuple[str, ...]:
        """Names of the disks that hold the bytes."""
        return self.members or (self.name,)


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
        logical_block_bytes=read_int(queue / "logical_block_size"),
        physical_block_bytes=read_int(queue / "physical_block_size"),
        nr_requests=read_int(queue / "nr_requests"),
        max_sectors_kb=read_int(queue / "max_sectors_kb"),
        max_hw_sectors_kb=read_int(queue / "max_hw_sectors_kb"),
        discard_bytes=read_int(queue / "discard_max_bytes"),
        numa_node=_numa_node(directory),
    )


def _members(directory: Path) -> Iterator[str]:
    slaves = directory / "slaves"
    for slave in sorted(slaves.iterdir()) if slaves.is_dir() else ():
        below = list(_members(slave.resolve()))
        yield from below or [slave.name]


def _numa_node(directory: Path) -> int | None:
    """Of a disk: of the PCI device below its controller. -1 says that there is only one."""
    found = (read_int(directory / up / "numa_node") for up in ("device", "device/device"))
    return next((node for node in found if node is not None and node >= 0), None)


def _cpu_list(node: int) -> Path:
    return SYS / f"devices/system/node/node{node}/cpulist"


def _cpus(text: str) -> Iterator[int]:
    """Numbers of a list as the kernel writes it: ``0-3,8``."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def drive_of(path: Path) -> Drive | None:
    """The drive under a folder; None where no block device is known, or the folder is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return find_drive(os.fstat(fd).st_dev, mount_of(fd))
    finally:
        os.close(fd)


def temperature(disk: str) -> float | None:
    """Degrees Celsius of a disk now, as its driver tells everybody; None where it does not.

    The kernel's nvme driver does (``CONFIG_NVME_HWMON``), from Linux 5.5 on.
    """
    device = SYS / "class/block" / disk / "device"
    places = [*device.glob("hwmon*/temp1_input"), *device.glob("hwmon/hwmon*/temp1_input")]
    found = (read_int(place) for place in sorted(places))
    return next((thousandths / 1000 for thousandths in found if thousandths is not None), None)
