"""Adagrad whose state lives on a tier: Duchi, Hazan and Singer, JMLR 12 (2011)."""

from typing import Any

import torch.distributed as dist

from nvme_offload.offload.config.section import SectionLike
from nvme_offload.optim.optimizer import OffloadOptimizer, Params
from nvme_offload.optim.rules.adagrad import Adagrad


class OffloadAdagrad(OffloadOptimizer):
    """`torch.optim.Adagrad` with its state on NVMe or in host memory, the same bits either way.

    One state, the sum of squared gradients: 6 bytes per bf16 parameter. All else is as `OffloadAdamW` says.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer. Their gradients must be dense.
        lr: learning rate.
        lr_decay: the learning rate is divided by 1 + (step - 1) * lr_decay.
        weight_decay: factor of an L2 penalty, which is added to the gradient.
        initial_accumulator_value: what ``sum`` begins with; a group keeps the value with which it was added.
        eps: added to the denominator.
        maximize: ascend instead of descend.
        offload: the configuration section, as `OffloadConfig`, dict or path of a JSON or TOML file; or a folder on a
            drive: state that fits into memory stays there, the rest is in the folder.
        norm_group: ranks with other parameters whose gradients belong to the same global norm.
        torch_arguments: what else ``torch.optim.Adagrad`` takes. ``fused`` and ``foreach`` change nothing;
            ``differentiable`` must be false.
    """

    rule = Adagrad()

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        offload: SectionLike | None = None,
        norm_group: dist.ProcessGroup | None = None,
        **torch_arguments: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, defaults, offload, norm_group, torch_arguments)
