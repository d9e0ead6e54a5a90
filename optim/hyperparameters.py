"""Which hyperparameters AdamW can work with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch


def check_hyperparameters(group: Mapping[str, Any], number: int) -> None:
    """Check one parameter group.

    Raises:
        ValueError: names the group, the key, the value and what is allowed; also for options of ``torch.optim.AdamW``
            that this optimizer does not have.
    """
    where = f"parameter group {number}: "
    for key in ("lr", "eps", "weight_decay"):
        if not 0 <= _number(group[key]) < math.inf:
            raise ValueError(f"{where}{key} = {group[key]!r}: must be a finite number, 0 or more")
    betas = group["betas"]
    given = [_number(beta) for beta in betas] if isinstance(betas, Iterable) else []
    if len(given) != 2 or not all(0 <= beta < 1 for beta in given):
        raise ValueError(f"{where}betas = {betas!r}: must be two numbers, each 0 or more and below 1")
    for key in ("amsgrad", "capturable", "differentiable"):
        if group.get(key):
            raise ValueError(f"{where}{key} = {group[key]!r}: is not supported; leave it out")
    if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
        raise ValueError(
            f"{where}weight_decay = {group['weight_decay']!r} with decoupled_weight_decay = False: that is the L2 "
            "penalty of torch.optim.Adam, and AdamW decays otherwise; set decoupled_weight_decay to True there if you "
            "want that"
        )


def _number(value: Any) -> float:
    """A hyperparameter as torch takes it, a number or a tensor that holds one; NaN for anything else."""
    if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return float(value)
    return math.nan


def check_torch_arguments(arguments: Mapping[str, Any]) -> None:
    """Check arguments that ``torch.optim.AdamW`` has and this optimizer does not.

    ``fused`` and ``foreach`` choose among torch's implementations; there is one here, so either value will do.

    Raises:
        TypeError: it asks for what is not supported, or torch has no such argument either.
    """
    for name, value in arguments.items():
        if name not in ("fused", "foreach", "amsgrad", "capturable", "differentiable"):
            raise TypeError(f"OffloadAdamW has no argument {name!r}")
        if value and name not in ("fused", "foreach"):
            raise TypeError(f"OffloadAdamW: {name} = {value!r} is not supported; leave it out")
