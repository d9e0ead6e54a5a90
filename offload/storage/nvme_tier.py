"""The NVMe tier: extents of the swap space behind an engine, with every failure turned into words."""

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nvme_offload.aio_native.engine import (
    Engine,
    EngineOptions,
    EngineStats,
    Failure,
    Op,
    Operation,
    Registration,
    Segment,
)
from nvme_offload.aio_native.faults import FaultSpec
from nvme_offload.aio_native.finalizing import finalize
from nvme_offload.aio_native.registry import OpenedEngine
from ..config.section import OffloadConfig
from ..errors import ClosedError, EngineLostError, ForkError, SwapIOError
from ..host.buffer_pool import BufferPool, StagingBuffer
from ..host.in_memory import memory_of
from .engine_in_use import EngineInUse
from .extent import Extent
from .file_ranges import PAGE, FileIdentity, RangeLayout
from .foreign_file import FileExtent, ForeignFile
from .memory_tier import done_at_once
from .swap_space import SwapSpace
from .transfer import Transfer

logger = logging.getLogger(__name__)

MAX_OPERATIONS = 1024
"""Transfers accepted by the engine and not yet done. Staging buffers run out long before."""

_looked_at: set[Path] = set()


@dataclass(eq=False, slots=True)
class _Submission:
    """A buffer and what the engine does with it; noted before the engine is asked."""

    op: Op
    extent: Extent
    """Kept: its bytes must not be handed out again before."""
    whole: list[Segment]
    """They name what is moved of the first copy."""
    segments: list[Segment]
    """They name what is moved, of the copies that are asked."""
    buffer: StagingBuffer
    engine: Engine
    operation: Operation | None = None
    """None: not known. The engine may have it all the same, if an exception came before its answer."""

    def submit(self) -> Operation | None:
        """Hand it to the engine; None where that has no room for it now."""
        self.operation = self.engine.submit(self.op, self.segments)
        return self.operation

    def renew(self, engine: Engine, segments: list[Segment]) -> None:
        """Let another engine do it, or other copies be asked; nobody has been asked yet."""
        self.operation = None
        self.engine = engine
        self.segments = segments

    def over(self, *, several: bool) -> bool:
        """Whether nothing touches the buffer, nor will: what a broken engine or one of several copies lost may."""
        if self.operation is None or not self.operation.done():
            return False
        return self.operation.failure is None or not (several or self.operation.failure.engine_lost)


