"""The host memory that this process can still have, and what it may take of it without being told a number."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..units import GiB
from .proc import PROC, meminfo, mounts, read, read_int

AUTO_RESERVE_BYTES = 2 * GiB
AUTO_RESERVE_SHARE = 0.25
"""A budget of "auto" leaves this share of a host's available memory free, or `AUTO_RESERVE_BYTES` if that is more:
activations and data loaders come after it, and the page cache wants some too."""
SPARE_SHARE = 1 / 16
"""A plan for this machine leaves this share of its memory to the system, data loaders and the page cache."""


@dataclass(frozen=True)
class CgroupLimit:
    """The tightest memory limit on the way from this process's cgroup to the root."""

    directory: Path
    version: int
    limit_bytes: int
    free_bytes: int
    """Bytes that the cgroup may still have, page cache that can be dropped included."""


def cgroup_limit() -> CgroupLimit | None:
    """Return the limit that ends first, of cgroup v1 or v2; None if nothing limits."""
    found = [limit for directory, version in _memory_cgroups() if (limit := _limit_of(directory, version))]
    return min(found, key=lambda limit: limit.free_bytes, default=None)


def _memory_cgroups() -> Iterator[tuple[Path, int]]:
    memberships = [line.split(":", 2) for line in (read(PROC / "self/cgroup") or "").splitlines()]
    for _, controllers, path in memberships:
        if "memory" in controllers.split(","):
            kind, version = "cgroup", 1
        elif not controllers:
            kind, version = "cgroup2", 2
        else:
            continue
        for mount in mounts():
            if mount.kind == kind and (version == 2 or "memory" in mount.options):
                yield from ((directory, version) for directory in _upwards(mount.point, mount.root, path))


def _upwards(point: str, root: str, path: str) -> Iterator[Path]:
    below = PurePosixPath(path)
    if below.is_relative_to(root):  # in a container without a cgroup namespace the mount shows only a part of the tree
        below = below.relative_to(root)
    directory = Path(point, *(part for part in below.parts if part not in ("/", "..")))
    while directory.is_relative_to(point):
        if directory.is_dir():
            yield directory
        directory = directory.parent


def _limit_of(directory: Path, version: int) -> CgroupLimit | None:
    names = ("memory.max", "memory.current", "") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    )  # fmt: skip
    limit = read_int(directory / names[0])  # "max" is no number
    used = read_int(directory / names[1])
    if limit is None or used is None or limit >= meminfo().get("MemTotal", 2**62):
        return None
    cache = re.search(rf"^{names[2]}inactive_file (\d+)$", read(directory / "memory.stat") or "", re.MULTILINE)
    free = limit - used + (int(cache[1]) if cache else 0)
    return CgroupLimit(directory, version, limit, max(0, min(free, limit)))


def available_bytes() -> int:
    """Return the memory that this process can still have without swapping."""
    limit = cgroup_limit()
    available = meminfo().get("MemAvailable", 2**62)
    return min(available, limit.free_bytes) if limit else available


def total_bytes() -> int:
    """Return what a training may take on this machine, whoever has it now; `SPARE_SHARE` is left to the system."""
    total, limit = meminfo().get("MemTotal", 2**62), cgroup_limit()
    return int((min(total, limit.limit_bytes) if limit else total) * (1 - SPARE_SHARE))


def ranks_on_host() -> int:
    """Count the ranks that share this host: LOCAL_WORLD_SIZE as launchers set it, 1 without."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def num_processors_of_rank() -> int:
    """Return this rank's share of the processors that it may use."""
    return max(1, len(os.sched_getaffinity(0)) // ranks_on_host())


def auto_host_budget() -> int:
    """Return the host memory for one rank: its share of what is available now, less the reserve."""
    return auto_budget(available_bytes(), ranks_on_host())


def share_of_available() -> int:
    """Return the host memory that one rank may have: its share of what is available now."""
    return available_bytes() // ranks_on_host()


def auto_budget(available: int, num_ranks: int) -> int:
    """Return the share of one of `num_ranks` ranks on a host with `available` bytes, less the reserve."""
    reserve = max(AUTO_RESERVE_BYTES, int(AUTO_RESERVE_SHARE * available))
    return max(0, available - reserve) // num_ranks
