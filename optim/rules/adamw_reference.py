"""The plainest twin of the native AdamW kernel.

Every line below is one IEEE fp32 operation on whole arrays, in the order of torch's for-loop AdamW
(``torch/optim/adam.py``, ``_single_tensor_adam``). The native kernel must give the same bits on every ISA. torch
itself does not: where the machine has them, its lerp and addcmul are compiled to fused multiply-adds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nvme_offload.optim.rules.adamw import AdamWScalars
from nvme_offload.optim.rules.reference import Fp32


def reference(grad: Fp32, master: Fp32, exp_avg: Fp32, exp_avg_sq: Fp32, s: AdamWScalars) -> tuple[Fp32, Fp32, Fp32]:
    """Master, exp_avg and exp_avg_sq after one step; see `optim.rules.reference.step_reference`."""
    exp_avg, exp_avg_sq, change = moments(grad, exp_avg, exp_avg_sq, s)
    return master * s.decay - change, exp_avg, exp_avg_sq


def moments(grad: Fp32, exp_avg: Fp32, exp_avg_sq: Fp32, s: Any) -> tuple[Fp32, Fp32, Fp32]:
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
