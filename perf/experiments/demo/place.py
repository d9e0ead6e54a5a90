"""Where the demo computes, and where it keeps its swap."""

import os
from enum import StrEnum
from pathlib import Path

from nvme_offload.offload.host.proc import Mount, mount_of


class ComputeDevice(StrEnum):
    """Where forward and backward run."""

    CPU = "cpu"
    CUDA = "cuda"


def mount_at(path: Path) -> Mount | None:
    """The mount that a folder is on; None where /proc does not say."""
    fd = os.open(path, os.O_PATH)
    try:
        return mount_of(fd)
    finally:
        os.close(fd)


def file_system_type(path: Path) -> str:
    """The type of the file system that holds `path`, such as ext4, or "unknown"."""
    mount = mount_at(path)
    return mount.kind if mount else "unknown"


def choose_swap_parent(path: Path | None, out: Path) -> Path:
    """The directory that will hold the swap directory: the one asked for, or one that is on a drive.

    Raises:
        ValueError: The directory is missing or lives in memory, or no candidate is on a drive.
    """
    if path is not None:
        if not path.is_dir():
            raise ValueError(f"{path} is not an existing directory")
        if not os.access(path, os.W_OK | os.X_OK):
            raise ValueError(f"{path} is not writable")
        if (mount := mount_at(path)) and mount.is_memory:
            raise ValueError(f"{path} is on {mount.kind}, which is memory and not a drive; choose another directory")
        return path
    candidates = [out, Path.cwd(), Path.home(), Path("/var/tmp")]
    for candidate in candidates:
        if os.access(candidate, os.W_OK | os.X_OK) and not ((mount := mount_at(candidate)) and mount.is_memory):
            return candidate
    raise ValueError(f"none of {', '.join(map(str, candidates))} is on a drive; name a directory with --path")
