"""Weights as safetensors files, in the layout of Hugging Face: gathered one parameter at a time, written by rank 0."""

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import sharded_like
from nvme_offload.offload.errors import CheckpointError, CheckpointWriteError, HalfRenamedError, SwapIOError
from nvme_offload.offload.weights.writer import named_tensors, weight_items, whole_of, write_sharded
from nvme_offload.optim.checkpoint import files
from nvme_offload.optim.checkpoint.contents import MODEL
from nvme_offload.optim.checkpoint.peft_files import adapter_of, config_of, merged, names_of
from nvme_offload.optim.checkpoint.published import Conversion, as_they_are, conversions_of, kinds_of
from nvme_offload.optim.checkpoint.storage import VerifiedReader, read_metadata
from nvme_offload.optim.precision.parameter import DTYPES, SIXTEEN_BITS
from nvme_offload.optim.ranks.collective import is_alone, on_every_rank, take_first
from nvme_offload.optim.tiers.parts import parts_of, split_shard

OWN = "own"
"""Every weight in the dtype in which the training keeps it for its forward."""


def export_safetensors(
    model: nn.Module,
    folder: Path,
    dtype: str,
    max_shard_bytes: int,
    own: Mapping[str, torch.dtype],
    group: dist.ProcessGroup | None = None,
    writes: bool | None = None,
    frozen: bool = True,
    published: bool = True,
    merge: bool | str | Sequence[str] = False,
) -> list[Path]:
    """Write parameters and buffers; see `OffloadEngine.export_safetensors`. `own` has the forward's dtypes, by name.

    `writes`: whether this rank writes the files; by default rank 0 does.
    """
    is_left_out = {id(param) for param in model.parameters() if not (frozen or param.requires_grad)}
    tensors = {name: tensor for name, tensor in weight_items(model) if id(tensor) not in is_left_out}
    sources = _Sources.of(model, tensors, own, group)
    if merge:
        adapters = names_of(model, "export_safetensors(merge=...)", None if merge is True else merge)
        if not frozen:
            raise ValueError("engine.export_safetensors: frozen=False leaves out the base that merge=... merges into")
        sources = sources.merged(None if merge is True else adapters)
    dtypes = dtypes_in_files(dtype, sources.own, sources.kinds)
    conversions = _conversions_of(sources.model, sources.kinds, dtypes, published=published)
    whole = sources.whole
    stored = _in_turn(conversions, lambda name: whole(name, dtypes[name]))
    return write_weights(folder, _kinds_in(conversions), stored, max_shard_bytes, group, writes)


@dataclass(frozen=True)
class _Sources:
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
    ) -> "_Sources":
        """Return these tensors of a model."""
        return cls(model, _shapes_of(tensors), own, lambda name, dtype: _whole(name, tensors[name], dtype, group))

    def merged(self, adapters: Sequence[str] | None) -> "_Sources":
        """Return the weights of the base, into which adapters are merged as they are, before any cast."""
        base, parts, was = merged(self.model, _metas_of(self.kinds), adapters)
        stored = _in_turn(parts, lambda name: self.whole(name, self.kinds[name][1]))
        own = {name: self.own[source] for name, source in was.items() if source in self.own}
        return _Sources(base, _kinds_in(parts), own, lambda name, dtype: checked_cast(name, stored(name), dtype))


def _kinds_in(conversions: Iterable[Conversion]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: kind for conversion in conversions for name, kind in kinds_of(conversion.made).items()}


