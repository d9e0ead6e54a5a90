"""Adam: Kingma and Ba, arXiv:1412.6980, with an L2 penalty where there is weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from nvme_offload.optim.rules.adamw import AdamW, moment_scalars
from nvme_offload.optim.rules.operators import change_by_moments, decayed
from nvme_offload.optim.rules.rule import State, UpdateRule, rounded


class AdamScalars(NamedTuple):
    """The scalars of one step, each exactly an fp32 number, in the order of the kernel."""

    weight_decay: float
    beta1_complement: float
    """1 - beta1, the share of the gradient in the first moment"""
    beta2: float
    beta2_complement: float
    """1 - beta2, the share of the squared gradient in the second moment"""
    step_size: float
    """lr / (1 - beta1**step), the learning rate with the first moment's bias correction"""
    bias_correction2_sqrt: float
    """sqrt(1 - beta2**step), the second moment's bias correction"""
    eps: float


@dataclass(frozen=True)
class Adam(UpdateRule):
    """Two moments with bias correction, of a gradient that the weight decay was added to."""

    name = kernel = "Adam"
    numbers = ("lr", "eps", "weight_decay", "betas")
    states = (State("exp_avg"), State("exp_avg_sq"))
    refused = ("amsgrad", "capturable", "differentiable", "decoupled_weight_decay")
    torch_keys: ClassVar = {**AdamW.torch_keys, "decoupled_weight_decay": False}

    def scalars(self, group: Mapping[str, Any], step: int) -> AdamScalars:
        """Scalars that the kernel takes of a step, each exactly an fp32 number."""
        return AdamScalars(*rounded(group["weight_decay"], *moment_scalars(group, step)))

    def update(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor], scalars: Any) -> None:
        """Update a run of elements in place, with the bits of the kernel; see `UpdateRule.update`."""
        exp_avg, exp_avg_sq = states
        master.sub_(change_by_moments(decayed(grad, master, scalars.weight_decay), exp_avg, exp_avg_sq, scalars))
