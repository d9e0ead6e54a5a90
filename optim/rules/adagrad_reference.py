"""The plainest twin of the native Adagrad kernel, in the order of torch's for-loop (``torch/optim/adagrad.py``)."""

from __future__ import annotations

import numpy as np

from nvme_offload.optim.rules.adagrad import AdagradScalars
from nvme_offload.optim.rules.reference import Fp32


def reference(grad: Fp32, master: Fp32, total: Fp32, s: AdagradScalars) -> tuple[Fp32, Fp32]:
    """Master and sum after one step; see `optim.rules.reference.step_reference`."""
    if s.weight_decay != 0:
        grad = grad + s.weight_decay * master
    total = total + grad * grad
    root: Fp32 = np.sqrt(total)
    return master - (s.step_size * grad) / (root + s.eps), total
