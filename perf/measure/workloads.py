"""A workload is a pass over a swap file, through the engine alone.

Its whole region is written first (extents that were never written read at memory speed, without any I/O), read back and
verified. A pass then moves a known number of bytes and gives one `Sample`.
"""

import time
from collections import deque
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields

import torch

from nvme_offload.aio_native.engine import EngineOptions, EngineStats, EngineUnavailable, Op, Operation
from nvme_offload.aio_native.registry import OpenedEngine, open_engine
from nvme_offload.offload.errors import SwapIOError
from nvme_offload.offload.host.buffer_pool import BufferPool, StagingBuffer
from nvme_offload.offload.storage.swap_space import SwapSpace
from .command_line import Rw, Settings


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One pass: from the first submission to the last completion."""

    rw: str
    size_bytes: int  # bytes moved, read and written together
    seconds: float
    cpu_seconds: float  # processor time of the whole process, the engine's threads included
    requests: int
    achieved_depth: float  # mean number of requests in flight on each ring that had any
    request_clat_ns: float
    """Mean completion latency of a request, by Little's law: requests in flight over time / requests."""
    clat_ns: tuple[int, ...]  # completion latency of every transfer, time in our own queue included

    @property
    def bw_bytes(self) -> float:
        """Bytes per second of the whole pass."""
        return self.size_bytes / self.seconds

    @property
    def iops(self) -> float:
        """Requests per second of the whole pass."""
        return self.requests / self.seconds


@dataclass(eq=False)
class _Slot:
    buffer: StagingBuffer
    part: tuple[int, int] = (0, 0)  # the part of the extent that is moved: (start, size in bytes)
    operation: Operation | None = None
    op: Op = Op.READ


class RawTarget(AbstractContextManager["RawTarget"]):
    """Parts of an extent through an engine, as the optimizer's pipeline hands them in: a few transfers under way.

    ``mixed`` is the pattern of an optimizer step: a part is read into a buffer and written back from it, while reads
    run ahead and writes run behind, one to one from the first to the last request.
    """

    def __init__(self, settings: Settings) -> None:
        self._next_part = 0
        self._moves_data = settings.ioengine != "null"
        with ExitStack() as undo:
            self._space = SwapSpace(settings.paths, direct=settings.direct)
            undo.callback(self._space.close)
            self._extent = self._space.allocate(settings.size)
            self.direct = self._space.direct
            size, step = self._extent.size_bytes, settings.transfer_bytes
            self._parts = [(start, min(step, size - start)) for start in range(0, size, step)]
            options = EngineOptions(
                queue_depth=settings.iodepth,
                block_size=settings.bs,
                rings=settings.numjobs,
                alignment=self._space.alignment,
                max_operations=2 * settings.num_buffers,
            )
            self._pool = BufferPool(settings.num_buffers, step)
            undo.callback(self._pool.close)
            self.engine = open_bench_engine(settings.ioengine, options)
            undo.callback(self.engine.engine.close)
            self._slots = [_Slot(self._pool.acquire()) for _ in range(settings.num_buffers)]
            for slot in self._slots:
                slot.buffer.view(torch.uint8, 0, step).zero_()  # makes the pages resident
            self.engine.engine.register(self._pool.regions, self._space.fds)
            self._undo = undo.pop_all()

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def prepare(self) -> None:
        """Write a different word at every place, and read all of it back."""
        slot = self._slots[0]
        for check in (False, True):
            for start, size_bytes in self._parts:
                words = slot.buffer.view(torch.int64, 0, size_bytes // 8)
                expected = _pattern(start, size_bytes)
                if not check:
                    words.copy_(expected)
                self._start(Op.READ if check else Op.WRITE, (start, size_bytes), slot)
                self._finish(slot)
                if check and self._moves_data and not torch.equal(words, expected):
                    raise RuntimeError(f"bytes {start} to {start + size_bytes} read back differ from those written")

    def run(self, rw: Rw, size_bytes: int) -> Sample:
        """Make one pass, which continues where the one before ended."""
        directions = {"read": [Op.READ], "write": [Op.WRITE], "mixed": [Op.WRITE, Op.READ]}[rw]
        free, filled = deque(self._slots), deque[_Slot]()
        if rw == "mixed":  # half of the buffers hold what the step before left there: the first writes
            filled.extend(free.popleft() for _ in range(len(self._slots) // 2))
            for slot in filled:
                self._start(Op.READ, self._take_part(), slot)
            for slot in filled:
                self._finish(slot)
        operations = []
        moved = turn = 0
        before, cpu_seconds = self.engine.engine.stats(), time.process_time()
        while moved < size_bytes or turn % len(directions):
            op = directions[turn % len(directions)]
            writes_back = rw == "mixed" and op is Op.WRITE
            slot = (filled if writes_back else free).popleft()
            self._finish(slot)
            operations.append(self._start(op, slot.part if writes_back else self._take_part(), slot))
            (filled if rw == "mixed" and op is Op.READ else free).append(slot)
            moved += slot.part[1]
            turn += 1
        for slot in self._slots:
            self._finish(slot)
        cpu_seconds, after = time.process_time() - cpu_seconds, self.engine.engine.stats()
        names = [field.name for field in fields(after)]
        counted = EngineStats(**{name: getattr(after, name) - getattr(before, name) for name in names})
        begun = min(each.submitted_ns for each in operations)
        ended = max(each.completed_ns for each in operations)
        return Sample(
            rw=rw,
            size_bytes=moved,
            seconds=(ended - begun) / 1e9,
            cpu_seconds=cpu_seconds,
            requests=counted.requests,
            achieved_depth=counted.achieved_depth,
            request_clat_ns=counted.depth_ns / max(1, counted.requests),
            clat_ns=tuple(each.completed_ns - each.submitted_ns for each in operations),
        )

    def _take_part(self) -> tuple[int, int]:
        part = self._parts[self._next_part]
        self._next_part = (self._next_part + 1) % len(self._parts)
        return part

    def _start(self, op: Op, part: tuple[int, int], slot: _Slot) -> Operation:
        operation = self.engine.engine.submit(op, self._extent.segments(slot.buffer.address, *part))
        assert operation is not None  # fewer slots than max_operations
        slot.part, slot.operation, slot.op = part, operation, op
        return operation

    def _finish(self, slot: _Slot) -> None:
        operation, slot.operation = slot.operation, None
        if operation is None:
            return
        operation.wait()
        if failure := operation.failure:
            raise SwapIOError(
                failure.errno,
                path=self._space.path_of(failure.fd),
                offset=failure.offset,
                size_bytes=failure.size_bytes,
                direction="read" if slot.op is Op.READ else "write",
            )


def open_bench_engine(name: str, options: EngineOptions) -> OpenedEngine:
    """Open an engine by name; ``null`` is the C++ ring with no-ops for requests where that was built."""
    if name != "null":
        return open_engine(name, options)
    from nvme_offload.aio_native.null import NullEngine
    from nvme_offload.aio_native.uring import UringEngine

    try:
        return OpenedEngine(UringEngine(options, no_io=True), "no byte moves: no-ops through the C++ ring")
    except EngineUnavailable as error:
        return OpenedEngine(NullEngine(options), f"no byte moves: the Python engines' own code ({error})")


def _pattern(start: int, size_bytes: int) -> torch.Tensor:
    return torch.arange(start // 8, (start + size_bytes) // 8) * 0x9E3779B97F4A7C1
