"""Adagrad: Duchi, Hazan and Singer, JMLR 12 (2011)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nvme_offload.optim.rules.operators import decayed, rooted
from nvme_offload.optim.rules.rule import SWITCHES, State, UpdateRule, rounded


class AdagradScalars(NamedTuple):
    """The scalars of one step, each exactly an fp32 number, in the order of the kernel."""

    step_size: float
    """lr / (1 + (step - 1) * lr_decay), the learning rate of this step"""
    weight_decay: float
    eps: float


@dataclass(frozen=True)
class Adagrad(UpdateRule):
    """The gradient over the root of the sum of its squares; the sum begins at a value of the group's choice."""

    states: tuple[State, ...] = (State("sum"),)

    name = kernel = "Adagrad"
    numbers = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
    refused = ("differentiable",)
    torch_keys = SWITCHES
    shaping = ("initial_accumulator_value",)

    def of(self, group: Mapping[str, Any]) -> Adagrad:
        """The rule of a parameter group, whose hyperparameters `check` has passed."""
        return Adagrad((State("sum", birth=float(group["initial_accumulator_value"])),))

    def scalars(self, group: Mapping[str, Any], step: int) -> AdagradScalars:
        """Scalars that the kernel takes of a step, each exactly an fp32 number."""
        step_size = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return AdagradScalars(*rounded(step_size, group["weight_decay"], group["eps"]))

    def update(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor], scalars: Any) -> None:
        """Update a run of elements in place, with the bits of the kernel; see `UpdateRule.update`."""
        [total] = states
        grad = decayed(grad, master, scalars.weight_decay)
        total.add_(grad * grad)
        master.sub_((grad * scalars.step_size) / rooted(total).add_(scalars.eps))
