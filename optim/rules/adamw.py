"""AdamW: decoupled weight decay, Loshchilov and Hutter, arXiv:1711.05101."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from nvme_offload.optim.rules.operators import change_by_moments
from nvme_offload.optim.rules.rule import SWITCHES, State, UpdateRule, rounded


class AdamWScalars(NamedTuple):
    """The scalars of one step, each exactly an fp32 number, in the order of the kernel."""

    decay: float
    """1 - lr * weight_decay, what the master is multiplied by"""
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
class AdamW(UpdateRule):
    """Two moments with bias correction, and a weight decay beside them."""

    name = kernel = "AdamW"
    numbers = ("lr", "eps", "weight_decay", "betas")
    states = (State("exp_avg"), State("exp_avg_sq"))
    refused = ("amsgrad", "capturable", "differentiable")
    torch_keys: ClassVar = {**SWITCHES, "amsgrad": False, "capturable": False, "decoupled_weight_decay": True}

    def check(self, group: Mapping[str, Any], number: int) -> None:
        """Check the hyperparameters of a parameter group; see `UpdateRule.check`."""
        super().check(group, number)
        if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
            raise ValueError(
                f"parameter group {number}: weight_decay = {group['weight_decay']!r} with decoupled_weight_decay = "
                "False: that is the L2 penalty of torch.optim.Adam, and AdamW decays otherwise; set "
                "decoupled_weight_decay to True there if you want that"
            )

    def scalars(self, group: Mapping[str, Any], step: int) -> AdamWScalars:
        """Scalars that the kernel takes of a step, each exactly an fp32 number; ValueError if `step` is below 1."""
        if step < 1:
            raise ValueError(f"step is {step}; the first update is step 1")
        decay = 1 - float(group["lr"]) * group["weight_decay"]
        return AdamWScalars(*rounded(decay, *moment_scalars(group, step)))

    def update(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor], scalars: Any) -> None:
        """Update a run of elements in place, with the bits of the kernel; see `UpdateRule.update`."""
        exp_avg, exp_avg_sq = states
        change = change_by_moments(grad, exp_avg, exp_avg_sq, scalars)
        master.mul_(scalars.decay).sub_(change)


def moment_scalars(group: Mapping[str, Any], step: int) -> list[float]:
    """Return the scalars of `AdamWScalars` that are about the moments, in their order, in fp64."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    return [1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**step), (1 - beta2**step) ** 0.5, group["eps"]]
