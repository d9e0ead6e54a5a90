"""The plainest twins of the native kernels, in numpy: they say which bits a step has, on every instruction set.

Every line of a twin is one IEEE fp32 operation on whole arrays, in the order of torch's for-loop (for AdamW
``torch/optim/adam.py``, ``_single_tensor_adam``). torch itself has other bits: where the machine has them, its lerp and
addcmul are compiled to fused multiply-adds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nvme_offload import UpdateRule

Fp32 = npt.NDArray[np.float32]
Bits16 = npt.NDArray[np.uint16]
Twin = Callable[..., tuple[Fp32, ...]]
"""Takes the scaled gradient, the master, each state, and the scalars; returns master and states, new arrays."""

_ZERO = np.uint32(0)
_QUIET_NAN = np.float32(np.nan)  # 0x7fc00000


def adamw(grad, master, exp_avg, exp_avg_sq, s):
    exp_avg, exp_avg_sq, change = moments(grad, exp_avg, exp_avg_sq, s)
    return master * s.decay - change, exp_avg, exp_avg_sq


def adam(grad, master, exp_avg, exp_avg_sq, s):
    if s.decay != 0:
        grad = grad + s.decay * master
    exp_avg, exp_avg_sq, change = moments(grad, exp_avg, exp_avg_sq, s)
    return master - change, exp_avg, exp_avg_sq


def moments(grad, exp_avg, exp_avg_sq, s):
    """Both moments with the gradient in them, and by how much that moves the master; `s` names the scalars."""
    weight = s.beta1_complement
    # torch.lerp starts at the nearer end, so that a weight of 1 gives the gradient exactly.
    if weight < np.float32(0.5):
        m = exp_avg + weight * (grad - exp_avg)
    else:
        m = grad + (weight - np.float32(1)) * (grad - exp_avg)
    v = exp_avg_sq * s.beta2
    v = v + (s.beta2_complement * grad) * grad
    denom = np.sqrt(v) / s.bias_correction2_sqrt + s.eps
    return m, v, (s.step_size * m) / denom


def lion(grad, master, exp_avg, s):
    direction = np.sign(exp_avg * s.beta1 + grad * s.beta1_complement)
    return master * s.decay - s.lr * direction, exp_avg * s.beta2 + grad * s.beta2_complement


def sgd(grad, master, *rest):
    *buffers, s = rest
    if s.weight_decay != 0:
        grad = grad + s.weight_decay * master
    if not buffers:
        return (master - s.lr * grad,)
    buffer = buffers[0] * s.kept + s.gain * grad
    direction = grad + s.momentum * buffer if s.nesterov else buffer
    return master - s.lr * direction, buffer


def adagrad(grad, master, total, s):
    if s.weight_decay != 0:
        grad = grad + s.weight_decay * master
    total = total + grad * grad
    return master - (s.step_size * grad) / (np.sqrt(total) + s.eps), total


TWINS = {twin.__name__: twin for twin in (adamw, adam, lion, sgd, adagrad)}


def twin_of(name: str) -> Twin:
    """The twin of the rule called `name`."""
    return TWINS[name.lower()]


def step_reference(
    twin: Twin, master: Fp32, grad: Fp32, states: Sequence[Fp32], scalars: Any, grad_scale: float = 1.0
) -> list[Fp32]:
    """One step of a rule on whole arrays, fp32 [numel]; returns new ones: master, then the states.

    A 16-bit gradient is upcast first, which is exact; `grad_scale` is what it is multiplied by.
    """
    exact = type(scalars)(*(np.float32(value) for value in scalars))
    with np.errstate(all="ignore"):
        return [settle(values) for values in twin(grad * np.float32(grad_scale), master, *states, exact)]


def round_states(rule: UpdateRule, states: Sequence[Fp32], step: int, param: int = 0, first: int = 0) -> list[Fp32]:
    """States as they are kept: in bf16 rounded up where a hash of parameter, step and index passes what is cut off.

    In 8 bits they are the nearest two of some levels of a block's largest, one of them by that hash.
    """
    if not rule.dithers:
        return list(states)
    with np.errstate(over="ignore"):
        before = _hashed(_hashed(np.uint32(param)) + np.uint32(step % 2**24))
        between = _hashed(before + np.uint32(param))
        index = np.arange(first, first + states[0].size, dtype=np.uint32)
        within = index % np.uint32(rule.block or 1)
        words = _hashed(index - within ^ before, between) + within * np.uint32(0x9E3779B9)
    dithers = words & np.uint32(0xFFFF), words >> np.uint32(16)
    if rule.block:
        dithers = words >> np.uint32(13), words & np.uint32(0x7FFFF)
        signs = (state.is_signed for state in rule.states)
        each = zip(states, dithers, signs, strict=False)
        return [
            decode_reference(*encode_reference(values, dither, rule.block, is_signed=sign), is_signed=sign)
            for values, dither, sign in each
        ]
    bits = [settle(values).view(np.uint32) for values in states]
    return [
        np.where(np.isnan(values), bit, np.where(bit % 2**16 + dither >= 2**16, bit + 2**16, bit) >> 16 << 16)
        .astype(np.uint32)
        .view(np.float32)
        for values, bit, dither in zip(states, bits, dithers, strict=False)
    ]


def encode_reference(values: Fp32, dither: Any, block: int, *, is_signed: bool) -> tuple[Any, Any]:
    """Codes of docs/numerics.md, int8 or uint8 [numel], and exponents, uint8 [numel / block]; `dither` has 19 bits."""
    blocks, octaves = values.reshape(-1, block), 7 if is_signed else 15
    dither = np.broadcast_to(np.asarray(dither, np.uint32), values.shape).reshape(blocks.shape)
    with np.errstate(all="ignore"):
        top = np.abs(blocks).max(axis=1)
        is_nan, is_zero = ~(top < np.float32(2.0**126)), top < np.float32(2.0**-100)
        mantissa, exponent = np.frexp(np.where(is_nan | is_zero, np.float32(1), top))  # the mantissa is in [0.5, 1)
        exponent += mantissa > np.float32(31 / 32)
        shares = np.abs(blocks) * np.ldexp(np.float32(1), 1 - exponent)[:, None]
        bottom = np.float32(2.0 ** (1 - octaves))
        low = np.where(shares < bottom, bottom, np.float32(0))
        at = (shares + low).view(np.uint32) + dither >> np.uint32(19)
    levels = at.astype(np.int64) - (int(bottom.view(np.uint32)) >> 19) + np.where(low > 0, 0, 16)
    levels = np.where(np.signbit(blocks), levels - 128, levels) if is_signed else np.maximum(levels, 1)
    levels[is_nan | is_zero] = 0
    stored = np.where(is_nan, 255, np.where(is_zero, 0, exponent + 126))
    return levels.astype(np.int8 if is_signed else np.uint8).reshape(-1), stored.astype(np.uint8)


def decode_reference(codes: Any, exponents: Any, *, is_signed: bool) -> Fp32:
    """The values of codes, fp32 [numel], exactly."""
    levels, lowest = codes.astype(np.int64) & (127 if is_signed else 255), -6 if is_signed else -14
    octaves = np.maximum(levels // 16 - 1, 0)
    mantissas = np.where(levels < 16, levels, levels % 16 + 16)
    scales = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents.astype(np.int64) - 127))
    scales[exponents == 0] = 0
    values = np.ldexp(mantissas.astype(np.float64), octaves + lowest - 4).reshape(len(exponents), -1) * scales[:, None]
    magnitudes = values.reshape(-1).astype(np.float32)
    return np.where(codes < 0, -magnitudes, magnitudes) if is_signed else magnitudes


def _hashed(x, between=_ZERO):  # lowbias32
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15)) ^ between) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def settle(values: Fp32) -> Fp32:
    """IEEE leaves a NaN's sign and payload to the order of operands; one NaN stands for all of them."""
    return np.where(np.isnan(values), _QUIET_NAN, values)


def split_reference(master: Fp32) -> tuple[Bits16, Bits16]:
    """Split fp32 into the bits of the nearest bf16 (ties away from zero) and the 16 bits that lead back.

    A NaN becomes a quiet NaN with ``lo = 0``: rounding could turn it into zero or infinity.
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
