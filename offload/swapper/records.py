"""The calls that are made for a name, and the record that has them done one after the other."""

from __future__ import annotations

import enum
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from nvme_offload.aio_native.engine import Op
from ..devices.device import HOST, CopyQueue, Event, copy_alone, is_device, queued
from ..errors import StateError
from ..staging.mover import Mover
from ..staging.slot import Residency
from ..storage.transfer import Transfer
from .pieces import MIN_PIECE_BYTES, Piece, StoredValue, TensorSpec, spans
from .tensor_transfer import TensorTransfer

logger = logging.getLogger(__name__)

Queues = Callable[[torch.device], CopyQueue]
"""Gives the queue of a device in which the copies of one thread run."""


class TensorResidency(enum.Enum):
    """Which copies exist. The name of a state says what is happening, its description what may be relied on."""

    ABSENT = "absent"
    """No copy is kept: the tensor in the caller's hands is the only one."""
    WRITING = "writing"
    """The caller's tensor is the truth and on its way to the file, which still holds the older value, if any."""
    STORED = "stored"
    """The file holds the only copy."""
    READING = "reading"
    """The file holds the truth, and a tensor is being filled from it."""
    PREFETCHED = "prefetched"
    """The file holds the truth, and host memory an equal copy."""


class Task(ABC):
    """One call: it waits for its turn, and then a worker moves its pieces.

    `tensor` is source or target, detached. On a device, the work that is queued on it now comes first.
    """

    op: ClassVar[Op]

    def __init__(self, record: TensorRecord, tensor: torch.Tensor, result: torch.Tensor | None = None) -> None:
        self.record = record
        self.spec = TensorSpec.of(tensor)
        self.tensor = tensor
        self.ready = queued(tensor.device) if is_device(tensor.device) else None
        self.transfer = TensorTransfer[Any](self.op, self.spec.size_bytes)
        self.result = result
        self.to_begin: deque[Piece] | None = None
        """Pieces that nobody has begun; None before `prepare`."""
        self.error: Exception | None = None
        """The first thing that went wrong; no piece is begun after it."""

    @property
    def exhausted(self) -> bool:
        """Whether no further piece is to be begun."""
        return self.error is not None or (self.to_begin is not None and not self.to_begin)

    def fail(self, error: Exception) -> None:
        """Begin no further piece. The first error is kept."""
        logger.debug("%s of tensor %r failed", self.op.name, self.record.name, exc_info=error)
        # Its frames name the tensor, which would live as long as someone keeps the error.
        self.error = self.error or error.with_traceback(None)

    @abstractmethod
    def prepare(self) -> None:
        """Find the pieces to begin; one without an extent takes no buffer."""

    @abstractmethod
    def move(self, piece: Piece, staging: Mover[Piece], queues: Queues) -> Iterator[Transfer[Any] | Event]:
        """Move a piece: each time it has to wait for I/O, or for a copy of a device, that comes out."""

    def note_end(self) -> Sequence[Piece]:
        """Make the record right; returns pieces that nobody needs any more."""
        return ()

    def tell(self) -> None:
        """Tell whoever waits how it ended."""
        if self.error is None:
            self.transfer.finish(self.result)
        else:
            self.transfer.fail(self.error)

    def _copied(self, piece: Piece, queues: Queues, *, into_buffer: bool) -> Iterator[Event]:
        """Copy between a piece of the tensor and its buffer. Same dtype on both sides: bits, never a cast."""
        assert piece.buffer is not None
        itemsize = self.tensor.dtype.itemsize
        first, last = piece.start // itemsize, piece.stop // itemsize
        staged = piece.buffer.view(self.tensor.dtype, 0, last - first)  # 1D [numel]
        pairs, position = [], 0
        for span in spans(self.tensor, first, last):
            part = staged[position : position + span.numel()].view(span.shape)
            pairs.append((part, span) if into_buffer else (span, part))
            position += span.numel()
        return self._copied_each(pairs, queues)

    def _copied_each(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], queues: Queues) -> Iterator[Event]:
        """Copy pairs of target and source: here and now, or by a device, which is waited for."""
        if self.ready is None:
            for target, source in pairs:
                if source.nbytes < MIN_PIECE_BYTES:
                    copy_alone(target, source)
                else:  # worth the wait for torch's threads
                    target.copy_(source)
            return
        queue = queues(self.tensor.device)
        queue.come_after(self.ready)
        copied = queue.copy_all(pairs)
        yield copied
        copied.synchronize()


