"""The figures of an optimizer with its state on a tier, as loggers of training runs take them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from ..optimizer import OffloadOptimizer


def missing(package: str, error: ModuleNotFoundError) -> Any:
    """Return a base class for a package that is not installed: whoever makes an instance is told what it needs."""

    def refuse(cls: type, *arguments: Any, **more: Any) -> Any:
        raise ImportError(f"{cls.__name__} needs {package}: pip install {package.replace(',', '')}") from error

    return type("Missing", (), {"__new__": refuse})


FEW = ("steps", "iteration_seconds", "iteration_share_of_ideal", "bytes_read", "bytes_written")
"""Logs get these where nobody asks for all."""


def figures_of(optimizer: OffloadOptimizer, *, every: bool) -> dict[str, float]:
    """Return `FEW` of ``optimizer.stats().scalars``, or all, without what is not known yet: JSON has no NaN."""
    scalars = optimizer.stats().scalars()
    wanted = scalars if every else FEW
    return {f"offload/{name}": float(scalars[name]) for name in wanted if math.isfinite(scalars[name])}


def offloaded(optimizers: Iterable[Optimizer | None]) -> OffloadOptimizer | None:
    """Return the first optimizer with its state on a tier, even if accelerate or Lightning put another around it."""
    for optimizer in optimizers:
        while optimizer is not None and not isinstance(optimizer, OffloadOptimizer):
            inner = getattr(optimizer, "optimizer", None)
            optimizer = inner if isinstance(inner, Optimizer) else None
        if optimizer is not None:
            return optimizer
    return None
