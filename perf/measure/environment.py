"""Where a figure was measured: without these facts nobody can repeat it."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nvme_offload.offload.host.proc import mount_of, read
from nvme_offload.offload.units import format_bytes
from nvme_offload.perf.measure import machine


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
    system = os.statvfs(path)
    facts: dict[str, Any] = {
        "free_bytes": system.f_bavail * system.f_frsize,
        "capacity_bytes": system.f_blocks * system.f_frsize,
        **_mount_of(path),
        **machine.drive_of(path),
    }
    queue = Path("/sys/block") / facts.get("device", "") / "queue"
    for name in ("scheduler", "nr_requests", "max_sectors_kb", "rotational"):
        if (value := read(queue / name)) is not None:
            facts[name] = value
    return facts


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


def _mount_of(path: Path) -> dict[str, str]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mount = mount_of(fd)
    finally:
        os.close(fd)
    return {"file_system": mount.kind, "mount_options": ",".join(mount.options)} if mount else {}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
