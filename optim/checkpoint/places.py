"""Where the values of checkpoint items are: in memory, or in a subgroup's state on a tier. One is visited at a time."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol

import torch

from nvme_offload.offload.shards.split_tensor import SplitTensor
from nvme_offload.offload.storage.tier import Memory
from nvme_offload.optim.layout.flat import flat_view
from nvme_offload.optim.layout.master import TILE_NUMEL
from nvme_offload.optim.layout.subgroup import Run
from nvme_offload.optim.state.body import StateBody
from nvme_offload.optim.state.entries import read_run, write_run
from nvme_offload.optim.state.slots import Residency, SlotRecord

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


class Reach(Protocol):
    """Says where what a checkpoint holds of an optimizer is reached: as it is now, or as a commit has it."""

    def section(self, slot: SlotRecord, run: Run, name: str) -> Place:
        """Of a piece of a run of a subgroup: ``master`` or a state."""

    def part(self, param: int, start: int, stop: int) -> Place | None:
        """Of elements of an fp32 parameter that is its own master; None: it is in its own memory."""


class InMemory:
    """The values of a dense tensor, read and written in its own memory."""

    start = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self._flat = flat_view(tensor)

    @property
    def size_bytes(self) -> int:
        """Of the values."""
        return self._flat.nbytes

    def read(self) -> torch.Tensor:
        """Give the tensor's own memory."""
        return self._flat

    def open(self) -> torch.Tensor:
        """Give the tensor's own memory, to be overwritten."""
        return self._flat

    def leave(self) -> None:
        """Do nothing: the values were written where they are."""


class Whole:
    """A tensor that has to be read and written as a whole: split shards without an optimizer, and odd strides."""

    start = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._values: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Of the values."""
        return self._tensor.numel() * self._tensor.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Give the values of the tensor, joined and contiguous."""
        plain = self._tensor.plain() if isinstance(self._tensor, SplitTensor) else self._tensor
        return plain.contiguous().view(-1)

    def open(self) -> torch.Tensor:
        """Give a copy of the values, which `leave` writes back."""
        self._values = self.read().clone()
        return self._values

    def leave(self) -> None:
        """Write the copy that `open` gave back to the tensor."""
        if self._values is not None:
            self._tensor.copy_(self._values.view(self._tensor.shape))
            self._values = None


def copied_aside(places: Sequence[InMemory | Whole], folder: Path) -> list[InMemory]:
    """The same values as they are now, in the pages of a file without a name: they take no memory for good.

    Args:
        places: to copy.
        folder: where the file is.

    Raises:
        OSError: there is no room for it.
    """
    starts = [0, *accumulate(-(-place.size_bytes // _ASIDE_ALIGNMENT) * _ASIDE_ALIGNMENT for place in places)]
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


class TierWindow:
    """The one subgroup whose state is being read or written.

    Args:
        body: the optimizer's state.
        order: the subgroups in the order in which they will be read.
    """

    def __init__(self, body: StateBody, order: Sequence[SlotRecord]) -> None:
        self.body = body
        self._order = order
        self._positions = {slot.subgroup.index: position for position, slot in enumerate(order)}
        self._changed: SlotRecord | None = None
        self._memory: Memory | None = None
        self._begun: set[int] = set()

    def read(self, slot: SlotRecord) -> Memory:
        """The state of a subgroup; reads of those that follow in the order are under way."""
        return self.body.pipeline.acquire(self._order, self._positions[slot.subgroup.index], for_change=False)

    def change(self, slot: SlotRecord) -> Memory:
        """The state of a subgroup, to be overwritten; the one before is written behind.

        Nothing is read on the first visit, for all of it is going to be overwritten.
        """
        if self._changed is slot and self._memory is not None:
            return self._memory
        self.release()
        load = slot.subgroup.index in self._begun
        self._memory = self.body.pipeline.acquire([slot], 0, load=load)
        self.body.pipeline.will_change(slot)
        self._changed = slot
        self._begun.add(slot.subgroup.index)
        return self._memory

    def section(self, slot: SlotRecord, run: Run, name: str) -> Place:
        """See `Reach`."""
        return OnTier(self, slot, run, name)

    def part(self, param: int, start: int, stop: int) -> Place | None:
        """See `Reach`: parameters are where they are."""
        return None

    def release(self) -> None:
        """End the change under way, so that the subgroup can be written."""
        if self._changed is not None:
            self.body.pipeline.release(self._changed)
            self._changed = self._memory = None


class OnTier:
    """One section (``master`` or a state) of a piece of a run.

    Args:
        window: to reach the state through.
        slot: the subgroup.
        run: part of one of its runs that begins at a multiple of `TILE_NUMEL`.
        name: of the section.
    """

    def __init__(self, window: TierWindow, slot: SlotRecord, run: Run, name: str) -> None:
        self._window = window
        self._slot = slot
        self._run = run
        self._name = name
        self._copy: torch.Tensor | None = None
        self.start = run.start

    def read(self) -> torch.Tensor:
        """Give the state where it lies, or the master joined."""
        body, slot = self._window.body, self._slot
        if slot.residency is not Residency.UNBORN:
            return read_run(body, slot, self._window.read(slot), self._run, self._name)
        for state in slot.subgroup.rule.states:
            if state.name == self._name:
                return torch.full((self._run.numel,), state.birth, device="cpu")
        return body.table[self._run.param].copy_of(self._run).float()

    def open(self) -> torch.Tensor:
        """Give the state where it lies, or a copy of what is not fp32 there."""
        memory = self._window.change(self._slot)
        values = read_run(self._window.body, self._slot, memory, self._run, self._name)
        dtype, _ = self._slot.subgroup.sections[self._name]
        if self._name == "master" or dtype is not torch.float32:
            self._copy = values
        return values

    def leave(self) -> None:
        """Write a copy back; a state in fp32 is where it belongs already."""
        if self._copy is not None:
            memory = self._window.change(self._slot)
            write_run(self._window.body, self._slot, memory, self._run, self._name, self._copy)
            self._copy = None


def pieces(run: Run) -> list[Run]:
    """Cut a run into pieces of at most `MAX_CHUNK_NUMEL` elements."""
    step = MAX_CHUNK_NUMEL // TILE_NUMEL * TILE_NUMEL
    return [
        Run(run.param, start, min(start + step, run.stop), run.at + start - run.start)
        for start in range(run.start, run.stop, step)
    ]


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
