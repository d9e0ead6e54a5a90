"""Stochastic gradient descent whose state, if it has any, lives on a tier."""

from typing import Any

import torch.distributed as dist

from nvme_offload.offload.config.section import SectionLike
from nvme_offload.optim.optimizer import OffloadOptimizer, Params
from nvme_offload.optim.rules.sgd import SGD


class OffloadSGD(OffloadOptimizer):
    """`torch.optim.SGD` with its state on NVMe or in host memory, the same bits either way.

    With momentum it has one state, 6 bytes per bf16 parameter; without, none: only the lower halves of bf16 parameters
    and the masters of fp16 parameters are on the tier. All else is as `OffloadAdamW` says.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer.
        lr: learning rate.
        momentum: how much of the buffer is kept. A group that is added with 0 has no buffer and never gets one.
        dampening: how much of the gradient does not enter the buffer, but for the first.
        weight_decay: factor of an L2 penalty, which is added to the gradient.
        nesterov: look ahead along the buffer. Needs a momentum and no dampening.
        maximize: ascend instead of descend.
        offload: the configuration section, as `OffloadConfig`, dict or path of a JSON or TOML file; or a folder on a
            drive: state that fits into memory stays there, the rest is in the folder.
        norm_group: ranks with other parameters whose gradients belong to the same global norm.
        torch_arguments: what else ``torch.optim.SGD`` takes. ``fused`` and ``foreach`` change nothing;
            ``differentiable`` must be false.
    """

    rule = SGD()

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        offload: SectionLike | None = None,
        norm_group: dist.ProcessGroup | None = None,
        **torch_arguments: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, offload, norm_group, torch_arguments)
