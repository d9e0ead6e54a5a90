"""Which memory is a model's own: parameters, buffers, what was gathered of them, and casts of autocast."""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from itertools import chain

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nvme_offload.offload._torch_private import gathered_params, local_tensor, storage_identity
from nvme_offload.offload.activations.choice import is_plain
from nvme_offload.offload.devices.device import is_host

_SAMPLE = 64


class ModelMemory:
    """The memory of a model's parameters and buffers, sharded or not, as it is at this moment."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: set[Hashable] = set()
        self._sharded: list[nn.Module] = []
        self._by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def look(self) -> None:
        """Note where parameters and buffers are. To be called before a forward, which changes that of gathered ones."""
        self._own = {identity for tensor in self._tensors() if (identity := _identity_of(tensor)) is not None}
        by_shape: defaultdict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
        for param in self._model.parameters():
            by_shape[_shape_of(param)].append(param)
        self._by_shape = dict(by_shape)
        self._sharded = [module for module in self._model.modules() if isinstance(module, FSDPModule)]

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is the model's own, or it is what autocast makes of a parameter."""
        identity = _identity_of(tensor)
        if identity in self._own or any(_identity_of(param) == identity for param in gathered_params(self._sharded)):
            return True
        return self._is_cast(tensor)

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (local_tensor(tensor) for tensor in chain(self._model.parameters(), self._model.buffers()))

    def _is_cast(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter in autocast's dtype. Those of a forward are cached until it ends.

        Inside of an operator autocast is off, so that only values tell a cast from what happens to have its shape. On a
        device the host would have to wait for them: what has the shape stays there.
        """
        shape, dtype = _shape_of(tensor), tensor.dtype
        if dtype is not torch.get_autocast_dtype(tensor.device.type) or not (candidates := self._by_shape.get(shape)):
            return False
        if not is_host(tensor.device):
            return any(param.dtype is not dtype for param in candidates)
        gathered = (param for param in gathered_params(self._sharded) if _shape_of(param) == shape)
        return any(_begin_alike(tensor, param) for param in chain(map(local_tensor, candidates), gathered))


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape but for the order of dimensions: a linear layer saves its weight transposed."""
    return tuple(sorted(tensor.shape))


def _identity_of(tensor: torch.Tensor) -> Hashable | None:
    """The identity of a tensor's memory; None for a wrapper that has none of its own."""
    if hasattr(tensor, "__tensor_flatten__") or tensor.is_meta:
        return None
    return storage_identity(tensor.untyped_storage())


def _begin_alike(cast: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether what comes first in memory is the same in the dtype of the cast, which keeps the strides."""
    if not is_plain(param) or param.dtype is cast.dtype or not param.dtype.is_floating_point:
        return False
    pair = cast, param.detach()
    first, own = (each.as_strided((min(each.numel(), _SAMPLE),), (1,), each.storage_offset()) for each in pair)
    return torch.equal(first, own.to(cast.dtype))