class SwapOut(Task):
    """Copies a tensor to new extents: its pieces are what `cut` makes of its name and bytes.

    The tensor is let go when all of it is in buffers, and `on_copied` is called then.
    """

    op = Op.WRITE

    def __init__(
        self,
        record: TensorRecord,
        tensor: torch.Tensor,
        cut: Callable[[str, int], list[Piece]],
        after: Event | None = None,
        on_copied: Callable[[], object] | None = None,
        on_end: Callable[[Exception | None], object] | None = None,
    ) -> None:
        super().__init__(record, tensor)
        if on_end is not None:
            self.transfer.on_done(lambda: on_end(self.error))
        self._cut = cut
        self._after = after
        self._value = StoredValue(self.spec, [])
        self._on_copied = on_copied
        self._num_copied = 0

    def prepare(self) -> None:
        """Have the space of all pieces promised before a byte is written."""
        self._value = StoredValue(self.spec, self._cut(self.record.name, self.spec.size_bytes))
        self.to_begin = deque(self._value.pieces)
        if not self.to_begin:
            self._let_go()

    def _let_go(self) -> None:
        self.tensor = torch.empty(0, dtype=self.spec.dtype, device=HOST)
        if self._on_copied is not None:
            self._on_copied()

    def move(self, piece: Piece, staging: Mover[Piece], queues: Queues) -> Iterator[Transfer[Any] | Event]:
        """Copy a piece into its buffer and write it."""
        if self._after is not None:
            yield self._after
        yield from self._copied(piece, queues, into_buffer=True)
        self._num_copied += 1
        if self._num_copied == len(self._value.pieces):
            self._let_go()
        piece.become(Residency.DIRTY)
        staging.start_write(piece)
        assert piece.transfer is not None
        yield piece.transfer
        staging.settle(piece)

    def note_end(self) -> Sequence[Piece]:
        """Switch the name over to the new value; or keep the older one."""
        if self.error is not None:
            logger.error("swap_out of tensor %r failed: %s", self.record.name, self.error)
        return self.record.replace_by(self._value, self.error)


class SwapIn(Task):
    """Fills a tensor with the stored value, or with the copy that a prefetch brought.

    `prefetch` was called before, so that it is over when this begins. The caller has not seen the `result` of a
    `replaceable` one: a prefetched copy may be given in its place.
    """

    op = Op.READ

    def __init__(
        self,
        record: TensorRecord,
        tensor: torch.Tensor,
        result: torch.Tensor,
        prefetch: Prefetch | None = None,
        *,
        replaceable: bool = False,
    ) -> None:
        super().__init__(record, tensor, result)
        self._prefetch = prefetch
        self._replaceable = replaceable

    @property
    def copy(self) -> torch.Tensor | None:
        """Return what the prefetch brought, if it did."""
        return self._prefetch.tensor if self._prefetch is not None and self._prefetch.error is None else None

    def prepare(self) -> None:
        """Find the pieces of the stored value. A copy is given as it is, or copied in one piece."""
        if self.copy is None:
            assert self.record.stored is not None
            self.to_begin = deque(self.record.stored.pieces)
        elif self._replaceable:
            self.result, self.to_begin = self.copy, deque()
        else:
            self.to_begin = deque([Piece(0, f"the copy of tensor {self.record.name!r}", self.spec.size_bytes)])

    def move(self, piece: Piece, staging: Mover[Piece], queues: Queues) -> Iterator[Transfer[Any] | Event]:
        """Read a piece, verify what was read and copy it into the tensor."""
        if self.copy is not None:
            yield from self._copied_each([(self.tensor, self.copy)], queues)
            return
        staging.start_read(piece)
        assert piece.transfer is not None
        yield piece.transfer
        staging.settle(piece)
        yield from self._copied(piece, queues, into_buffer=False)


