"""The GPU that training would use here: what it is, and how fast bytes go to it and come back."""

import time
from collections.abc import Callable
from typing import Any

import torch

from nvme_offload.offload.devices.device import CopyQueue, current_of, default_device_type, is_device
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.units import MiB

COPY_BYTES = 256 * MiB
_PASSES = 5


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


def copy_rates(device: torch.device, size_bytes: int = COPY_BYTES) -> dict[str, float]:
    """Bytes per second between host memory and a device: page-locked as staging buffers are, on streams as in a step.

    ``to_device`` and ``to_host`` are of one direction alone, ``both`` is of the two at once, both counted.
    """
    regions = [HostRegion(size_bytes) for _ in range(2)]
    try:
        for region in regions:
            region.pin(device)
        down, up = (region.view(torch.uint8, 0, size_bytes) for region in regions)
        first, second = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        to_host, to_device = CopyQueue(device), CopyQueue(device)
        to_host.come_after()
        to_device.come_after()

        def copy(*, leaving: bool, coming: bool) -> None:
            if leaving:
                to_host.copy(down, first)
            if coming:
                to_device.copy(second, up)
            to_host.wait()
            to_device.wait()

        return {
            "to_device": size_bytes / _shortest(lambda: copy(leaving=False, coming=True)),
            "to_host": size_bytes / _shortest(lambda: copy(leaving=True, coming=False)),
            "both": 2 * size_bytes / _shortest(lambda: copy(leaving=True, coming=True)),
        }
    finally:
        for region in regions:
            region.unpin()


def _shortest(work: Callable[[], None]) -> float:
    """Seconds of the shortest of a few passes; the first also warms up."""
    seconds = []
    for _ in range(1 + _PASSES):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
