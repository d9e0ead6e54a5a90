"""The plainest twin of the native AdamW kernel, and the one place where its scalars come from.

Every line below is one IEEE fp32 operation on whole arrays, in the order of torch's for-loop AdamW
(``torch/optim/adam.py``, ``_single_tensor_adam``). The native kernel must give the same bits on every ISA. torch
itself does not: where the machine has them, its lerp and addcmul are compiled to fused multiply-adds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Fp32 = npt.NDArray[np.float32]
Bits16 = npt.NDArray[np.uint16]

_QUIET_NAN = np.float32(np.nan)  # 0x7fc00000


@dataclass(frozen=True, kw_only=True)
class AdamWScalars:
    """The scalars of one step, each exactly an fp32 number."""

    decay: float
    """1 - lr * weight_decay"""
    beta1_complement: float
    """1 - beta1"""
    beta2: float
    beta2_complement: float
    """1 - beta2"""
    step_size: float
    """lr / (1 - beta1**step)"""
    bias_correction2_sqrt: float
    """sqrt(1 - beta2**step)"""
    eps: float
    grad_scale: float
    """Multiplies the gradient: inv_scale * clip_coef, negative to maximize."""

    @classmethod
    def at_step(
        cls,
        *,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        grad_scale: float = 1.0,
        maximize: bool = False,
    ) -> AdamWScalars:
        """Compute in fp64, as torch does with Python numbers, and round each scalar to fp32 once.

        Args:
            step: number of this update; the first is 1.
            lr: learning rate.
            betas: decay of the two moments.
            eps: added to the denominator.
            weight_decay: decoupled weight decay.
            grad_scale: what the stored gradient must be multiplied by.
            maximize: ascend instead of descend.

        Raises:
            ValueError: if ``step`` is below 1.
        """
        if step < 1:
            raise ValueError(f"step is {step}; the first update is step 1")
        beta1, beta2 = betas
        return cls(
            decay=_to_fp32(1 - lr * weight_decay),
            beta1_complement=_to_fp32(1 - beta1),
            beta2=_to_fp32(beta2),
            beta2_complement=_to_fp32(1 - beta2),
            step_size=_to_fp32(lr / (1 - beta1**step)),
            bias_correction2_sqrt=_to_fp32((1 - beta2**step) ** 0.5),
            eps=_to_fp32(eps),
            grad_scale=_to_fp32(-grad_scale if maximize else grad_scale),
        )


def _to_fp32(value: float) -> float:
    return float(np.float32(value))


def _settle(values: Fp32) -> Fp32:
    # IEEE leaves a NaN's sign and payload to the order of operands; one NaN stands for all of them.
    return np.where(np.isnan(values), _QUIET_NAN, values)


def adamw_reference(
    master: Fp32, grad: Fp32, exp_avg: Fp32, exp_avg_sq: Fp32, scalars: AdamWScalars
) -> tuple[Fp32, Fp32, Fp32]:
    """One AdamW step.

    Args:
        master: fp32 [numel], master weights.
        grad: fp32 [numel]; a 16-bit gradient is upcast first, which is exact.
        exp_avg: fp32 [numel].
        exp_avg_sq: fp32 [numel].
        scalars: of this step.

    Returns:
        New arrays: master, exp_avg, exp_avg_sq.
    """
    weight = np.float32(scalars.beta1_complement)
    with np.errstate(all="ignore"):
        g = grad * np.float32(scalars.grad_scale)
        p = master * np.float32(scalars.decay)
        # torch.lerp starts at the nearer end, so that a weight of 1 gives the gradient exactly.
        if weight < np.float32(0.5):
            m = exp_avg + weight * (g - exp_avg)
        else:
            m = g + (weight - np.float32(1)) * (g - exp_avg)
        v = exp_avg_sq * np.float32(scalars.beta2)
        v = v + (np.float32(scalars.beta2_complement) * g) * g
        denom = np.sqrt(v) / np.float32(scalars.bias_correction2_sqrt) + np.float32(scalars.eps)
        p = p - (np.float32(scalars.step_size) * m) / denom
    return _settle(p), _settle(m), _settle(v)


def split_reference(master: Fp32) -> tuple[Bits16, Bits16]:
    """Split fp32 into the bits of the nearest bf16 (ties away from zero) and the 16 bits that lead back.

    A NaN becomes a quiet NaN with ``lo = 0``: rounding could turn it into zero or infinity.

    Returns:
        hi and lo, uint16, of the shape of ``master``.
    """
    bits = master.view(np.uint32)
    hi = (bits >> np.uint32(16)).astype(np.uint16)
    lo = (bits & np.uint32(0xFFFF)).astype(np.uint16)
    rounded = np.where(lo >= 0x8000, hi + np.uint16(1), hi)
    nan = np.isnan(master)
    return np.where(nan, hi | np.uint16(0x0040), rounded), np.where(nan, np.uint16(0), lo)


def join_reference(hi: Bits16, lo: Bits16) -> Fp32:
    """Undo `split_reference`, bit for bit."""
    upper = np.where(lo >= 0x8000, hi - np.uint16(1), hi).astype(np.uint32)
    return ((upper << np.uint32(16)) | lo).view(np.float32)
