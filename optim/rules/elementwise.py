"""Rules that update each element by itself: AdamW, Adam, Lion, Adagrad, and stochastic gradient descent."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch

from .rule import SWITCHES, State, UpdateRule, block_of, kept_as, rounded


def divided(values: torch.Tensor, number: float) -> torch.Tensor:
    """Divide values by a number. Given a Python number, or a tensor on the CPU, CUDA multiplies by the reciprocal."""
    return values / values.new_full((), number)


def rooted(values: torch.Tensor) -> torch.Tensor:
    """Return square roots, rounded once, by way of fp64: on CPUs torch's fp32 root is off by one in a fifth of cases.

    The root of an fp32 number is further from the middle between two of them than an fp64 root is from the truth, even
    if that is off by one: so rounding it gives the nearest fp32 number.
    """
    return values.double().sqrt_().float()


def decayed(grad: torch.Tensor, master: torch.Tensor, weight_decay: float) -> torch.Tensor:
    """Return the gradient with an L2 penalty; itself where there is none."""
    return grad + master * weight_decay if weight_decay else grad


def change_by_moments(
    grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scalars: Any
) -> torch.Tensor:
    """Take a gradient into both moments, in place, and return by how much it moves the master. All are fp32 [numel]."""
    share = scalars.beta1_complement
    if share < 0.5:
        exp_avg.add_((grad - exp_avg) * share)
    else:  # from the nearer end, as torch's lerp: a share of 1 is the gradient exactly
        exp_avg.copy_(grad + (grad - exp_avg) * (share - 1.0))
    exp_avg_sq.mul_(scalars.beta2).add_((grad * scalars.beta2_complement) * grad)
    denom = divided(rooted(exp_avg_sq), scalars.bias_correction2_sqrt).add_(scalars.eps)
    change: torch.Tensor = (exp_avg * scalars.step_size) / denom
    return change


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


@dataclass(frozen=True)
class OfStateDtype(UpdateRule):
    """A rule whose states a group's ``state_dtype`` keeps in fewer bits than 32, which is another optimizer."""

    states: tuple[State, ...] = ()
    state_dtype: str = "fp32"
    """That of the group: some parameters of one with "int8" have states in fp32."""

    shaping: ClassVar[tuple[str, ...]] = ("state_dtype",)
    state_dtypes: ClassVar[tuple[str, ...]] = ("fp32", "int8")
    """A group may say one of these."""

    def of(self, group: Mapping[str, Any]) -> Self:
        """The rule of a parameter group, whose hyperparameters `check` has passed."""
        dtype = group.get("state_dtype", "fp32")
        return replace(self, states=kept_as(self.widest_states, dtype), state_dtype=dtype)

    def of_param(self, shape: Sequence[int], order: Sequence[int]) -> Self:
        """The rule of one parameter of the group; see `UpdateRule.of_param`."""
        if self.state_dtype != "int8":
            return self
        return replace(self, states=kept_as(self.widest_states, "int8", block_of(shape, order)))

    def is_in(self, rule: UpdateRule) -> bool:
        """Whether this is the rule of a parameter of a group with that rule."""
        return self == rule or (isinstance(rule, type(self)) and replace(self, states=rule.states) == rule)

    @property
    def widest_states(self) -> tuple[State, ...]:
        """States in fp32, which any group may have."""
        return type(self)().states

    def check(self, group: Mapping[str, Any], number: int) -> None:
        """Check the hyperparameters of a parameter group; see `UpdateRule.check`."""
        super().check(group, number)
        if (dtype := group.get("state_dtype", "fp32")) not in self.state_dtypes:
            allowed = " or ".join(f'"{each}"' for each in self.state_dtypes)
            raise ValueError(f"parameter group {number}: state_dtype = {dtype!r}: {self.name} takes {allowed}")


MOMENTS = (State("exp_avg"), State("exp_avg_sq", is_signed=False))


@dataclass(frozen=True)
class TwoMoments(OfStateDtype):
    """A rule that keeps two moments."""

    states: tuple[State, ...] = MOMENTS

    numbers = ("lr", "eps", "weight_decay", "betas")
    state_dtypes = ("fp32", "bf16", "int8")


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
class Lion(OfStateDtype):
    """The sign of a mean of gradients, and a weight decay beside it."""

    states: tuple[State, ...] = (State("exp_avg"),)

    name = kernel = "Lion"
    numbers = ("lr", "weight_decay", "betas")

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

    def of(self, group: Mapping[str, Any]) -> Self:
        """The rule of a parameter group, whose hyperparameters `check` has passed."""
        return type(self)((State("sum", birth=float(group["initial_accumulator_value"])),))

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
class SGD(OfStateDtype):
    """The gradient itself, or a buffer that it is gathered in: a group without momentum has no state at all."""

    states: tuple[State, ...] = (State("momentum_buffer"),)
    kernel: str = "SGD with momentum"

    name = "SGD"
    numbers = ("lr", "momentum", "dampening", "weight_decay")
    refused = ("differentiable",)
    torch_keys = SWITCHES
    counts_steps = False
    shaping = ("momentum", "state_dtype")

    def of(self, group: Mapping[str, Any]) -> Self:
        """The rule of a parameter group, whose hyperparameters `check` has passed."""
        return super().of(group) if group["momentum"] else type(self)(states=(), kernel="SGD")

    def check(self, group: Mapping[str, Any], number: int) -> None:
        """Check the hyperparameters of a parameter group; see `UpdateRule.check`."""
        super().check(group, number)
        if not group["momentum"] and (dtype := group.get("state_dtype", "fp32")) != "fp32":
            raise ValueError(f"parameter group {number}: state_dtype = {dtype!r}: without momentum there is no state")
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
        local = buffer.to_local() if hasattr(buffer, "to_local") else buffer
        return {"step": float(bool(torch.as_tensor(local, device="cpu").any())), **given}