class Prefetch(SwapIn):
    """Brings the stored value to host memory, where a swap_in finds it."""

    def __init__(self, record: TensorRecord, tensor: torch.Tensor) -> None:
        super().__init__(record, tensor, tensor)

    def note_end(self) -> Sequence[Piece]:
        """Leave the copy with the record, unless there is none."""
        if self.error is not None:
            logger.warning("prefetch of tensor %r failed, swap_in reads it again: %s", self.record.name, self.error)
            if self.record.prefetch is self:
                self.record.forget_copy()
        return ()


class TensorRecord:
    """Everything about one name. Its tasks run one at a time, in the order in which they were called.

    Where the bytes are, the pieces say (`Slot.residency`). What happens to the whole is read off what is here.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stored: StoredValue | None = None
        """The value on the file; while an overwrite is under way, the older one."""
        self.prefetch: Prefetch | None = None
        """Has the copy that the next swap_in takes, or will have it."""
        self.tasks: deque[Task] = deque()
        """Calls that wait for their turn; the first one is under way, if any is."""
        self._under_way = False
        self._failure = ""

    @property
    def residency(self) -> TensorResidency:
        """Which copies exist."""
        if self.tasks:
            return TensorResidency.WRITING if self.tasks[0].op is Op.WRITE else TensorResidency.READING
        if self.prefetch is not None:
            return TensorResidency.PREFETCHED
        return TensorResidency.ABSENT if self.stored is None else TensorResidency.STORED

    @property
    def newest(self) -> TensorSpec | None:
        """Return the last value given, complete or not, which a swap_in called now would return; None: none was."""
        given = (task.spec for task in reversed(self.tasks) if task.op is Op.WRITE)
        return next(given, self.stored.spec if self.stored else None)

    @property
    def prefetch_bytes(self) -> int:
        """Bytes of host memory promised to prefetched copies of the tensor."""
        copies = {task for task in (*self.tasks, self.prefetch) if isinstance(task, Prefetch)}
        return sum(task.spec.size_bytes for task in copies)

    def require_value(self) -> TensorSpec:
        """Return what `newest` is, or raise StateError where nothing is stored, as the only swap_out failed."""
        spec = self.newest
        if spec is None:
            what = f"{self.residency.value}, because its swap_out failed: {self._failure}"
            raise StateError(f"tensor {self.name!r}", "stored", what)
        return spec

    def append(self, task: Task) -> None:
        """Have a task done after those that are waiting already."""
        # In this order: cut short anywhere, a copy is of the value that the next swap_in is to have.
        self.prefetch = None
        self.tasks.append(task)
        if isinstance(task, Prefetch):
            self.prefetch = task

    def begin_next(self) -> Task | None:
        """Return the first task, unless it has begun."""
        if self._under_way or not self.tasks:
            return None
        self._under_way = True
        return self.tasks[0]

    def end_first(self) -> tuple[Sequence[Piece], list[Task]]:
        """End the first task, and those that were promised what it lacks; returns unneeded pieces and ended tasks."""
        self._under_way = False
        ended = [self.tasks.popleft()]
        pieces = ended[0].note_end()
        error = ended[0].error if ended[0].op is Op.WRITE else None
        while error is not None and self.tasks and self.tasks[0].op is Op.READ:
            reader = self.tasks.popleft()  # it was promised bytes that do not exist
            reader.fail(error)
            reader.note_end()
            ended.append(reader)
        return pieces, ended

    def replace_by(self, value: StoredValue, error: Exception | None) -> Sequence[Piece]:
        """Hold a new value, unless an error kept it from the file; returns the pieces of the one that is not held."""
        self._failure = str(error or "")
        if error is None:
            replaced, self.stored = self.stored, value
            return replaced.pieces if replaced is not None else ()
        return value.pieces

    def forget_copy(self) -> None:
        """Let the prefetched copy go, or the one that is on its way."""
        self.prefetch = None

    def give_up(self) -> Sequence[Piece]:
        """Hold nothing; returns the pieces of the value."""
        value, self.stored, self.prefetch = self.stored, None, None
        return value.pieces if value is not None else ()
