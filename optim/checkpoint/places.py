"""The values of checkpoint items are in memory, or in a subgroup's state on a tier. One is visited at a time."""

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol

import torch

from nvme_offload.offload.shards.split_tensor import SplitTensor
from nvme_offload.offload.units import round_up
from ..access.values import LiveValues, Values
from ..layout.subgroup import Run
from ..state.slots import SlotRecord

MAX_CHUNK_NUMEL = 16 * 2**20
"""64 MiB of fp32: more of it is never in memory at once, beside what the tiers have anyway."""
_ASIDE_ALIGNMENT = 64  # bytes: any dtype begins there


class Place(Protocol):
    """A run of values, 1D in order of memory."""

    start: int
    """First element of the parameter (of this rank's part of it) that it holds."""

    def read(self) -> torch.Tensor:
        """Give the values; they are valid until another place is visited."""

    def open(self) -> torch.Tensor:
        """Give the values, to be overwritten in whole or in part until `leave`."""

    def leave(self) -> None:
        """Keep what was written since `open`."""


class InMemory:
    """The values of a tensor, in its own memory if they lie there in one run; else it is read and written as a whole.

    That is so of odd strides, and of split shards without an optimizer.
    """

    start = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._opened: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the values."""
        return self._tensor.numel() * self._tensor.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Give the values where they lie, or a copy."""
        plain = self._tensor.plain() if isinstance(self._tensor, SplitTensor) else self._tensor
        return plain.contiguous().view(-1)

    def open(self) -> torch.Tensor:
        """Give them to be overwritten; `leave` writes a copy back."""
        self._opened = self.read()
        return self._opened

    def leave(self) -> None:
        """Write the copy that `open` gave back to the tensor."""
        if self._opened is not None and (isinstance(self._tensor, SplitTensor) or not self._tensor.is_contiguous()):
            self._tensor.copy_(self._opened.view(self._tensor.shape))
        self._opened = None


def copied_aside(places: Sequence[InMemory], folder: Path) -> list[InMemory]:
    """Copy values as they are now into pages of a file without a name, which take no memory; OSError on a full disk."""
    starts = [0, *accumulate(round_up(place.size_bytes, _ASIDE_ALIGNMENT) for place in places)]
    if starts[-1] == 0:
        return [InMemory(place.read().clone()) for place in places]
    with TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, starts[-1])  # a full disk is an error here, and a signal later
        mapped = mmap.mmap(file.fileno(), starts[-1])
    copies = []
    for place, start in zip(places, starts[:-1], strict=True):
        values = place.read()
        copy = torch.frombuffer(mapped, dtype=torch.uint8, count=starts[-1] - start, offset=start)[: values.nbytes]
        copies.append(InMemory(copy.view(values.dtype).copy_(values)))
    return copies


class Stored:
    """A piece of a run of ``master`` or a state, from a multiple of `TILE_NUMEL` on. That of a commit is only read."""

    def __init__(self, values: Values, slot: SlotRecord, run: Run, name: str) -> None:
        self._values = values
        self._at = slot, run, name
        self._opened: torch.Tensor | None = None
        self.start = run.start

    def read(self) -> torch.Tensor:
        """Give the state where it lies, or the master joined."""
        return self._values.read(*self._at)

    def open(self) -> torch.Tensor:
        """Give the state where it lies, or a copy of what is not fp32 there."""
        assert isinstance(self._values, LiveValues)
        self._opened = self._values.open(*self._at)
        return self._opened

    def leave(self) -> None:
        """Write what was opened to where it belongs."""
        assert isinstance(self._values, LiveValues)
        if self._opened is not None:
            self._values.write(*self._at, self._opened)
            self._opened = None


class Visitor:
    """Visits one place at a time."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._values: torch.Tensor | None = None

    def read(self, place: Place) -> torch.Tensor:
        """Give the values of a place; asked for again at once, the same."""
        if place is not self._place or self._values is None:
            self._place, self._values = place, None  # the place before is let go first
            self._values = place.read()
        return self._values

    def open(self, place: Place) -> torch.Tensor:
        """Give the values of a place, to be overwritten; the place before is left."""
        if place is not self._place or self._values is None:
            self.leave()
            self._values = place.open()
            self._place = place
        return self._values

    def leave(self) -> None:
        """Leave the place that was visited last, so that what was written to it stays."""
        if self._place is not None:
            self._place.leave()
        self._place = self._values = None
