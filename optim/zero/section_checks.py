"""What the section may say and `initialize` refuses all the same: it knows the device and the ranks."""

from __future__ import annotations

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.devices.device import HOST
from nvme_offload.offload.errors import ConfigError


def check_supported(config: OffloadConfig, device_type: str) -> None:
    """Refuse what the section may say and this engine does not do.

    Raises:
        ConfigError: names the key and what to write instead.
    """
    device = config.zero_optimization.offload_param.device
    if device != "none" and device_type != HOST.type:
        what = f'the model is on {device_type}, where parameters stay; write "none", or move it to the CPU'
        raise ConfigError([f'zero_optimization.offload_param.device = "{device}": {what}'])


def completed_for(config: OffloadConfig, num_ranks: int) -> OffloadConfig:
    """The section with its gradient accumulation steps, which the tier plan counts uses with.

    Args:
        config: the whole section.
        num_ranks: data-parallel ones.

    Raises:
        ConfigError: it does not go with so many ranks; names the key and what to write instead.
    """
    steps = config.batch_sizes(num_ranks).gradient_accumulation_steps
    return config.model_copy(update={"gradient_accumulation_steps": steps})
