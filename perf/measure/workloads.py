"""A workload is a pass over a swap file, through the engine alone or through what is built on it.

Every target first writes its whole region (extents that were never written read at memory speed, without any I/O) and
verifies what it reads back. A pass then moves a known number of bytes and gives one `Sample`.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields
from typing import Self

import torch

from nvme_offload.aio_native import (
    EngineOptions,
    EngineStats,
    EngineUnavailable,
    Op,
    OpenedEngine,
    Operation,
    open_engine,
)
from nvme_offload.offload.errors import SwapIOError
from nvme_offload.offload.host.buffer_pool import BufferPool, StagingBuffer
from nvme_offload.offload.storage.swap_space import SwapSpace
from nvme_offload.offload.units import MiB
from nvme_offload.optim.optimizers.adamw import OffloadAdamW
from nvme_offload.optim.telemetry.stats import Span
from nvme_offload.perf.measure.command_line import Rw, Settings
from nvme_offload.perf.measure.sections import section

STEP_BUFFERS = 4
STEPS_PER_PASS = 2
"""A pass waits for its last writes. In training they go on behind the next forward, so that weighs less here, too."""
MIN_STEP_STAGING_BYTES, MAX_STEP_STAGING_BYTES = 4 * MiB, 512 * MiB
STATE_BYTES_PER_PARAMETER = 10  # bf16: 2 for the lower half of the master weight, 4 for each moment
VERIFIED_NUMEL = 1 << 20


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


class Gauge(AbstractContextManager["Gauge"]):
    """Counts processor time and requests of what happens inside."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def __enter__(self) -> Self:
        self._before = self._stats()
        self._cpu_seconds = time.process_time()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cpu_seconds = time.process_time() - self._cpu_seconds
        after = self._stats()
        self.counted = EngineStats(
            **{f.name: getattr(after, f.name) - getattr(self._before, f.name) for f in fields(after)}
        )

    def sample(self, rw: Rw, spans: Sequence[tuple[int, int]], size_bytes: int, seconds: float | None = None) -> Sample:
        """The figures of a pass whose transfers had these (submitted_ns, completed_ns)."""
        if seconds is None:
            seconds = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e9
        return Sample(
            rw=rw,
            size_bytes=size_bytes,
            seconds=seconds,
            cpu_seconds=self._cpu_seconds,
            requests=self.counted.requests,
            achieved_depth=self.counted.achieved_depth,
            request_clat_ns=self.counted.depth_ns / max(1, self.counted.requests),
            clat_ns=tuple(end - start for start, end in spans),
        )


@dataclass(eq=False)
class _Slot:
    """A staging buffer and what is under way in it."""

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
        with Gauge(self.engine.engine.stats) as gauge:
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
        spans = [(operation.submitted_ns, operation.completed_ns) for operation in operations]
        return gauge.sample(rw, spans, moved)

    def _take_part(self) -> tuple[int, int]:
        part = self._parts[self._next_part]
        self._next_part = (self._next_part + 1) % len(self._parts)
        return part

    def _start(self, op: Op, part: tuple[int, int], slot: _Slot) -> Operation:
        segments = self._extent.segments(slot.buffer.address, *part)
        operation = self.engine.engine.submit(op, segments)
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


class StepTarget(AbstractContextManager["StepTarget"]):
    """Optimizer steps over bf16 parameters whose state fills the region: bytes moved per second of a whole step."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        budget = max(MIN_STEP_STAGING_BYTES, min(MAX_STEP_STAGING_BYTES, settings.size // 8))
        paths = [str(path) for path in settings.paths]
        state = {"nvme_path": paths, "buffer_count": STEP_BUFFERS, "staging_budget": budget}
        aio = {"engine": settings.ioengine, "block_size": settings.bs, "queue_depth": settings.iodepth}
        aio |= {"rings": settings.numjobs, "direct": settings.direct}
        # The staging buffers decide how large subgroups are.
        self._section = section(settings.paths[0], state=state, sub_group_size=2**31, aio=aio)
        self._param = self._parameter(settings.size // STATE_BYTES_PER_PARAMETER)
        self.optimizer = OffloadAdamW([self._param], lr=1e-6, offload=self._section)
        tier = self.optimizer.store.tier
        assert tier is not None  # the section says nvme
        self.engine, self.direct, self._tier = tier.opened, tier.direct, tier

    def __exit__(self, *exception: object) -> None:
        self.optimizer.close()

    def prepare(self) -> None:
        """Take the first step, which writes all state, and one more; compare a small model with the host tier."""
        bits = []
        for offload in (self._section, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}):
            param = self._parameter(min(VERIFIED_NUMEL, self._param.numel()))
            with OffloadAdamW([param], lr=1e-3, offload=offload) as optimizer:
                for _ in range(3):
                    optimizer.step()
            bits.append(param.detach().view(torch.int16))
        if not torch.equal(*bits):
            raise RuntimeError("three steps on NVMe and in host memory gave different bits")
        for _ in range(2):
            self.optimizer.step()
        self.optimizer.synchronize()

    def run(self, rw: Rw, size_bytes: int) -> Sample:
        """Whole steps, of which each moves at most twice the region; the last one's writes are waited for.

        `rw` is ``mixed``: a step has no other. What the step before left in the staging buffers is not read again.
        """
        spans: set[Span] = set()  # what runs behind a step is in the next timeline, too
        start = time.monotonic_ns()
        with Gauge(self._tier.stats) as gauge:
            for _ in range(max(1, size_bytes // (2 * self._settings.size))):
                self.optimizer.step()
                spans.update(self.optimizer.timeline())
            self.optimizer.synchronize()
            seconds = (time.monotonic_ns() - start) / 1e9
        moved = gauge.counted.bytes_read + gauge.counted.bytes_written
        moving = [span for span in spans if span.kind in ("read", "write") and span.start_ns >= start]
        return gauge.sample(rw, [(span.start_ns, span.end_ns) for span in moving], moved, seconds)

    def _parameter(self, numel: int) -> torch.nn.Parameter:
        source = torch.Generator().manual_seed(0)
        noise = torch.randn(1 << 20, generator=source).bfloat16()
        values = noise.repeat(-(-numel // noise.numel()))[:numel]
        param = torch.nn.Parameter(values)
        param.grad = values * 1e-2
        return param


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
