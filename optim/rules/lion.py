"""Lion: Chen et al., arXiv:2302.06675."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nvme_offload.optim.rules.rule import State, UpdateRule, rounded


class LionScalars(NamedTuple):
    """The scalars of one step, each exactly an fp32 number, in the order of the kernel."""

    decay: float
    """1 - lr * weight_decay, what the master is multiplied by"""
    lr: float
    beta1: float
    beta1_complement: float
    """1 - beta1, the share of the gradient in the mean whose sign is taken"""
    beta2: float
    beta2_complement: float
    """1 - beta2, the share of the gradient in the mean that is kept"""


@dataclass(frozen=True)
class Lion(UpdateRule):
    """The sign of a mean of gradients, and a weight decay beside it."""

    name = kernel = "Lion"
    numbers = ("lr", "weight_decay", "betas")
    states = (State("exp_avg"),)

    def scalars(self, group: Mapping[str, Any], step: int) -> LionScalars:
        """Scalars that the kernel takes of a step, each exactly an fp32 number."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return LionScalars(*rounded(1 - lr * group["weight_decay"], lr, beta1, 1 - beta1, beta2, 1 - beta2))

    def update(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor], scalars: Any) -> None:
        """Update a run of elements in place, with the bits of the kernel; see `UpdateRule.update`."""
        [exp_avg] = states
        mixed = exp_avg * scalars.beta1 + grad * scalars.beta1_complement
        exp_avg.mul_(scalars.beta2).add_(grad * scalars.beta2_complement)
        sign = (mixed > 0).float() - (mixed < 0).float()
        master.mul_(scalars.decay).sub_(sign.masked_fill_(mixed.isnan(), math.nan) * scalars.lr)
