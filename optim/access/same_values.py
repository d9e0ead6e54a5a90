"""Tensors of which each rank has its own copy: are they the same, and how they become those of the first rank."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist

from nvme_offload.offload._torch_private import local_tensor
from nvme_offload.offload.devices.device import is_host
from ..kernels import KernelPool, OnAccelerator
from ..ranks.collective import gather, largest, take_first
from ..state.store import num_threads_of_rank


def differing(tensors: Mapping[str, torch.Tensor], groups: Iterable[dist.ProcessGroup]) -> list[str]:
    """Return the names of tensors whose bits are not the same on all ranks of these groups. Collective.

    Of names, shapes and dtypes ranks have the same. Of sharded tensors the shards are compared. It reads each tensor
    once, and ranks exchange two numbers for each.
    """
    others = [group for group in groups if dist.get_world_size(group) > 1]
    if not others:
        return []
    kernels = KernelPool(num_threads_of_rank())
    sums = [_checksum(_parts(tensor), kernels) for tensor in tensors.values()]
    bounds = largest([*sums, *(-each for each in sums)], *others)
    both = zip(tensors, bounds[: len(sums)], bounds[len(sums) :], strict=True)
    return [name for name, most, least in both if most != -least]


def first_difference(name: str, tensor: torch.Tensor, groups: Collection[dist.ProcessGroup]) -> str:
    """Say where a tensor that is `differing` first differs, and what it is there on two ranks. Collective."""
    kernels = KernelPool(num_threads_of_rank())
    for part in _parts(tensor):
        flat, start, stop = part.contiguous().view(-1), 0, part.numel()

        def on_ranks(first: int, last: int, flat: torch.Tensor = flat) -> dict[int, int]:
            return gather(_checksum([flat[first:last]], kernels), *groups)

        if len({*on_ranks(start, stop).values()}) == 1:
            continue
        while stop - start > 1:
            middle = (start + stop) // 2
            differs = len({*on_ranks(start, middle).values()}) > 1
            start, stop = (start, middle) if differs else (middle, stop)
        sums, values = on_ranks(start, stop), gather(flat[start].item(), *groups)
        (first, expected), *rest = sums.items()
        other = next(rank for rank, found in rest if found != expected)
        at = ", ".join(str(int(index)) for index in np.unravel_index(start, part.shape))
        return f"{name}[{at}] is {values[first]!r} on rank {first} and {values[other]!r} on rank {other}"
    return f"{name} is the same on all ranks"


@torch.no_grad()
def take_from_first(tensors: Iterable[torch.Tensor], groups: Collection[dist.ProcessGroup]) -> None:
    """Give all ranks of these groups, which are those of a mesh, the values of the first, in place. Collective.

    A tensor goes as its elements follow each other, however it lies in the memory of a rank.
    """
    for part in (part for tensor in tensors for part in _parts(tensor)):
        whole = part.contiguous()
        for group in groups:
            take_first(whole, group)
        if whole.data_ptr() != part.data_ptr():
            once = tuple(slice(1) if stride == 0 else slice(None) for stride in part.stride())  # an expanded one
            part[once].copy_(whole[once])


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the bytes of one on this rank: of a wrapper, as a quantized one, those within."""
    local = local_tensor(tensor.detach())
    if hasattr(local, "__tensor_flatten__"):
        for name in local.__tensor_flatten__()[0]:
            yield from _parts(getattr(local, name))
    else:
        yield local


def bits_of(tensor: torch.Tensor, kernels: KernelPool) -> int:
    """Return a number of 56 bits from the bits of what this rank has of a tensor."""
    return _checksum(_parts(tensor), kernels)


def _checksum(parts: Iterable[torch.Tensor], kernels: KernelPool) -> int:
    """Return a number of 56 bits from the bits of tensors, in the order of their elements."""
    digest = hashlib.sha256()
    for part in parts:
        flat = part.contiguous().view(-1)
        if is_host(flat.device):
            sums = kernels.tile_checksums(flat)
        else:
            words = flat if flat.element_size() > 1 else flat.view(torch.uint8).to(torch.int16)
            sums = OnAccelerator().tile_checksums(words).cpu()
        digest.update(sums.numpy().tobytes())
    return int.from_bytes(digest.digest()[:7])
