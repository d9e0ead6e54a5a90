"""Where the demo computes, and where it keeps its swap."""

import os
from enum import StrEnum
from pathlib import Path

from nvme_offload.perf.measure.environment import mount_at


class ComputeDevice(StrEnum):
    """Where forward and backward run."""

    CPU = "cpu"
    CUDA = "cuda"


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
