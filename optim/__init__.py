"""Optimizers whose state lives on tiers, and the engine around them."""

from optim.adamw import OffloadAdamW
from optim.engine import OffloadEngine
from optim.full_values import (
    get_full_grad,
    get_full_optimizer_state,
    get_full_param,
    set_full_grad,
    set_full_optimizer_state,
    set_full_param,
)
from optim.initialization import initialize
from optim.split_params import split_parameters
from optim.stats import OptimizerStats, Span

__all__ = [
    "OffloadAdamW",
    "OffloadEngine",
    "OptimizerStats",
    "Span",
    "get_full_grad",
    "get_full_optimizer_state",
    "get_full_param",
    "initialize",
    "set_full_grad",
    "set_full_optimizer_state",
    "set_full_param",
    "split_parameters",
]