def _in_turn(conversions: Sequence[Conversion], whole: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Return what gives each tensor that is made, once; those of one conversion follow each other."""
    conversion_of = {name: conversion for conversion in conversions for name in conversion.made}
    made: dict[str, torch.Tensor] = {}

    def stored(name: str) -> torch.Tensor:
        if name not in made:
            made.update(conversion_of[name].values(whole))
        return made.pop(name)

    return stored


def save_adapter(
    model: nn.Module,
    folder: Path,
    adapters: str | Iterable[str] | None,
    dtype: str,
    own: Mapping[str, torch.dtype],
    group: dist.ProcessGroup | None = None,
    writes: bool | None = None,
) -> list[Path]:
    """Write adapters of PEFT; see `OffloadEngine.save_adapter`. The others as for `export_safetensors`."""
    names, written = names_of(model, "save_adapter", adapters), list[Path]()
    tensors, tied = named_tensors(model)
    tensors |= {name: tensors[first] for name, first in tied.items()}
    own = {**own, **{name: own[first] for name, first in tied.items() if first in own}}
    sources = _Sources.of(model, tensors, own, group)
    dtypes = dtypes_in_files(dtype, own, sources.kinds)
    metas = _metas_of({name: (shape, dtypes[name]) for name, (shape, _) in sources.kinds.items()})
    for name in names:
        conversions = on_every_rank(partial(adapter_of, model, name, metas), group)
        stored = _in_turn(conversions, lambda name: sources.whole(name, dtypes[name]))
        config = config_of(model, name)
        place = folder if name == "default" else folder / name
        written += write_weights(place, _kinds_in(conversions), stored, 1, group, writes, config)
    return written


def _conversions_of(
    model: nn.Module,
    kinds: Mapping[str, tuple[torch.Size, torch.dtype]],
    dtypes: Mapping[str, torch.dtype],
    *,
    published: bool,
) -> list[Conversion]:
    """Return how to make the files of tensors in these dtypes, with the names that are `published` or the model's."""
    metas = _metas_of({name: (shape, dtypes[name]) for name, (shape, _) in kinds.items()})
    return conversions_of(model, metas) if published else as_they_are(metas)


def _metas_of(kinds: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in kinds.items()}


def weights_of(
    model: nn.Module, dtype: str, own: Mapping[str, torch.dtype], group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return name and whole value of each parameter and buffer, one at a time; see `export_safetensors`."""
    sources = _Sources.of(model, dict(weight_items(model)), own, group)
    dtypes = dtypes_in_files(dtype, own, sources.kinds)

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for conversion in _conversions_of(model, sources.kinds, dtypes, published=True):
            with torch.no_grad():
                made = conversion.values(lambda name: sources.whole(name, dtypes[name]))
            while made:
                yield (name := next(iter(made))), made.pop(name)

    return values()


def _shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
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


def write_weights(
    folder: Path,
    kinds: Mapping[str, tuple[torch.Size, torch.dtype]],
    stored: Callable[[str], torch.Tensor],
    max_shard_bytes: int,
    group: dist.ProcessGroup | None = None,
    writes: bool | None = None,
    adapter_config: bytes | None = None,
) -> list[Path]:
    """Write tensors of these shapes and dtypes; `stored` gives each when it is its turn."""
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes {max_shard_bytes}: must be positive")
    try:
        return write_sharded(
            folder,
            _metas_of(kinds).items(),
            dtype=None,
            max_shard_bytes=max_shard_bytes,
            stored=lambda name, *_: stored(name),
            group=group,
            writes=writes,
            adapter_config=adapter_config,
        )
    except SwapIOError:  # of a tier, and it says so itself
        raise
    except HalfRenamedError as error:
        left = "some of its shards are in place, perhaps over earlier ones, without the index that makes them readable"
        if adapter_config is not None:
            left = "the adapter has no adapter_config.json there, and PEFT loads nothing without it"
        raise CheckpointWriteError(error.errno or errno.EIO, folder, error.strerror or "", left) from error
    except OSError as error:
        raise CheckpointWriteError(error.errno or errno.EIO, folder, error.strerror or "") from error


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


def read_weights(root: Path, tag: str | None = None) -> dict[str, torch.Tensor]:
    """Return parameters, in fp32, and buffers of a checkpoint, by name, in host memory.

    Args:
        root: the folder that it was saved into.
        tag: by default the latest.

    Raises:
        CheckpointError: there is no such checkpoint, or a file of it is missing or damaged.
    """
    folder = files.find(root, tag)
    if folder is None:
        raise CheckpointError(root, "holds no checkpoint")
    manifest = files.read_manifest(folder)
    for name, record in manifest.items():
        files.verify(folder / name, record, lambda size_bytes: None)
    metadata = read_metadata(folder, manifest)
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(f"{MODEL}.") and isinstance(entry, TensorStorageMetadata)
    }
    load(found, storage_reader=VerifiedReader(folder, metadata), no_dist=True)
    return {name.removeprefix(f"{MODEL}."): value for name, value in found.items()}
