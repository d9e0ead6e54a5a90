"""Whole weights, one at a time: gathered from their shards, in a dtype, under the names that are published."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import sharded_like
from nvme_offload.offload.weights.writer import weight_items, whole_of
from ..precision.parameter import DTYPES, SIXTEEN_BITS
from ..ranks.collective import is_alone, on_every_rank, take_first
from ..tiers.parts import parts_of, split_shard
from .published import Conversion, as_they_are, conversions_of

OWN = "own"
"""Every weight in the dtype in which the training keeps it for its forward."""

_plans: WeakKeyDictionary[nn.Module, tuple[Mapping[str, tuple[torch.Size, torch.dtype]], list[Conversion]]]
_plans = WeakKeyDictionary()
"""It has the tensors that files were last to be made of, and how, of models whose files have the model's shapes."""


@dataclass(frozen=True)
class Sources:
    """Files are made of these: the tensors of a model, or of its base with adapters merged into it."""

    model: nn.Module
    kinds: Mapping[str, tuple[torch.Size, torch.dtype]]
    """Shape and dtype of each as it is, by name."""
    own: Mapping[str, torch.dtype]
    """The forward's dtypes, by name."""
    whole: Callable[[str, torch.dtype], torch.Tensor]
    """It gives one in a dtype, each once; on every rank."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        tensors: Mapping[str, torch.Tensor],
        own: Mapping[str, torch.dtype],
        group: dist.ProcessGroup | None,
    ) -> "Sources":
        """Return these tensors of a model."""
        return cls(model, shapes_of(tensors), own, lambda name, dtype: _whole(name, tensors[name], dtype, group))


def planned(
    model: nn.Module,
    kinds: Mapping[str, tuple[torch.Size, torch.dtype]],
    dtypes: Mapping[str, torch.dtype],
    *,
    published: bool,
) -> list[Conversion]:
    """Return how to make the files of tensors in these dtypes, with the names that are `published` or the model's."""
    wanted = {name: (shape, dtypes[name]) for name, (shape, _) in kinds.items()}
    if not published:
        return as_they_are(metas_of(wanted))
    known, plan = _plans.get(model, ({}, []))
    if known != wanted:
        plan = conversions_of(model, metas_of(wanted))
        if all(each.revert is None for each in plan):  # else it has hold of the model
            _plans[model] = wanted, plan
    return plan


def metas_of(kinds: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
    """Return tensors of these shapes and dtypes on meta."""
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in kinds.items()}


def weights_of(
    model: nn.Module, dtype: str, own: Mapping[str, torch.dtype], group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return name and whole value of each parameter and buffer, one at a time; see `export_safetensors`."""
    sources = Sources.of(model, dict(weight_items(model)), own, group)
    dtypes = dtypes_in_files(dtype, own, sources.kinds)

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for conversion in planned(model, sources.kinds, dtypes, published=True):
            with torch.no_grad():
                made = conversion.values(lambda name: sources.whole(name, dtypes[name]))
            while made:
                yield (name := next(iter(made))), made.pop(name)

    return values()


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of each tensor; of a parameter that was unfrozen fp32, which its master is."""
    found = ((name, tensor, parts_of(tensor)) for name, tensor in tensors.items())
    return {
        name: (tensor.shape, torch.float32 if parts is not None and parts.is_in_state else tensor.dtype)
        for name, tensor, parts in found
    }


def dtypes_in_files(
    dtype: str, own: Mapping[str, torch.dtype], tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor in the files: no integer is cast, and no parameter that is kept as it came.

    Where a training in 16 bits keeps some modules in fp32, these are fp32 in files of 16 bits, too: so what is served
    computes what was trained. With ``own`` parameters are as the forward has them, buffers as they are.
    """
    if dtype not in (*DTYPES, OWN):
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join((*DTYPES, OWN))}")
    keeps_fp32 = dtype == OWN or (DTYPES[dtype] in SIXTEEN_BITS and not set(own.values()).isdisjoint(SIXTEEN_BITS))

    def in_file(name: str, kind: torch.dtype) -> torch.dtype:
        if not kind.is_floating_point or (name in own and kind is not torch.float32):  # a base may be codes
            return kind
        if keeps_fp32 and own.get(name) is torch.float32:
            return torch.float32
        return own.get(name, kind) if dtype == OWN else DTYPES[dtype]

    return {name: in_file(name, kind) for name, (_, kind) in tensors.items()}


def _whole(name: str, tensor: torch.Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return a tensor in the wanted dtype: of shards all, of what each rank has the first one's."""
    cast = on_every_rank(partial(_cast, name, tensor, dtype), group)
    if isinstance(cast, DTensor) or is_alone():
        return whole_of(cast)
    whole = cast.clone(memory_format=torch.contiguous_format)
    take_first(whole, group)
    return whole


def _cast(name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the wanted dtype, sharded as it is.

    In the dtype in which it is stored, a split shard gives what forward computes with; nothing else is read for it.
    """
    source, split = value.detach(), split_shard(value)
    if split is not None:
        assert isinstance(value, DTensor)
        parts = parts_of(value)
        assert parts is not None
        is_rounded = value.dtype is torch.float32 or parts.is_in_state  # in fp16 it may have overflowed
        if dtype is parts.stored.form.dtype and not (is_rounded and dtype is torch.float16):
            with parts.between_steps(), parts.held(change=False) as flat:
                return sharded_like(flat[: split.numel()].view(split.shape).clone(), value)
        source = sharded_like(parts.read(), value)
    return checked_cast(name, source, dtype)


def checked_cast(name: str, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in another dtype, if it is of floating point; ValueError if a finite weight became infinite."""
    if not source.is_floating_point():
        return source
    cast = source.to(dtype)
    if dtype is torch.float16 and _num_infinite(cast) != _num_infinite(source):
        raise ValueError(f"{name} has weights beyond 65504, which fp16 cannot hold; export it in bf16 or fp32")
    return cast


def _num_infinite(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.isinf().sum())
