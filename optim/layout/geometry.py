"""Cut sharded tensors into boxes that are contiguous runs of one rank's memory."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import local_tensor, shard_offsets
from .flat import Origin


class Box(NamedTuple):
    """Part of a tensor: `sizes` elements from `offsets` on, in every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """The box's first element in memory; the others follow it without gaps."""


class Chunk(NamedTuple):
    """A box of a sharded tensor that lies in one run of this rank's memory."""

    saved: ChunkStorageMetadata
    """The place of the chunk in the whole tensor."""
    start: int
    """The chunk's first element in this rank's part, in its order of memory."""
    order: tuple[int, ...]
    """Dimensions of the tensor from the slowest to the fastest in memory."""

    @property
    def numel(self) -> int:
        """Elements of the chunk."""
        return math.prod(self.saved.sizes)

    def view(self, flat: torch.Tensor, first: int) -> torch.Tensor:
        """View the chunk in its shape; `flat` is this rank's part, 1D in order of memory, from element `first` on."""
        sizes = [self.saved.sizes[dim] for dim in self.order]
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        begin = self.start - first
        return flat[begin : begin + self.numel].view(sizes).permute(back)


@dataclass(frozen=True)
class Part:
    """The part of a tensor that this rank has, and how it lies in memory. It is dense."""

    whole: torch.Size
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Return this rank's part: the local tensor of a DTensor, all of any other tensor."""
        local = local_tensor(tensor)
        offsets = shard_offsets(tensor) if isinstance(tensor, DTensor) else (0,) * tensor.ndim
        strides = local.stride()
        order = sorted(range(local.ndim), key=lambda dim: (-strides[dim], dim))
        return cls(torch.Size(tensor.shape), offsets, tuple(local.shape), tuple(order))

    @property
    def is_rows(self) -> bool:
        """Whether it is whole rows in row-major order, as FSDP2 cuts them: elements lie together as in the whole."""
        return [*self.order] == sorted(self.order) and self.shape[1:] == self.whole[1:]

    @property
    def first(self) -> int:
        """The number of its first element in the whole tensor, in row-major order; of a part without any 0."""
        inner = [math.prod(self.whole[dim + 1 :]) for dim in range(len(self.whole))]
        return sum(offset * stride for offset, stride in zip(self.offsets, inner, strict=True))

    def in_rows(self, at: torch.Tensor) -> torch.Tensor:
        """Return where elements, by their numbers in order of memory, are in the whole tensor in row-major order."""
        indices, rest = torch.full_like(at, self.first), at
        for dim in reversed(self.order):
            indices += rest % self.shape[dim] * math.prod(self.whole[dim + 1 :])
            rest = rest // self.shape[dim]
        return indices

    def origin(self, param: int) -> Origin:
        """Return the origin of this part of a parameter, which has this number."""
        sizes, strides, offset, stride = [1], [1], 0, 1
        for dim in reversed(self.order):
            offset += self.offsets[dim] * stride
            if sizes[0] * strides[0] == stride:
                sizes[0] *= self.shape[dim]
            else:
                sizes.insert(0, self.shape[dim])
                strides.insert(0, stride)
            stride *= self.whole[dim]
        return Origin(param, offset, tuple(sizes), tuple(strides))

    def chunks(self, start: int, stop: int) -> Iterator[Chunk]:
        """Yield the chunks that make up elements `start` to `stop` of this rank's memory."""
        for box in boxes([self.shape[dim] for dim in self.order], start, stop):
            offsets, sizes = list(self.offsets), [0] * len(self.order)
            for place, dim in enumerate(self.order):
                offsets[dim] += box.offsets[place]
                sizes[dim] = box.sizes[place]
            yield Chunk(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), box.start, self.order)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes, in order, that elements `start` to `stop` of a contiguous tensor consist of: few, and large.

    A run that begins and ends inside rows is the end of a row, whole rows, and the beginning of a row.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (stop - start,) * len(shape), start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row)
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    begin = row * math.prod(shape[1:])
    for box in boxes(shape[1:], start - begin, stop - begin):
        yield Box((row, *box.offsets), (1, *box.sizes), begin + box.start)
