"""Stochastic gradient descent, with momentum or without: as torch has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from nvme_offload.optim.rules.operators import decayed
from nvme_offload.optim.rules.rule import SWITCHES, State, UpdateRule, rounded


class SGDScalars(NamedTuple):
    """The scalars of one step without momentum, each exactly an fp32 number, in the order of the kernel."""

    lr: float
    weight_decay: float


class SGDMomentumScalars(NamedTuple):
    """The scalars of one step with momentum, each exactly an fp32 number, in the order of the kernel."""

    lr: float
    weight_decay: float
    momentum: float
    kept: float
    """The momentum buffer is multiplied by this: momentum, but 0 in the first step."""
    gain: float
    """The gradient enters the buffer with this factor: 1 - dampening, but 1 in the first step."""
    nesterov: float
    """1 where the step looks ahead along the buffer (Nesterov), else 0"""


@dataclass(frozen=True)
class SGD(UpdateRule):
    """The gradient itself, or a buffer that it is gathered in: a group without momentum has no state at all."""

    states: tuple[State, ...] = (State("momentum_buffer"),)
    kernel: str = "SGD with momentum"

    name = "SGD"
    numbers = ("lr", "momentum", "dampening", "weight_decay")
    refused = ("differentiable",)
    torch_keys = SWITCHES
    counts_steps = False
    shaping = ("momentum",)

    def of(self, group: Mapping[str, Any]) -> SGD:
        """The rule of a parameter group, whose hyperparameters `check` has passed."""
        return SGD() if group["momentum"] else SGD(states=(), kernel="SGD")

    def check(self, group: Mapping[str, Any], number: int) -> None:
        """Check the hyperparameters of a parameter group; see `UpdateRule.check`."""
        super().check(group, number)
        if group["nesterov"] and not (group["momentum"] and group["dampening"] == 0):
            raise ValueError(
                f"parameter group {number}: nesterov = {group['nesterov']!r} with momentum = {group['momentum']!r} and "
                f"dampening = {group['dampening']!r}: it needs a momentum, and a dampening of 0"
            )

    def scalars(self, group: Mapping[str, Any], step: int) -> SGDScalars | SGDMomentumScalars:
        """Scalars that the kernel takes of a step, each exactly an fp32 number."""
        lr, weight_decay, momentum = float(group["lr"]), group["weight_decay"], group["momentum"]
        if not self.states:
            return SGDScalars(*rounded(lr, weight_decay))
        kept, gain = (0.0, 1.0) if step == 1 else (momentum, 1 - group["dampening"])
        return SGDMomentumScalars(*rounded(lr, weight_decay, momentum, kept, gain, bool(group["nesterov"])))

    def update(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor], scalars: Any) -> None:
        """Update a run of elements in place, with the bits of the kernel; see `UpdateRule.update`."""
        grad = decayed(grad, master, scalars.weight_decay)
        if states:
            [buffer] = states
            buffer.mul_(scalars.kept).add_(grad * scalars.gain)
            grad = grad + buffer * scalars.momentum if scalars.nesterov else buffer
        master.sub_(grad * scalars.lr)

    def adopted(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """State entries of one parameter as torch's SGD saved them: it counts no steps, a buffer says that there were.

        A buffer of None is one that torch has not made yet, and one of zeros what this class has in its place.
        """
        given = {name: value for name, value in entries.items() if value is not None}
        if "momentum_buffer" not in given:
            return given
        buffer = given["momentum_buffer"]
        local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
        return {"step": float(bool(torch.as_tensor(local, device="cpu").any())), **given}
