"""Which part of a model gathers a parameter."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nvme_offload.offload._torch_private import fsdp_params

# Neither attributes of the parameters, which would be copied and pickled with them, nor weak references to them, with
# which `Module.to` cannot exchange a sharded parameter.
_gatherers: dict[int, weakref.ref[Any]] = {}


def remember_gatherers(model: nn.Module) -> None:
    """Note which part of a model gathers which parameter; call it after ``fully_shard``."""
    for gone in [key for key, known in _gatherers.items() if known() is None]:
        del _gatherers[gone]
    for module in model.modules():
        for record in fsdp_params(module):
            _gatherers[id(record.sharded_param)] = weakref.ref(module)


def drop_gathered(param: torch.Tensor) -> None:
    """Free what FSDP2 still holds gathered of a parameter and its neighbours: it has the old value."""
    known = _gatherers.get(id(param))
    module = known() if known else None
    gathers = module is not None and any(record.sharded_param is param for record in fsdp_params(module))
    if gathers and isinstance(module, FSDPModule):
        module.reshard()
