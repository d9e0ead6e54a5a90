"""AdamW whose state lives on a tier: decoupled weight decay, Loshchilov and Hutter, arXiv:1711.05101."""

from typing import Any

import torch.distributed as dist

from nvme_offload.offload.config.section import SectionLike
from nvme_offload.optim.optimizer import OffloadOptimizer, Params
from nvme_offload.optim.rules.adamw import AdamW


class OffloadAdamW(OffloadOptimizer):
    """`torch.optim.AdamW` with its state on NVMe or in host memory, the same bits either way.

    Use it as any optimizer::

        with OffloadAdamW(model.parameters(), lr=3e-4, offload=section) as optimizer:
            for batch in batches:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    The gradient is used where it is: ``p.grad``, in whatever dtype it was accumulated, becomes fp32 in registers.
    Clipping by the global norm (``gradient_clipping`` of the section), torch's ``clip_grad_norm_``, ``GradScaler``,
    schedulers, parameter groups and ``state_dict`` work as with any torch optimizer. A step with a gradient that is
    not finite is skipped and counted.

    Master weights are fp32. bf16 parameters are their upper halves, fp16 ones are copies, fp32 ones are masters.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer. bf16, fp16 or fp32, strided,
            dense, on the CPU or a CUDA device.
        lr: learning rate.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        maximize: ascend instead of descend.
        state_dtype: dtype of the moments, "fp32" or "bf16". "bf16" keeps 6 bytes per bf16 parameter, not 10, and makes
            it a different optimizer: see docs/precision.md.
        bias_correction: correct the moments for their start at zero; BERT's first Adam does not.
        offload: the configuration section, as `OffloadConfig`, dict or path of a JSON or TOML file; or a folder on a
            drive: state that fits into memory stays there, the rest is in the folder.
        norm_group: ranks with other parameters whose gradients belong to the same global norm: the process group of a
            pipeline's stages. Ranks that share a sharded parameter need no group.
        torch_arguments: what else ``torch.optim.AdamW`` takes. ``fused`` and ``foreach`` change nothing; ``amsgrad``,
            ``capturable`` and ``differentiable`` must be false.

    Raises:
        ConfigError: the section is wrong.
        TypeError: an argument that this optimizer does not have.
        ValueError: a hyperparameter or a parameter cannot be used; names it.
        OutOfSpaceError: the paths cannot hold the state; names bytes needed and free, and leaves nothing behind.
        SwapIOError: a path cannot be used.
    """

    rule = AdamW()

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
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
