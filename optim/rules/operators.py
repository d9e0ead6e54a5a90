"""Torch operators that round once, as the kernels do: what an update on a device is written in.

Every call here and in the rules' `update` is one IEEE fp32 operation on whole tensors, correctly rounded. Operators
that do two at once (`addcmul_`, `addcdiv_`, `lerp_`, `add` with ``alpha``) are compiled to fused multiply-adds on
devices and on some processors, and give other bits.
"""

from typing import Any

import torch


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
