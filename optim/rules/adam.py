"""Adam: Kingma and Ba, arXiv:1412.6980, with an L2 penalty where there is weight decay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from nvme_offload.optim.rules.adamw import AdamW, MomentScalars, TwoMoments
from nvme_offload.optim.rules.operators import change_by_moments, decayed


@dataclass(frozen=True)
class Adam(TwoMoments):
    """Two moments with bias correction, of a gradient that the weight decay was added to."""

    name = kernel = "Adam"
    refused = ("amsgrad", "capturable", "differentiable", "decoupled_weight_decay")
    torch_keys: ClassVar = {**AdamW.torch_keys, "decoupled_weight_decay": False}

    def scalars(self, group: Mapping[str, Any], step: int) -> MomentScalars:
        """Scalars that the kernel takes of a step, each exactly an fp32 number."""
        return MomentScalars.of(group, step, group["weight_decay"])

    def update(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor], scalars: Any) -> None:
        """Update a run of elements in place, with the bits of the kernel; see `UpdateRule.update`."""
        exp_avg, exp_avg_sq = states
        master.sub_(change_by_moments(decayed(grad, master, scalars.decay), exp_avg, exp_avg_sq, scalars))
