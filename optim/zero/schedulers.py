"""Learning-rate schedules of the ``scheduler`` section, as ordinary torch schedulers with DeepSpeed's formulas.

Step 0 is the first step of the optimizer, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from nvme_offload.offload.config.section import OffloadConfig


def scheduler_of(config: OffloadConfig, optimizer: Optimizer) -> LRScheduler | None:
    """The schedule that the section asks for, beginning at step 0; None without a ``scheduler`` section.

    Args:
        config: the whole section.
        optimizer: whose learning rates to set. Where the section gives no learning rate, each group's own is the one
            that the warm-up leads to.
    """
    if config.scheduler is None:
        return None
    params = config.scheduler.params
    num_warmup, kind, num_total = params.warmup_num_steps, params.warmup_type, params.total_num_steps

    def factor_with(after: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: warmup_factor(step, num_warmup, kind) if step < num_warmup else after(step)

    if config.scheduler.type == "WarmupCosineLR":
        assert num_total is not None  # the section was checked
        low = params.warmup_min_ratio
        cosine = cosine_decay(num_warmup, num_total, params.cos_min_ratio)
        return LambdaLR(
            optimizer,
            lambda step: (
                low + (1.0 - low) * warmup_factor(step, num_warmup, kind) if step < num_warmup else cosine(step)
            ),
        )
    factor = factor_with(lambda step: 1.0)
    if config.scheduler.type == "WarmupDecayLR":
        assert num_total is not None
        factor = factor_with(linear_decay(num_warmup, num_total))
    return _between(optimizer, params.warmup_min_lr, params.warmup_max_lr, factor)


def warmup_factor(step: int, num_steps: int, kind: str) -> float:
    """Part of the way from the first to the full learning rate: 0 at step 0, below 1 or 1 before `num_steps`.

    Args:
        step: steps taken.
        num_steps: length of the warm-up; 1 counts as 2.
        kind: ``linear``, or ``log`` for log(step + 1) / log(num_steps).
    """
    num_steps = max(2, num_steps)
    return step / num_steps if kind == "linear" else math.log(step + 1) / math.log(num_steps)


def linear_decay(num_warmup: int, num_total: int) -> Callable[[int], float]:
    """Factor that falls in a line from 1 at the end of the warm-up to 0 at step `num_total`."""
    return lambda step: max(0.0, (num_total - step) / max(1, num_total - num_warmup))


def cosine_decay(num_warmup: int, num_total: int, min_ratio: float) -> Callable[[int], float]:
    """Factor that falls along half a cosine after the warm-up, to `min_ratio` at step ``num_total - 1``, and stays."""

    def factor(step: int) -> float:
        progress = min(1.0, (step - num_warmup + 1) / max(1, num_total - num_warmup))
        return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def _between(optimizer: Optimizer, min_lr: float, max_lr: float | None, factor: Callable[[int], float]) -> LRScheduler:
    """min_lr + (max_lr - min_lr) x `factor` of the step, where `max_lr` None is each group's own learning rate."""
    highs = [float(group["lr"]) if max_lr is None else max_lr for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 1.0  # LambdaLR multiplies this; so its functions give learning rates, which may be 0
        group.pop("initial_lr", None)

    def towards(high: float) -> Callable[[int], float]:
        return lambda step: min_lr + (high - min_lr) * factor(step)

    return LambdaLR(optimizer, [towards(high) for high in highs])
