"""A tensor in pieces: what each is, where one ends and the next begins, which elements of the tensor it has."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from ..devices.device import HOST
from ..staging.slot import Slot
from ..units import MiB

MIN_PIECE_BYTES = 8 * MiB
"""A tensor is cut into as many pieces as there are buffers, so that copies overlap I/O, but not below this size:
smaller pieces cost more turns of the worker than they save waiting."""

MAX_PIECE_BYTES = 32 * MiB
"""Nothing overlaps the first copy of a swap_out and the last of a swap_in, so longer pieces only take longer."""


@dataclass(frozen=True)
class TensorSpec:
    """All of a tensor but its bytes."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Specify a tensor; its strides are not part of it."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.shape.numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(eq=False)
class Piece(Slot):
    """A run of a tensor's bytes that fits into one staging buffer. Its slot is as long as its extent."""

    start: int = 0
    """Position of the first byte in the tensor, in row-major order."""
    stop: int = 0


class StoredValue(NamedTuple):
    """A value that is complete on the file."""

    spec: TensorSpec
    pieces: list[Piece]


def piece_starts(size_bytes: int, num_buffers: int, buffer_bytes: int, alignment: int) -> range:
    """Return where the pieces of a tensor begin; the range's step is their size. `buffer_bytes` must be aligned."""
    even_share = -(-size_bytes // num_buffers // alignment) * alignment
    piece_bytes = min(max(even_share, MIN_PIECE_BYTES), MAX_PIECE_BYTES, buffer_bytes)
    return range(0, size_bytes, piece_bytes)


def spans(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Views that together hold elements start..stop (in row-major order) of a tensor with any strides.

    There are at most two per dimension and one more: the rest of the row in which the run begins, whole rows, the
    beginning of the row in which it ends. So a piece of a transposed tensor is copied without a copy of the whole.
    """
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    row_numel = tensor[0].numel()
    row, skipped = divmod(start, row_numel)
    if skipped:
        yield from spans(tensor[row], skipped, min(row_numel, skipped + stop - start))
        row += 1
    last_row, rest = divmod(stop, row_numel)
    if row < last_row:
        yield tensor[row:last_row]
    if rest and row <= last_row:
        yield from spans(tensor[last_row], 0, rest)


def checksum_of(data: torch.Tensor) -> torch.Tensor:
    """Return the CRC-32 of 1D `data`, int64 [1]: it finds every burst of up to 32 bits; zlib releases the GIL."""
    raw: Any = data.numpy()  # numpy's stubs do not say that it is a buffer
    return torch.tensor([zlib.crc32(raw)], device=HOST)
