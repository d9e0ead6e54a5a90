"""These facts about the machine and this process are noted: without them nobody can repeat a figure."""

import gc
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.offload.devices.device import current_of, default_device_type, is_device
from nvme_offload.offload.host.disks import disk_of, disks_below
from nvme_offload.offload.host.proc import PROC, Mount, mount_of, read, read_int, status_field
from nvme_offload.offload.host.region import trim_heap
from nvme_offload.offload.units import format_bytes


def _status_bytes(name: str) -> int:
    field = status_field(name)
    if field is None:
        raise RuntimeError(f"the kernel does not say {name} here: see proc(5), /proc/pid/status")
    return int(field.removesuffix(" kB")) * 1024


def settled_resident_bytes() -> int:
    """Memory of this process that is resident now, without what the C library's allocator keeps for later."""
    gc.collect()
    trim_heap()
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most memory of this process that was resident since it began, or since `reset_peak_resident_bytes`.

    Not `getrusage`: its figure survives an exec and so includes the parent.
    """
    return _status_bytes("VmHWM")


def reset_peak_resident_bytes() -> None:
    """Let the peak begin anew at what is resident now; see proc(5), clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")


def storage_bytes() -> tuple[int, int] | None:
    """Bytes that this process made the storage layer read and write, as the kernel counts them."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["read_bytes"]), int(fields["write_bytes"])
    except (OSError, KeyError, ValueError):
        return None


def moved_since(before: tuple[int, int] | None) -> tuple[int, int] | None:
    """Bytes read and written since `storage_bytes` was this; None where the kernel does not count them."""
    now = storage_bytes()
    return None if before is None or now is None else (now[0] - before[0], now[1] - before[1])


def num_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def git_commit() -> str | None:
    """The commit of the checkout that this file is part of, if it is one; `+` marks local changes."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return f"{commit}+" if commit and git("status", "--porcelain") else commit


def environment(paths: list[Path]) -> dict[str, Any]:
    """Time, commit, versions, processor, memory, and for each path its file system and drive."""
    model = re.search(r"^model name\s*:\s*(.+)$", read(PROC / "cpuinfo") or "", re.MULTILINE)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "version": version_of("nvme-offload"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "num_cpus": num_cpus(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "storage": [storage(path) for path in paths],
    }


def storage(path: Path) -> dict[str, Any]:
    """File system, mount options, capacity and drive under `path`, as far as the kernel tells."""
    system, mount, drive = os.statvfs(path), mount_at(path), drive_of(path)
    facts: dict[str, Any] = {
        "free_bytes": system.f_bavail * system.f_frsize,
        "capacity_bytes": system.f_blocks * system.f_frsize,
    }
    if mount is not None:
        facts |= {"file_system": mount.kind, "mount_options": ",".join(mount.options)}
    if drive is not None:
        names = ("model", "scheduler", "nr_requests", "max_sectors_kb", "rotational")
        known = {name: value for name in names if (value := getattr(drive, name)) is not None}
        facts |= {"device": drive.name, **known}
    return facts


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
    if (directory := disk_of(device_number, mount)) is None:
        return None
    queue = directory / "queue"
    scheduler, rotational = read(queue / "scheduler"), read_int(queue / "rotational")
    active = re.search(r"\[(\S+)\]", scheduler) if scheduler else None
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


def mount_at(path: Path) -> Mount | None:
    """The mount that a folder is on; None where /proc does not say."""
    with Descriptor(os.open, path, os.O_PATH | os.O_CLOEXEC) as fd:
        return mount_of(fd)


def describe(facts: dict[str, Any]) -> list[str]:
    """Describe the facts of `environment` in a few lines, for people."""
    lines = [
        f"{facts['cpu']}, {facts['num_cpus']} processors, {format_bytes(facts['memory_bytes'])} of memory, "
        f"Linux {facts['kernel']}, Python {facts['python']}, torch {facts['torch']}"
    ]
    for place in facts["storage"]:
        drive = " ".join(filter(None, (place.get("device", "a drive the kernel does not name"), place.get("model"))))
        lines.append(f"{place.get('file_system', 'unknown file system')} on {drive}")
    lines.append(f"commit {facts['commit'] or 'unknown'}, {facts['time']}")
    return lines


def version_of(package: str) -> str | None:
    """Version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_here() -> torch.device | None:
    """The device that trains where nobody names one; None where the CPU does."""
    kind = default_device_type()
    return current_of(kind) if is_device(kind) else None


def facts_of(device: torch.device) -> dict[str, Any]:
    """Name, memory and number of devices like this one, as far as torch tells."""
    module = torch.get_device_module(device)
    properties = module.get_device_properties(device)
    return {
        "name": getattr(properties, "name", device.type),
        "memory_bytes": getattr(properties, "total_memory", None),
        "count": module.device_count(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
