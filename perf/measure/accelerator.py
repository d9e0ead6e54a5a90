"""The GPU that training would use here, and what it is."""

from typing import Any

import torch

from nvme_offload.offload.devices.device import current_of, default_device_type, is_device


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
