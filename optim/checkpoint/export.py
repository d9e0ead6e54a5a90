"""Weights as safetensors files, in the layout of Hugging Face: gathered one parameter at a time, written by rank 0."""

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from nvme_offload.offload.errors import CheckpointError, CheckpointWriteError, HalfRenamedError, SwapIOError
from nvme_offload.offload.weights.writer import named_tensors, weight_items, write_sharded
from ..ranks.collective import on_every_rank
from ..weights.published import Conversion
from ..weights.whole import Sources, checked_cast, dtypes_in_files, metas_of, planned
from . import files
from .contents import MODEL
from .peft_files import adapter_of, config_of, merged, names_of
from .storage import VerifiedReader, read_metadata


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
    sources = Sources.of(model, tensors, own, group)
    if merge:
        adapters = names_of(model, "export_safetensors(merge=...)", None if merge is True else merge)
        if not frozen:
            raise ValueError("engine.export_safetensors: frozen=False leaves out the base that merge=... merges into")
        sources = _merged(sources, None if merge is True else adapters)
    dtypes = dtypes_in_files(dtype, sources.own, sources.kinds)
    conversions = planned(sources.model, sources.kinds, dtypes, published=published)
    whole = sources.whole
    stored = _in_turn(conversions, lambda name: whole(name, dtypes[name]))
    return write_weights(folder, _kinds_in(conversions), stored, max_shard_bytes, group, writes)


def _merged(sources: Sources, adapters: Sequence[str] | None) -> Sources:
    """Return the weights of the base, into which adapters are merged as they are, before any cast."""
    base, parts, was = merged(sources.model, metas_of(sources.kinds), adapters)
    stored = _in_turn(parts, lambda name: sources.whole(name, sources.kinds[name][1]))
    own = {name: sources.own[source] for name, source in was.items() if source in sources.own}
    return Sources(base, _kinds_in(parts), own, lambda name, dtype: checked_cast(name, stored(name), dtype))


def _kinds_in(conversions: Iterable[Conversion]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: kind for conversion in conversions for name, kind in conversion.made.items()}


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
    sources = Sources.of(model, tensors, own, group)
    dtypes = dtypes_in_files(dtype, own, sources.kinds)
    metas = metas_of({name: (shape, dtypes[name]) for name, (shape, _) in sources.kinds.items()})
    for name in names:
        conversions = on_every_rank(partial(adapter_of, model, name, metas), group)
        stored = _in_turn(conversions, lambda name: sources.whole(name, dtypes[name]))
        config = config_of(model, name)
        place = folder if name == "default" else folder / name
        written += write_weights(place, _kinds_in(conversions), stored, 1, group, writes, config)
    return written


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
            metas_of(kinds).items(),
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
