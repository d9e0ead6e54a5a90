"""What a step hands to an updater: its tensors, cut into runs, and its scalars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from nvme_offload.offload.storage.tier import Memory
from nvme_offload.optim.whole_params import WholeParams


class StepScalars(NamedTuple):
    """What one update of a parameter takes besides tensors, each exactly an fp32 number."""

    of_rule: tuple[float, ...]
    grad_scale: float
    """What the gradient is multiplied by: unscaling and clipping in one factor, negative to maximize."""


class RunTensors(NamedTuple):
    """A run of elements of one parameter with all that its update needs, 1D [numel] each."""

    param: torch.Tensor
    grad: torch.Tensor
    master: torch.Tensor | None
    """uint16 beside bf16, fp32 beside fp16, None for an fp32 parameter."""
    states: Sequence[torch.Tensor]
    checksums: torch.Tensor | None
    """Checksums of the parameter as the last update left it, int64 per tile; None for an fp32 parameter."""
    scalars: StepScalars


class SubgroupStep(NamedTuple):
    """What one step does to a subgroup."""

    memory: Memory
    """The subgroup's state."""
    runs: Mapping[int, RunTensors]
    """Its runs that have a gradient, by index of the parameter."""
    whole: WholeParams
    """Parameters that their rule needs whole."""
