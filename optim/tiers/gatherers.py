"""Whom a parameter belongs to: the optimizer that has its state, and the part of the model that gathers it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from nvme_offload.offload._torch_private import fsdp_params

if TYPE_CHECKING:
    from nvme_offload.optim.state.store import StateStore

# Not attributes of the parameters: those would be copied and pickled with them.
_stores: Any = WeakIdKeyDictionary()
_gatherers: Any = WeakIdKeyDictionary()


def remember_store(params: Iterable[torch.Tensor], store: StateStore) -> None:
    """Note that these parameters have their state in `store`. The latest counts."""
    for param in params:
        _stores[param] = weakref.ref(store)


def store_of(param: torch.Tensor) -> StateStore | None:
    """Where the state of a parameter is, if it is anywhere."""
    reference = _stores.get(param)
    return reference() if reference else None


def remember_gatherers(model: nn.Module) -> None:
    """Note which part of a model gathers which parameter; call it after ``fully_shard``."""
    for module in model.modules():
        for record in fsdp_params(module):
            _gatherers[record.sharded_param] = weakref.ref(module)


def drop_gathered(param: torch.Tensor) -> None:
    """Free what FSDP2 still holds gathered of a parameter and its neighbours: it has the old value."""
    reference = _gatherers.get(param)
    module = reference() if reference else None
    if isinstance(module, FSDPModule):
        module.reshard()
