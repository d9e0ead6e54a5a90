"""The plainest twin of the native SGD kernels, in the order of torch's for-loop (``torch/optim/sgd.py``)."""

from __future__ import annotations

from typing import Any

from nvme_offload.optim.rules.reference import Fp32


def reference(grad: Fp32, master: Fp32, *rest: Any) -> tuple[Fp32, ...]:
    """Master, and the buffer where there is one, after one step; see `optim.rules.reference.step_reference`."""
    *buffers, s = rest
    if s.weight_decay != 0:
        grad = grad + s.weight_decay * master
    if not buffers:
        return (master - s.lr * grad,)
    buffer = buffers[0] * s.kept + s.gain * grad
    direction = grad + s.momentum * buffer if s.nesterov else buffer
    return master - s.lr * direction, buffer
