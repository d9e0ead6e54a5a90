"""Tensors between their own memory and the swap space, piece by piece through staging buffers."""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from nvme_offload.offload.devices.device import CopyQueue, Event, use
from nvme_offload.offload.errors import CorruptionError, OutOfSpaceError
from nvme_offload.offload.host.buffer_pool import StagingBuffer
from nvme_offload.offload.storage.tier import Tier
from nvme_offload.offload.swapper.records import Piece, Task
from nvme_offload.offload.units import MiB

logger = logging.getLogger(__name__)

KIND = "tensor"
"""Name under which the tier counts these bytes, see `Tier.bytes_of_kind`."""

MIN_PIECE_BYTES = 8 * MiB
"""A tensor is cut into as many pieces as there are buffers, so that copies overlap I/O, but not below this size:
smaller pieces cost more turns of the worker than they save waiting."""

MAX_PIECE_BYTES = 32 * MiB
"""Nothing overlaps the first copy of a swap_out and the last of a swap_in, so longer pieces only take longer."""


def piece_starts(size_bytes: int, num_buffers: int, buffer_bytes: int, alignment: int) -> range:
    """Where the pieces of a tensor begin; the step of the range is their size. `buffer_bytes` must be aligned."""
    even_share = -(-size_bytes // num_buffers // alignment) * alignment
    step = min(max(even_share, MIN_PIECE_BYTES), MAX_PIECE_BYTES, buffer_bytes)
    return range(0, size_bytes, step)


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


class Waitable(Protocol):
    """What a piece waits for before it goes on: I/O, or a copy of a device."""

    def done(self) -> bool:
        """Whether it waits no more."""

    def wait(self) -> object:
        """Wait for it, and raise what went wrong."""


class DeviceCopy:
    """A copy between a device and the host that is under way.

    Args:
        mark: behind it.
    """

    def __init__(self, mark: Event) -> None:
        self._mark = mark

    def done(self) -> bool:
        """Whether it is over."""
        return self._mark.query()

    def wait(self) -> None:
        """Wait until it is over."""
        self._mark.synchronize()


class CopyQueues:
    """A queue of copies for each device, in one direction. For one thread."""

    def __init__(self) -> None:
        self._queues: dict[torch.device, CopyQueue] = {}

    def of(self, device: torch.device) -> CopyQueue:
        """The queue of a device. The first one's is the device of this thread from then on."""
        if not self._queues:
            use(device)
        if device not in self._queues:
            self._queues[device] = CopyQueue(device)
        return self._queues[device]


class StagedCopy(ABC):
    """A tensor on its way. A worker calls ``prepare`` once, and ``move`` for each piece.

    Args:
        tier: where the pieces are stored.
        name: of the tensor, for messages.
        task: the tensor, and when it may be touched.
        num_pieces: in how many it goes, each through a staging buffer.
        on_done: called by the worker at the end, well or not, when no piece is in flight any more.
    """

    takes_buffers = True
    """Whether its pieces pass through staging buffers."""

    def __init__(
        self, tier: Tier, name: str, task: Task, num_pieces: int, on_done: Callable[[StagedCopy], None]
    ) -> None:
        assert task.tensor is not None
        self.tier = tier
        self.name = name
        self.num_pieces = num_pieces
        self.on_done = on_done
        self.prepared = False
        """Whether ``prepare`` was called."""
        self.num_started = 0
        self.num_in_flight = 0
        self.error: Exception | None = None
        """The first thing that went wrong; no piece is begun after it."""
        self.pieces: list[Piece] = []
        self._tensor = task.tensor
        self._ready = task.ready

    @property
    def exhausted(self) -> bool:
        """Whether no further piece is to be begun."""
        return self.error is not None or (self.prepared and self.num_started == self.num_pieces)

    def fail(self, error: Exception) -> None:
        """Begin no further piece. The first error is kept."""
        logger.debug("copy of tensor %r failed", self.name, exc_info=error)
        # Its frames name the tensor, which would live as long as someone keeps the error.
        self.error = self.error or error.with_traceback(None)

    def prepare(self) -> None:  # noqa: B027 - most have nothing to do there
        """Do what comes before the first piece: nothing."""

    @abstractmethod
    def move(self, index: int, buffer: StagingBuffer | None, queues: CopyQueues) -> Iterator[Waitable]:
        """Move a piece through `buffer`: each time it has to wait for something, that comes out."""

    def _copied(
        self, piece: Piece, buffer: StagingBuffer, queues: CopyQueues, *, into_buffer: bool
    ) -> Iterator[Waitable]:
        """Copy between a piece of the tensor and a buffer. Same dtype on both sides: bits, never a cast."""
        itemsize = self._tensor.dtype.itemsize
        numel = piece.size_bytes // itemsize
        staged = buffer.view(self._tensor.dtype, 0, numel)  # 1D [numel]
        first = piece.start // itemsize
        pairs, position = [], 0
        for span in spans(self._tensor, first, first + numel):
            part = staged[position : position + span.numel()].view(span.shape)
            pairs.append((part, span) if into_buffer else (span, part))
            position += span.numel()
        return self._copied_each(pairs, queues)

    def _copied_each(
        self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], queues: CopyQueues
    ) -> Iterator[Waitable]:
        """Copy pairs of target and source: here and now, or by a device, which is waited for."""
        if self._ready is None:
            for target, source in pairs:
                target.copy_(source)
            return
        queue = queues.of(self._tensor.device)
        queue.come_after(self._ready)
        yield DeviceCopy(queue.copy_all(pairs))

    def _what(self, piece: Piece) -> str:
        return f"tensor {self.name!r}, bytes {piece.start}..{piece.start + piece.size_bytes}"


