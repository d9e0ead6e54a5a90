"""The plainest twin of the native Adam kernel, in the order of torch's for-loop Adam (``torch/optim/adam.py``)."""

from __future__ import annotations

from nvme_offload.optim.rules.adam import AdamScalars
from nvme_offload.optim.rules.adamw_reference import moments
from nvme_offload.optim.rules.reference import Fp32


def reference(grad: Fp32, master: Fp32, exp_avg: Fp32, exp_avg_sq: Fp32, s: AdamScalars) -> tuple[Fp32, Fp32, Fp32]:
    """Master, exp_avg and exp_avg_sq after one step; see `optim.rules.reference.step_reference`."""
    if s.weight_decay != 0:
        grad = grad + s.weight_decay * master
    exp_avg, exp_avg_sq, change = moments(grad, exp_avg, exp_avg_sq, s)
    return master - change, exp_avg, exp_avg_sq
