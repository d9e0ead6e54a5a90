"""Say whether kernels of Triton's run on a device."""

from functools import cache
from types import ModuleType

import torch

from nvme_offload.offload.devices.device import may_run_triton
from nvme_offload.offload.warn import warn_user


@cache
def fused_kernels(device: torch.device) -> ModuleType | None:
    """Return `optim.fused.kernels` where Triton is installed and they run on this device, else None.

    It tries the first time, and waits for the device. A warning says why they do not run.
    """
    if not may_run_triton(device):
        return None
    try:
        from . import kernels

        kernels.tile_sq_sums(torch.ones(3, device=device)).cpu()
    except Exception as error:  # of a compiler for C that is missing, of Triton's, of the driver
        warn_user(f"Triton's kernels do not run on {device}, and torch's operators take their place, slower: {error}")
        return None
    return kernels
