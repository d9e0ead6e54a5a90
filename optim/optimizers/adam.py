"""Adam whose state lives on a tier: an L2 penalty where there is weight decay, Kingma and Ba, arXiv:1412.6980."""

from typing import Any

import torch.distributed as dist

from nvme_offload.offload.config.section import SectionLike
from nvme_offload.optim.optimizer import OffloadOptimizer, Params
from nvme_offload.optim.rules.adam import Adam


class OffloadAdam(OffloadOptimizer):
    """`torch.optim.Adam` with its state on NVMe or in host memory, the same bits either way.

    Weight decay is an L2 penalty, added to the gradient; `OffloadAdamW` decays the weights themselves. All else is as
    `OffloadAdamW` says.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer.
        lr: learning rate.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: factor of the L2 penalty.
        maximize: ascend instead of descend.
        state_dtype: dtype of the moments, "fp32" or "bf16". "bf16" keeps 6 bytes per bf16 parameter, not 10, and makes
            it a different optimizer: see docs/precision.md.
        bias_correction: correct the moments for their start at zero; BERT's first Adam does not.
        offload: the configuration section, as `OffloadConfig`, dict or path of a JSON or TOML file; or a folder on a
            drive: state that fits into memory stays there, the rest is in the folder.
        norm_group: ranks with other parameters whose gradients belong to the same global norm.
        torch_arguments: what else ``torch.optim.Adam`` takes. ``fused`` and ``foreach`` change nothing; ``amsgrad``,
            ``capturable``, ``differentiable`` and ``decoupled_weight_decay`` must be false.
    """

    rule = Adam()

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
        bias_correction: bool = True,
        offload: SectionLike | None = None,
        norm_group: dist.ProcessGroup | None = None,
        **torch_arguments: Any,
    ) -> None:
        self.rule = self.rule.of({"state_dtype": state_dtype})
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        defaults |= {"state_dtype": state_dtype} if state_dtype != "fp32" else {}
        defaults |= {} if bias_correction else {"bias_correction": False}
        super().__init__(params, defaults, offload, norm_group, torch_arguments)
