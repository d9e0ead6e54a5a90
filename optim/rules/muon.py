"""Muon: Keller Jordan et al., 2024: momentum, orthogonalized matrix by matrix. As `torch.optim.Muon` does it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .elementwise import MOMENTS, AdamW
from .rule import State, ThroughWhole, UpdateRule, number_of

RULES = ("Muon", "AdamW")
"""``rule`` of a parameter group may say one of these."""
BESIDE_MATRICES = {"rule": "AdamW", "eps": 1e-8}
"""Options of a parameter group of what Muon is not for."""
ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")


class MuonScalars(NamedTuple):
    """The hyperparameters of one step, as torch's operators take them."""

    lr: float
    decay: float
    """1 - lr * weight_decay, what the master is multiplied by"""
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None

    def step_size(self, shape: torch.Size) -> float:
        """Return the learning rate of a whole matrix of this shape."""
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return self.lr * (0.2 * math.sqrt(max(rows, columns)))
        ratio = rows / columns  # "original" never lowers the rate; torch has the unclamped form since 2.14
        return self.lr * math.sqrt(ratio if self.adjust_lr_fn == "spectral_unclamped" else max(1, ratio))


@dataclass(frozen=True)
class Muon(UpdateRule):
    """A momentum that is orthogonalized as a matrix. Parameter groups with ``rule = "AdamW"`` have AdamW instead."""

    name = "Muon"
    numbers = ("lr", "momentum", "weight_decay", "eps")
    states = (State("momentum_buffer"),)
    refused = ()
    counts_steps = False
    shaping = ("rule",)
    whole = True
    gathered_dtype = torch.bfloat16

    def of(self, group: Mapping[str, Any]) -> UpdateRule:
        """The rule of a parameter group, whose hyperparameters `check` has passed."""
        return AdamW() if group.get("rule") == "AdamW" else self

    @property
    def widest_states(self) -> tuple[State, ...]:
        """The states of AdamW, the most that any parameter group has."""
        return MOMENTS

    def check(self, group: Mapping[str, Any], number: int) -> None:
        """Check the hyperparameters of a parameter group; see `UpdateRule.check`."""
        where = f"parameter group {number}: "
        rule = group.get("rule", "Muon")
        if rule not in RULES:
            raise ValueError(f"{where}rule = {rule!r}: must be one of {', '.join(RULES)}")
        if rule == "AdamW":
            AdamW().check({"betas": (0.9, 0.999), **group}, number)
            return
        super().check(group, number)
        coefficients = group["ns_coefficients"]
        if len(coefficients) != 3 or any(math.isnan(number_of(each)) for each in coefficients):
            raise ValueError(f"{where}ns_coefficients = {coefficients!r}: must be three numbers")
        if not (isinstance(group["ns_steps"], int) and 0 <= group["ns_steps"] < 100):
            raise ValueError(f"{where}ns_steps = {group['ns_steps']!r}: must be a whole number below 100")
        if group["adjust_lr_fn"] not in ADJUSTMENTS:
            raise ValueError(f"{where}adjust_lr_fn = {group['adjust_lr_fn']!r}: must be one of {ADJUSTMENTS}")

    def check_param(self, param: torch.Tensor, name: str) -> None:
        """Raise ValueError for a parameter that is no matrix."""
        if param.ndim != 2:
            raise ValueError(
                f"{name} has shape {tuple(param.shape)}: Muon is for matrices; put it into a parameter group with "
                'rule = "AdamW"'
            )

    def scalars(self, group: Mapping[str, Any], step: int) -> tuple[Any, ...]:
        """Scalars that the update takes of a step: torch's operators round them to fp32."""
        lr = float(group["lr"])
        return MuonScalars(
            lr,
            1 - lr * group["weight_decay"],
            float(group["momentum"]),
            bool(group["nesterov"]),
            tuple(group["ns_coefficients"]),
            float(group["eps"]),
            group["ns_steps"],
            group["adjust_lr_fn"],
        )

    def update_whole(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        states: Sequence[torch.Tensor],
        scalars: Any,
        through_whole: ThroughWhole,
    ) -> None:
        """Update this rank's part of a matrix in place; see `UpdateRule.update_whole`."""
        [buffer] = states
        step_sizes: list[float] = []

        def orthogonal(whole: torch.Tensor) -> torch.Tensor:
            step_sizes.append(scalars.step_size(whole.shape))
            return newton_schulz(whole, scalars.ns_coefficients, scalars.ns_steps, scalars.eps)

        buffer.lerp_(grad, 1 - scalars.momentum)
        direction = grad.lerp(buffer, scalars.momentum) if scalars.nesterov else buffer
        change = through_whole(direction, orthogonal)
        master.mul_(scalars.decay)
        master.add_(change, alpha=-step_sizes[0])


def newton_schulz(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Bring all singular values of a bf16 matrix near 1, in the order of torch's Muon; it may be overwritten."""
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
