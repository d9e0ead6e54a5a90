"""As ``deepspeed.ops.adam``: optimizers of torch, whose hyperparameters `initialize` takes."""

from typing import Any

import torch
from torch.optim import Optimizer


def fused_adam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    **unused: Any,
) -> Optimizer:
    """Return torch's AdamW, or Adam, with DeepSpeed's arguments: `initialize` takes its hyperparameters.

    Raises:
        ValueError: `bias_correction` is off, or `amsgrad` on.
    """
    if amsgrad or not bias_correction:
        what = f"Adam: amsgrad = {amsgrad}, bias_correction = {bias_correction}: only False, True are here"
        raise ValueError(f"{what}; the section's optimizer takes bias_correction = false")
    kind = torch.optim.AdamW if unused.get("adamw_mode", adam_w_mode) else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
