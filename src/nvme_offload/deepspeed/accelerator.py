"""As ``deepspeed.accelerator``: the device that torch sees."""

from typing import Any

import torch
import torch.distributed as dist

from nvme_offload.deepspeed.refusal import refused_names
from nvme_offload.offload.devices.device import default_device_type


class Accelerator:
    """The device that torch sees, or the CPU; what is not here is torch's own, as of ``torch.cuda``."""

    def __init__(self) -> None:
        self.kind = default_device_type()

    def __getattr__(self, name: str) -> Any:
        device = torch.get_device_module(self.__dict__["kind"])
        return getattr(device, name, None) or getattr(torch, name)

    def device_name(self, index: int | None = None) -> str:
        """Return the name of a device, or of their type."""
        return self.kind if index is None or self.kind == "cpu" else f"{self.kind}:{index}"

    def current_device_name(self) -> str:
        """Return the name of this process's device."""
        return self.device_name(None if self.kind == "cpu" else torch.get_device_module(self.kind).current_device())

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's generators of all devices."""
        torch.manual_seed(seed)

    def communication_backend_name(self) -> str:
        """Return torch's backend for collectives between such devices."""
        return dist.get_default_backend_for_device(self.kind)

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bf16."""
        return bool(getattr(torch.get_device_module(self.kind), "is_bf16_supported", lambda: True)())

    def is_fp16_supported(self) -> bool:
        """Whether it computes in fp16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return what it computes in."""
        return [torch.float32, torch.bfloat16, torch.float16]


get_accelerator = Accelerator
__getattr__ = refused_names(__name__)
