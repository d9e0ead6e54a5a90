"""Lion whose state lives on a tier: Chen et al., arXiv:2302.06675."""

from typing import Any

import torch.distributed as dist

from nvme_offload.offload.config.section import SectionLike
from nvme_offload.optim.optimizer import OffloadOptimizer, Params
from nvme_offload.optim.rules.lion import Lion


class OffloadLion(OffloadOptimizer):
    """Lion with its state on NVMe or in host memory, the same bits either way.

    It moves every weight by the learning rate, up or down, and keeps one state: 6 bytes per bf16 parameter. Its authors
    advise a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by as much. All else is as
    `OffloadAdamW` says.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer.
        lr: learning rate.
        betas: how much of the mean counts beside the gradient, and how much of it is kept; each in [0, 1).
        weight_decay: decoupled weight decay.
        maximize: ascend instead of descend.
        offload: the configuration section, as `OffloadConfig`, dict or path of a JSON or TOML file; or a folder on a
            drive: state that fits into memory stays there, the rest is in the folder.
        norm_group: ranks with other parameters whose gradients belong to the same global norm.
        torch_arguments: other arguments of torch's optimizers. ``fused`` and ``foreach`` change nothing; ``capturable``
            and ``differentiable`` must be false.
    """

    rule = Lion()

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        offload: SectionLike | None = None,
        norm_group: dist.ProcessGroup | None = None,
        **torch_arguments: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, offload, norm_group, torch_arguments)
