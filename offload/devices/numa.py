"""Which processors are near a device, and keeping this process to them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SYS = Path("/sys")
_narrowed_from: set[int] = set()
"""Processors that this process had before `stay_near` took some of them away."""


def cpus_near(device: torch.device) -> set[int]:
    """Return the processors of a device's NUMA node; none where the kernel does not say, or there is one node."""
    properties = torch.get_device_module(device).get_device_properties(device)
    domain, bus, number = (getattr(properties, f"pci_{name}_id", -1) for name in ("domain", "bus", "device"))
    place = f"{domain:04x}:{bus:02x}:{number:02x}.0"
    try:
        node = int((SYS / "bus/pci/devices" / place / "numa_node").read_text())
        listed = (SYS / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError):
        return set()
    return numbers_of(listed)


def stay_near(device: torch.device, num_ranks: int) -> bool:
    """Keep this thread, and those that it starts from here on, to the processors near a device; returns whether it did.

    Memory that they are the first to touch is then near it, too. A lone rank on its host keeps all processors: those of
    the other socket would have nothing to do. Where somebody has narrowed the processors of this process before, as
    ``torchrun --numa-binding`` and batch systems do, nothing is changed.
    """
    allowed, near = os.sched_getaffinity(0), cpus_near(device)
    wanted = allowed & near
    if num_ranks == 1 or len(allowed) < (os.cpu_count() or 1) or not wanted or wanted == allowed:
        return False
    os.sched_setaffinity(0, wanted)
    _narrowed_from.update(allowed)
    logger.info("this thread keeps to %d of %d processors, which are near %s", len(wanted), len(allowed), device)
    return True


def num_processors_of_rank(num_ranks: int) -> int:
    """Return how many processors one of so many ranks on this host works with: its share of those that it may use."""
    own = os.sched_getaffinity(0)
    return max(1, min(len(own), len(_narrowed_from or own) // num_ranks))


def numbers_of(listed: str) -> set[int]:
    """Return what a list as the kernel writes it names: ``0-3,8-11``."""
    found: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