class SwapOutCopy(StagedCopy):
    """Copies a tensor to new extents, which belong to the caller from `on_done` on."""

    def __init__(
        self,
        tier: Tier,
        name: str,
        task: Task,
        on_done: Callable[[StagedCopy], None],
        *,
        starts: range,
        checksums: bool,
    ) -> None:
        super().__init__(tier, name, task, len(starts), on_done)
        self._size_bytes = task.spec.size_bytes
        self._starts = starts
        self._checksums = checksums

    def prepare(self) -> None:
        """Have the space promised before a byte is written."""
        # An extent for each piece, not one for all: striped one by one, every piece keeps every drive busy, and
        # holes that smaller tensors left are used.
        try:
            sizes = [min(self._starts.step, self._size_bytes - start) for start in self._starts]
            extents = self.tier.reserve(sizes)
        except OutOfSpaceError as error:
            error.add_note(f"tensor {self.name!r} needs {self._size_bytes} bytes in all")
            raise
        self.pieces += map(Piece, self._starts, sizes, extents)

    def move(self, index: int, buffer: StagingBuffer | None, queues: CopyQueues) -> Iterator[Waitable]:
        """Copy a piece into `buffer` and write it."""
        assert buffer is not None
        piece = self.pieces[index]
        yield from self._copied(piece, buffer, queues, into_buffer=True)
        if self._checksums:
            self.pieces[index] = piece._replace(checksum=_checksum(buffer, piece.size_bytes))
        yield self.tier.write(
            piece.extent, buffer, what=self._what(piece), kind=KIND, size_bytes=piece.extent.size_bytes
        )


class SwapInCopy(StagedCopy):
    """Copies the extents of a stored tensor into a tensor."""

    def __init__(
        self, tier: Tier, name: str, task: Task, on_done: Callable[[StagedCopy], None], *, pieces: list[Piece]
    ) -> None:
        super().__init__(tier, name, task, len(pieces), on_done)
        self.pieces = pieces

    def move(self, index: int, buffer: StagingBuffer | None, queues: CopyQueues) -> Iterator[Waitable]:
        """Read a piece, verify what was read and copy it into the tensor."""
        assert buffer is not None
        piece = self.pieces[index]
        yield self.tier.read(piece.extent, buffer, what=self._what(piece), kind=KIND)
        self._verify(piece, buffer)
        yield from self._copied(piece, buffer, queues, into_buffer=False)

    def _verify(self, piece: Piece, buffer: StagingBuffer) -> None:
        if piece.checksum is None:
            return
        actual = _checksum(buffer, piece.size_bytes)
        if actual != piece.checksum:
            what = f"{self._what(piece)}: {self.tier.describe(piece.extent)}"
            raise CorruptionError(self.tier.path_of(piece.extent), what, piece.checksum, actual)


class HostCopy(StagedCopy):
    """Copies the prefetched copy in host memory into a tensor, in one piece and without I/O."""

    takes_buffers = False

    def __init__(
        self, tier: Tier, name: str, task: Task, on_done: Callable[[StagedCopy], None], *, source: torch.Tensor
    ) -> None:
        super().__init__(tier, name, task, 1, on_done)
        self._source = source

    def move(self, index: int, buffer: StagingBuffer | None, queues: CopyQueues) -> Iterator[Waitable]:
        """Make the whole copy."""
        return self._copied_each([(self._tensor, self._source)], queues)


def _checksum(buffer: StagingBuffer, size_bytes: int) -> int:
    # CRC-32 finds every error burst of up to 32 bits; zlib releases the GIL for it.
    data: Any = buffer.view(torch.uint8, 0, size_bytes).numpy()  # numpy's stubs do not say that it is a buffer
    return zlib.crc32(data)
