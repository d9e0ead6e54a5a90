"""What an optimizer tells about itself as a flat dict of numbers, as loggers of training runs take it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields

from torch.optim import Optimizer

from nvme_offload.optim.optimizer import OffloadOptimizer
from nvme_offload.optim.stats import OptimizerStats


def metrics_of(stats: OptimizerStats, prefix: str = "offload/") -> dict[str, float]:
    """The numbers of `OptimizerStats` by name, without those that are not known yet.

    Args:
        stats: of ``optimizer.stats()``.
        prefix: comes before each name.

    Returns:
        Counters since construction under their names; of the latest iteration ``iteration/seconds``,
        ``iteration/share_of_ideal``, ``iteration/ideal_seconds`` and the seconds of its parts, those of waiting as
        ``iteration/wait_seconds/drive`` and so on. Seconds and bytes, no other units.
    """
    named: dict[str, object] = {field.name: getattr(stats, field.name) for field in fields(stats)}
    if (iteration := stats.iteration) is not None:
        of_iteration = {field.name: getattr(iteration, field.name) for field in fields(iteration)}
        of_iteration |= {"ideal_seconds": iteration.ideal_seconds, "share_of_ideal": iteration.share_of_ideal}
        of_iteration |= {f"wait_seconds/{cause}": seconds for cause, seconds in iteration.wait_seconds.items()}
        named |= {f"iteration/{name}": value for name, value in of_iteration.items()}
    numbers = {name: float(value) for name, value in named.items() if isinstance(value, int | float)}
    return {prefix + name.replace(" ", "_"): value for name, value in numbers.items() if math.isfinite(value)}


def offloaded(optimizers: Iterable[Optimizer | None]) -> OffloadOptimizer | None:
    """The first optimizer with its state on a tier, also where accelerate or Lightning have put another around it."""
    for optimizer in optimizers:
        while optimizer is not None and not isinstance(optimizer, OffloadOptimizer):
            inner = getattr(optimizer, "optimizer", None)
            optimizer = inner if isinstance(inner, Optimizer) else None
        if optimizer is not None:
            return optimizer
    return None
