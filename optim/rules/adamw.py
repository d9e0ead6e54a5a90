"""AdamW: decoupled weight decay, Loshchilov and Hutter, arXiv:1711.05101."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch

from nvme_offload.optim.rules.operators import change_by_moments
from nvme_offload.optim.rules.rule import SWITCHES, State, UpdateRule, rounded


class MomentScalars(NamedTuple):
    """The scalars of one step, each exactly an fp32 number, in the order of the kernel."""

    decay: float
    """AdamW: 1 - lr * weight_decay, by which the master is multiplied; Adam: weight_decay, its share in the gradient"""
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

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int, decay: float) -> Self:
        """Compute all but `decay` in fp64, and round each once."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        is_corrected = group.get("bias_correction", True)
        corrected = (lr / (1 - beta1**step), (1 - beta2**step) ** 0.5) if is_corrected else (lr, 1.0)
        return cls(*rounded(decay, 1 - beta1, beta2, 1 - beta2, *corrected, group["eps"]))


MOMENTS = (State("exp_avg"), State("exp_avg_sq"))


@dataclass(frozen=True)
class TwoMoments(UpdateRule):
    """A rule that keeps two moments: in fp32, or by ``state_dtype`` of a group in bf16, which is another optimizer."""

    states: tuple[State, ...] = MOMENTS

    numbers = ("lr", "eps", "weight_decay", "betas")
    shaping = ("state_dtype",)

    def of(self, group: Mapping[str, Any]) -> Self:
        """The rule of a parameter group, whose hyperparameters `check` has passed."""
        if group.get("state_dtype", "fp32") == "fp32":
            return type(self)()
        return type(self)(tuple(state._replace(dtype=torch.bfloat16) for state in MOMENTS))

    @property
    def widest_states(self) -> tuple[State, ...]:
        """Moments in fp32, which any group may have."""
        return MOMENTS

    def check(self, group: Mapping[str, Any], number: int) -> None:
        """Check the hyperparameters of a parameter group; see `UpdateRule.check`."""
        super().check(group, number)
        if (dtype := group.get("state_dtype", "fp32")) not in ("fp32", "bf16"):
            raise ValueError(f'parameter group {number}: state_dtype = {dtype!r}: must be "fp32" or "bf16"')


@dataclass(frozen=True)
class AdamW(TwoMoments):
    """Two moments with bias correction, and a weight decay beside them."""

    name = kernel = "AdamW"
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

    def scalars(self, group: Mapping[str, Any], step: int) -> MomentScalars:
        """Scalars that the kernel takes of a step, each exactly an fp32 number; ValueError if `step` is below 1."""
        if step < 1:
            raise ValueError(f"step is {step}; the first update is step 1")
        return MomentScalars.of(group, step, 1 - float(group["lr"]) * group["weight_decay"])

    def update(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor], scalars: Any) -> None:
        """Update a run of elements in place, with the bits of the kernel; see `UpdateRule.update`."""
        exp_avg, exp_avg_sq = states
        master.mul_(scalars.decay).sub_(change_by_moments(grad, exp_avg, exp_avg_sq, scalars))
