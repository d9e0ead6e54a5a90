"""Where a figure was measured: without these facts nobody can repeat it."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nvme_offload.offload.host.proc import Mount, mount_of
from nvme_offload.offload.units import format_bytes
from nvme_offload.perf.measure import machine
from nvme_offload.perf.measure.drives import drive_of


def environment(paths: list[Path]) -> dict[str, Any]:
    """Time, commit, versions, processor, memory, and for each path its file system and drive."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": machine.git_commit(),
        "version": _version("nvme-offload"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "cpu": machine.cpu_model(),
        "num_cpus": machine.num_cpus(),
        "memory_bytes": machine.memory_bytes(),
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


def mount_at(path: Path) -> Mount | None:
    """The mount that a folder is on; None where /proc does not say."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return mount_of(fd)
    finally:
        os.close(fd)


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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
