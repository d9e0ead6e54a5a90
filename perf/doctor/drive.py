"""The block device behind a path, as /sys describes it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.host.proc import SYS, Mount, read, read_int
from nvme_offload.offload.units import KiB, format_bytes
from nvme_offload.perf.doctor.findings import Finding, Level, ok, problem

VIRTUAL = ("vd", "xvd")
"""Drives of virtual machines; the hypervisor says what it likes about rotation."""


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
    )


def _members(directory: Path) -> Iterator[str]:
    slaves = directory / "slaves"
    for slave in sorted(slaves.iterdir()) if slaves.is_dir() else ():
        below = list(_members(slave.resolve()))
        yield from below or [slave.name]


def check_drive(drive: Drive, config: OffloadConfig) -> Iterator[Finding]:
    """What kind of drive it is, and whether its queue suits the requests."""
    yield _kind(drive)
    if (finding := _scheduler(drive)) is not None:
        yield finding
    if (finding := _request_size(drive, config)) is not None:
        yield finding
    if (finding := _depth(drive, config)) is not None:
        yield finding


def _kind(drive: Drive) -> Finding:
    words = [
        {True: "rotational", False: "not rotational", None: "rotation unknown"}[drive.rotational],
        f"scheduler {drive.scheduler}",
        f"blocks of {drive.logical_block_bytes} B ({drive.physical_block_bytes} B physical)",
        f"{drive.nr_requests} requests of up to {drive.max_sectors_kb} KiB",
        "discard" if drive.discard_bytes else "no discard",
    ]
    model = f" ({drive.model})" if drive.model else ""
    members = f" on {', '.join(drive.members)}" if drive.members else ""
    found, values = f"{drive.name}{model}{members}: {', '.join(words)}", asdict(drive)
    if drive.name.startswith(("zram", "ram", "brd")):
        meaning = "host memory, not a drive: nothing is gained by moving state to it"
        return problem(Level.WARNING, "drive", found, meaning, "choose a path on an NVMe drive", **values)
    if drive.name.startswith("loop"):
        meaning = "a file that plays a drive: every byte goes through two file systems"
        return problem(Level.NOTE, "drive", found, meaning, "choose a path on the drive itself", **values)
    if drive.rotational and drive.name.startswith(VIRTUAL):
        meaning = "virtual drives often claim to rotate and do not; a hard disk would be some 20 times too slow"
        return problem(Level.NOTE, "drive", found, meaning, "measure it: offload bench --path PATH", **values)
    if drive.rotational:
        meaning = "a hard disk: some 20 times slower than an NVMe drive, and worse with reads and writes mixed"
        return problem(Level.WARNING, "drive", found, meaning, "choose a path on an NVMe drive", **values)
    return ok("drive", found, **values)


def _scheduler(drive: Drive) -> Finding | None:
    fast = drive.name.startswith("nvme")
    if (
        drive.rotational is not False
        or drive.scheduler in (None, "none")
        or (drive.scheduler == "mq-deadline" and not fast)
    ):
        return None
    meaning = "it orders requests for drives that need it, and costs processor time for each one on this one"
    remedy = f"echo none | sudo tee /sys/block/{drive.name}/queue/scheduler"
    return problem(Level.NOTE, "scheduler", f"{drive.scheduler} on a solid-state drive", meaning, remedy)


def _request_size(drive: Drive, config: OffloadConfig) -> Finding | None:
    largest, block = (drive.max_sectors_kb or 0) * KiB, config.aio.block_size
    if not largest or block <= largest:
        return None
    pieces = -(-block // largest)
    hardware = drive.max_hw_sectors_kb or 0
    meaning = f"the kernel splits each request of {format_bytes(block)} into {pieces}"
    if hardware * KiB > largest:
        wanted = min(hardware, block // KiB)
        remedy = f"echo {wanted} | sudo tee /sys/block/{drive.name}/queue/max_sectors_kb"
    else:
        remedy = "nothing needs to be done; the drive takes no larger ones"
    return problem(Level.NOTE, "request size", f"the drive takes {format_bytes(largest)} at once", meaning, remedy)


def _depth(drive: Drive, config: OffloadConfig) -> Finding | None:
    largest = (drive.max_sectors_kb or 0) * KiB or config.aio.block_size
    asked = config.aio.queue_depth * config.aio.rings * -(-config.aio.block_size // largest)
    if drive.nr_requests is None or asked <= drive.nr_requests:
        return None
    found = f"{asked} requests in flight are configured, the queue holds {drive.nr_requests}"
    meaning = "the rest waits in the kernel: a deeper queue brings nothing"
    remedy = f"write a smaller aio.queue_depth, or echo {asked} | sudo tee /sys/block/{drive.name}/queue/nr_requests"
    return problem(Level.NOTE, "queue depth", found, meaning, remedy)
