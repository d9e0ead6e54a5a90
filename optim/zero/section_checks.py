"""Some of the section depends on the ranks, which nobody knows before `initialize`."""

from __future__ import annotations

from nvme_offload.offload.config.section import OffloadConfig


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