class NvmeTier:
    """Reads and writes extents from and to staging buffers. Thread-safe.

    `paths` and `space` take the place of `nvme_path`; a space belongs to the tier from here on.
    """

    def __init__(
        self,
        config: OffloadConfig,
        *,
        paths: Sequence[Path] | None = None,
        space: SwapSpace | None = None,
        faults: FaultSpec | None = None,
    ) -> None:
        aio = config.aio
        self._owner_pid = os.getpid()
        self._closed = False
        self._lock = threading.RLock()  # re-entrant: a signal handler may use what it interrupted
        self._under_way: dict[_Submission, None] = {}
        """Operations that the engine may have, oldest first."""
        self._bytes_by_kind: Counter[tuple[Op, str]] = Counter()
        self._direct = aio.direct
        self._foreign: dict[tuple[Path, FileIdentity], ForeignFile] = {}
        self.space = space or SwapSpace(paths or config.nvme_paths, weights=aio.path_weights, direct=aio.direct)
        try:
            _say_what_is_memory(self.space)
            options = EngineOptions(
                queue_depth=aio.queue_depth,
                block_size=aio.block_size,
                rings=aio.rings,
                alignment=self.space.alignment,
                max_operations=MAX_OPERATIONS,
                faults=faults,
            )
            self._engines = EngineInUse(aio.engine, options, self.space.paths[0], self.space.copies.fds)
        except BaseException:
            self.space.close()
            raise
        # Also when nobody calls close(): first the engine ends what is under way, then its memory and files may go.
        self._finalizer = finalize(self, _shut, *self._parts)

    @property
    def name(self) -> str:
        """Name of the engine that does the I/O."""
        return self.engine.name

    @property
    def alignment(self) -> int:
        """Granularity of offsets, sizes and addresses, in bytes."""
        return self.space.alignment

    @property
    def direct(self) -> bool:
        """Whether every path does direct I/O."""
        return self.space.direct

    @property
    def opened(self) -> OpenedEngine:
        """The engine that does the I/O, and why it and no other."""
        return self._engines.latest

    def reserve(self, sizes: Sequence[int]) -> list[Extent]:
        """Return one extent per size, with the space of all of them promised. On OutOfSpaceError nothing is kept."""
        return self.space.allocate_all(sizes)

    def extent_in_files(self, layout: RangeLayout) -> FileExtent:
        """Return an extent of ranges of files that others wrote, which are opened; WeightFileError names one."""
        direct = self._direct if self.alignment <= PAGE else "disabled"
        for run in layout.runs:
            if (key := (run.path, run.identity)) not in self._foreign:
                self._foreign[key] = ForeignFile(*key, direct)
        return FileExtent(layout, [self._foreign[run.path, run.identity] for run in layout.runs])

    def check_room(self, sizes: Sequence[int]) -> None:
        """Raise OutOfSpaceError where `reserve` would find no space now; takes none."""
        self.space.check_room(sizes)

    def free(self, extent: Extent) -> None:
        """Give an extent back. Its bytes may be handed out again at once."""
        self.space.free(extent)

    def memory(self, extent: Extent) -> None:
        """Return None: the bytes of an extent are reached through a staging buffer."""

    def path_of(self, extent: Extent) -> Path:
        """Return the file in which an extent begins."""
        return extent.files[0].path if isinstance(extent, FileExtent) else self.space.path_of(extent.stripes[0].fd)

    def describe(self, extent: Extent) -> str:
        """Name every stripe of an extent: its bytes, offset and file."""
        if isinstance(extent, FileExtent):
            return extent.describe()
        stripes = extent.stripes
        return ", ".join(f"{size} bytes at offset {offset} of {self.space.path_of(fd)}" for fd, offset, size in stripes)

    @property
    def engine(self) -> Engine:
        """The engine that does the I/O."""
        return self.opened.engine

    @property
    def registration(self) -> Registration:
        """The memory and files that the engine has registered."""
        return self._engines.registration

    def register(self, pools: Sequence[BufferPool]) -> Registration:
        """Register memory and swap files with the engine, in place of what was; says once what was refused."""
        return self._engines.register([region for pool in pools for region in pool.regions])

    def read(
        self, extent: Extent, buffer: StagingBuffer, *, what: str, kind: str, size_bytes: int | None = None
    ) -> Transfer[StagingBuffer]:
        """Start reading the first `size_bytes` of an extent into a buffer; see `Tier.read`."""
        return self._start(Op.READ, extent, buffer, what, kind, size_bytes)

    def write(
        self,
        extent: Extent,
        buffer: StagingBuffer,
        *,
        what: str,
        kind: str,
        start: int = 0,
        size_bytes: int | None = None,
    ) -> Transfer[StagingBuffer]:
        """Start writing a buffer to the first `size_bytes` of an extent; see `Tier.write`."""
        return self._start(Op.WRITE, extent, buffer, what, kind, size_bytes, start)

    def bytes_of_kind(self, op: Op, kind: str) -> int:
        """Return the bytes handed to the engine under this kind, since construction."""
        with self._lock:
            return self._bytes_by_kind[op, kind]

    def stats(self) -> EngineStats:
        """Add up the counters of the engine since it was opened, and of those that broke before it."""
        return self._engines.stats()

    def close(self) -> None:
        """Wait for what is under way, close the engine, delete the swap files. Idempotent; no-op in a forked child."""
        if os.getpid() == self._owner_pid:
            self._closed = True
            # Not by the finalizer, which runs once: what is interrupted here is done by the next call.
            _shut(*self._parts)
            self._finalizer.detach()

    @property
    def _parts(self) -> tuple[int, EngineInUse, SwapSpace, dict[_Submission, None], dict[Any, ForeignFile]]:
        return self._owner_pid, self._engines, self.space, self._under_way, self._foreign

    def _start(
        self,
        op: Op,
        extent: Extent,
        buffer: StagingBuffer,
        what: str,
        kind: str,
        size_bytes: int | None,
        start: int = 0,
    ) -> Transfer[StagingBuffer]:
        self._check_usable()
        try:
            self.space.check_whole()
        except SwapIOError as error:
            error.extent = "; ".join(filter(None, (what, error.extent)))
            raise
        if start + (size_bytes or extent.size_bytes) > buffer.size_bytes:
            moved = f"{size_bytes or extent.size_bytes} bytes from byte {start} on"
            raise ValueError(f"{what}: {moved}, and the buffer has {buffer.size_bytes}")
        whole, copies = extent.segments(buffer.address + start, 0, size_bytes), self.space.copies
        if not whole:  # a small file, all of which was read when it was opened
            return done_at_once(op, buffer)
        submission = _Submission(op, extent, whole, copies.segments(op, whole), buffer, self.engine)
        with self._lock:
            # Held here, the buffer's memory cannot go away under the kernel when the caller drops the transfer.
            self._forget([other for other in self._under_way if other.over(several=copies.several)])
            self._under_way[submission] = None
        operation = self._submit(submission)
        with self._lock:
            self._bytes_by_kind[op, kind] += operation.size_bytes
        to_error = partial(_error, extent if isinstance(extent, FileExtent) else self.space, self._engines, op, what)
        return Transfer(operation, to_error, buffer, partial(self._begin_again, submission))

    def _submit(self, submission: _Submission) -> Operation:
        while (operation := submission.submit()) is None:
            self._wait_for_any()
        return operation

    def _begin_again(self, submission: _Submission, lost: Operation) -> Operation | None:
        """Do from its beginning what failed: with another engine, or without the copy that failed; None: there is none.

        To write or read the same bytes twice does no harm, as long as nobody else has the buffer.
        """
        with self._lock:
            if submission.operation is None:  # an exception kept us from knowing whether it was handed in again
                self._engines.drain()
            elif submission.operation is not lost:
                return submission.operation  # somebody else who waits for it was here before
            if submission not in self._under_way:
                return None
            if not self._is_elsewhere(submission, lost.failure):
                self._forget([submission])
                return None
            # Intent first, as in `_start`.
            submission.renew(self.engine, self.space.copies.segments(submission.op, submission.whole))
            return self._submit(submission)

    def _is_elsewhere(self, submission: _Submission, failure: Failure | None) -> bool:
        """Whether there is another engine, or another copy, than the one that failed."""
        if failure is not None and not failure.engine_lost:
            return self.space.copies.lose_at(failure.fd, _error(self.space, self._engines, submission.op, "", failure))
        return submission.engine.breakdown is None or self._engines.replace(submission.engine)

    def quiesce(self, buffer: StagingBuffer) -> None:
        """Wait until no transfer can touch a buffer, also one whose handle an exception kept from the caller."""
        with self._lock:
            submissions = [submission for submission in self._under_way if submission.buffer is buffer]
        if any(submission.operation is None for submission in submissions):
            self._engines.drain()
        for submission in submissions:
            if submission.operation is not None:
                submission.operation.wait()
        with self._lock:
            self._forget(submissions)

    def _forget(self, submissions: Iterable[_Submission]) -> None:
        for submission in submissions:
            self._under_way.pop(submission, None)

    def _wait_for_any(self) -> None:
        with self._lock:
            operations = [submission.operation for submission in self._under_way if submission.operation is not None]
        pending = [operation for operation in operations if not operation.done()]
        if pending:
            min(pending, key=lambda operation: operation.submitted_ns).wait()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("NVMe tier")
        if (pid := os.getpid()) != self._owner_pid:
            raise ForkError("NVMe tier", self._owner_pid, pid)


