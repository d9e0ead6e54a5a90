"""Weights as safetensors files, in the layout of Hugging Face: gathered one parameter at a time, written by rank 0."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import sharded_like
from nvme_offload.offload.errors import CheckpointWriteError, HalfRenamedError, SwapIOError
from nvme_offload.offload.weights.writer import weight_items, write_sharded
from nvme_offload.optim.precision.parameter import DTYPES
from nvme_offload.optim.ranks.collective import on_every_rank
from nvme_offload.optim.tiers.parts import parts_of, split_shard


def export_safetensors(
    model: nn.Module, folder: Path, dtype: str, max_shard_bytes: int, group: dist.ProcessGroup | None = None
) -> list[Path]:
    """Write the model's parameters and buffers; every rank must call it.

    Args:
        model: sharded or not.
        folder: on rank 0; made if it is missing. Weights exported there before are replaced, other files stay.
        dtype: ``fp32``, ``bf16`` or ``fp16``, of floating-point tensors; others keep theirs.
        max_shard_bytes: of one file; a larger tensor has a file of its own.
        group: the ranks that have the model; None: all.

    Returns:
        The files.

    Raises:
        ValueError: `dtype` or `max_shard_bytes` cannot be used, or a weight is too large for fp16; names it.
        CheckpointWriteError: the files could not be written; it says what is left: nothing, unless a rename failed at
            the very end.
    """

    def stored(name: str, value: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
        return on_every_rank(partial(_cast, name, value, wanted), group)

    return write_weights(folder, weight_items(model), stored, dtype, max_shard_bytes, group)


def write_weights(
    folder: Path,
    items: Sequence[tuple[str, torch.Tensor]],
    stored: Callable[[str, torch.Tensor, torch.dtype], torch.Tensor],
    dtype: str,
    max_shard_bytes: int,
    group: dist.ProcessGroup | None = None,
) -> list[Path]:
    """Write tensors; see `export_safetensors`, and `write_sharded` for `items` and `stored`."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes {max_shard_bytes}: must be positive")
    try:
        return write_sharded(
            folder, items, dtype=DTYPES[dtype], max_shard_bytes=max_shard_bytes, stored=stored, group=group
        )
    except SwapIOError:  # of a tier, and it says so itself
        raise
    except HalfRenamedError as error:
        left = "some of its shards are in place, perhaps over earlier ones, without the index that makes them readable"
        raise CheckpointWriteError(error.errno or errno.EIO, folder, error.strerror or "", left) from error
    except OSError as error:
        raise CheckpointWriteError(error.errno or errno.EIO, folder, error.strerror or "") from error


def _cast(name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the wanted dtype, sharded as it is.

    In the dtype in which it is stored, a split shard gives what forward computes with; nothing else is read for it.

    Raises:
        ValueError: a finite weight became infinite.
    """
    source, split = value.detach(), split_shard(value)
    if split is not None:
        assert isinstance(value, DTensor)
        parts = parts_of(value)
        if parts is not None and dtype is parts.stored.form.dtype is not torch.float16:  # which may have overflowed
            with parts.between_steps(), parts.held(change=False) as flat:
                return sharded_like(flat[: split.numel()].view(split.shape).clone(), value)
        source = sharded_like(split.plain(), value)
    return checked_cast(name, source, dtype)


def checked_cast(name: str, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in another dtype; one that is not of floating-point numbers as it is.

    Raises:
        ValueError: a finite weight became infinite.
    """
    if not source.is_floating_point():
        return source
    cast = source.to(dtype)
    if dtype is torch.float16 and _num_infinite(cast) != _num_infinite(source):
        raise ValueError(f"{name} has weights beyond 65504, which fp16 cannot hold; export it in bf16 or fp32")
    return cast


def _num_infinite(tensor: torch.Tensor) -> int:
    """Number of infinite elements in this rank's part of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.isinf().sum())
