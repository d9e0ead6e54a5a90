"""Learning-rate schedules of the ``scheduler`` section, as ordinary torch schedulers with DeepSpeed's formulas.

Step 0 is the first step of the optimizer, as in torch.
"""

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.config.training import SchedulerConfig


def scheduler_of(config: OffloadConfig, optimizer: Optimizer) -> LambdaLR | None:
    """Return the schedule that the section asks for, beginning at step 0; None without a ``scheduler`` section.

    The warm-up leads to the group's own learning rate where the section gives none, or where it is not the optimizer's.
    """
    if config.scheduler is None:
        return None
    return LambdaLR(optimizer, [_rate_of(config.scheduler, optimizer, group) for group in optimizer.param_groups])


def take_on_groups(scheduler: LRScheduler | None, config: OffloadConfig, optimizer: Optimizer) -> None:
    """Have the section's schedule set the learning rates of groups added since; leave other schedulers alone."""
    if config.scheduler is None or not isinstance(scheduler, LambdaLR):
        return
    for group in optimizer.param_groups[len(scheduler.lr_lambdas) :]:
        rate = _rate_of(config.scheduler, optimizer, group)
        group["initial_lr"] = group["lr"]
        scheduler.lr_lambdas.append(rate)
        scheduler.base_lrs.append(group["lr"])
        group["lr"] *= rate(scheduler.last_epoch)


def _rate_of(section: SchedulerConfig, optimizer: Optimizer, group: dict[str, Any]) -> Callable[[int], float]:
    """Return the function of the step by which a schedule multiplies the learning rate of a group."""
    params = section.params
    num_warmup, kind, num_total = params.warmup_num_steps, params.warmup_type, params.total_num_steps
    if section.type == "WarmupCosineLR":
        assert num_total is not None  # the section was checked
        low, cosine = params.warmup_min_ratio, cosine_decay(num_warmup, num_total, params.cos_min_ratio)
        return lambda step: (
            low + (1.0 - low) * warmup_factor(step, num_warmup, kind) if step < num_warmup else cosine(step)
        )

    def factor(step: int) -> float:
        if step < num_warmup:
            return warmup_factor(step, num_warmup, kind)
        if section.type == "WarmupLR":
            return 1.0
        assert num_total is not None  # falls in a line from 1 at the end of the warm-up
        return max(0.0, (num_total - step) / max(1, num_total - num_warmup))

    low, high = params.warmup_min_lr, params.warmup_max_lr
    if high is None or group["lr"] != optimizer.defaults["lr"]:
        high = float(group["lr"])
    group["lr"] = 1.0  # LambdaLR multiplies this; so its functions give learning rates, which may be 0
    group.pop("initial_lr", None)
    return lambda step: low + (high - low) * factor(step)


def warmup_factor(step: int, num_steps: int, kind: str) -> float:
    """Return the part of the way to the full learning rate: 0 at step 0, at most 1 before step `num_steps`."""
    return step / num_steps if kind == "linear" else math.log(step + 1) / math.log(num_steps)


def cosine_decay(num_warmup: int, num_total: int, min_ratio: float) -> Callable[[int], float]:
    """Return a factor that falls along half a cosine after the warm-up, to `min_ratio` at step ``num_total - 1``."""

    def factor(step: int) -> float:
        progress = min(1.0, (step - num_warmup + 1) / max(1, num_total - num_warmup))
        return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
