"""Some of the section depends on the ranks, which nobody knows before `initialize`."""

from __future__ import annotations

from nvme_offload.offload.config.section import OffloadConfig


def completed_for(config: OffloadConfig, num_ranks: int) -> OffloadConfig:
    """Return the section with its gradient accumulation steps, which the tier plan counts uses with."""
    steps = config.batch_sizes(num_ranks).gradient_accumulation_steps
    return config.model_copy(update={"gradient_accumulation_steps": steps})
