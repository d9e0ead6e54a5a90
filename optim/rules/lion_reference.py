"""The plainest twin of the native Lion kernel."""

from __future__ import annotations

import numpy as np

from nvme_offload.optim.rules.lion import LionScalars
from nvme_offload.optim.rules.reference import Fp32


def reference(grad: Fp32, master: Fp32, exp_avg: Fp32, s: LionScalars) -> tuple[Fp32, Fp32]:
    """Master and exp_avg after one step; see `optim.rules.reference.step_reference`."""
    direction: Fp32 = np.sign(exp_avg * s.beta1 + grad * s.beta1_complement)
    return master * s.decay - s.lr * direction, exp_avg * s.beta2 + grad * s.beta2_complement