def _shut(
    owner_pid: int,
    engines: EngineInUse,
    space: SwapSpace,
    under_way: dict[_Submission, None],
    foreign: dict[Any, ForeignFile],
) -> None:
    if os.getpid() != owner_pid:
        return
    engines.close()
    for file in foreign.values():
        file.close()
    space.close()
    under_way.clear()


def _error(files: SwapSpace | FileExtent, engines: EngineInUse, op: Op, what: str, failure: Failure) -> SwapIOError:
    kind = SwapIOError
    if isinstance(files, FileExtent) and not failure.engine_lost:
        return files.error_of(failure, what)
    if failure.engine_lost:
        kind, name = EngineLostError, engines.latest.engine.name
        what = f"{what}; the {name} engine is dead, and no other takes its place: {engines.no_other}"
    return kind(
        failure.errno,
        path=files.path_of(failure.fd),
        offset=failure.offset,
        size_bytes=failure.size_bytes,
        direction="read" if op is Op.READ else "write",
        extent=what,
    )


def _say_what_is_memory(space: SwapSpace) -> None:
    """Warn of each path that is on no drive, once in this process."""
    for file in space.all_files:
        path = file.path.parent.parent
        if path not in _looked_at:
            _looked_at.add(path)
            if memory := memory_of(file.fd, file.alignment if file.direct else None):
                logger.warning(
                    "nvme_path %s is on %s, which is memory: what is moved there stays in host memory, and is gone "
                    'with a restart. Name a folder on an NVMe drive, or write device = "cpu", which does without the '
                    "copies",
                    path,
                    memory,
                )
