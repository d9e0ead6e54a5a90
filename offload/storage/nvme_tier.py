"""The NVMe tier: extents of the swap space behind an engine, with every failure turned into words."""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nvme_offload.aio_native import (
    Engine,
    EngineOptions,
    EngineStats,
    Failure,
    FaultSpec,
    Op,
    OpenedEngine,
    Operation,
    Registration,
    open_engine,
)
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import ClosedError, ForkError, SwapIOError
from nvme_offload.offload.host.buffer_pool import BufferPool, StagingBuffer
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.swap_space import SwapSpace
from nvme_offload.offload.storage.transfer import Transfer

logger = logging.getLogger(__name__)

MAX_OPERATIONS = 1024
"""Transfers accepted by the engine and not yet done. Staging buffers run out long before."""


@dataclass(eq=False)
class _Flight:
    """A buffer and what the engine does with it; noted before the engine is asked."""

    buffer: StagingBuffer
    operation: Operation | None = None
    """The operation; None: not known. The engine may have it all the same, if an exception came before its answer."""

    def done(self) -> bool:
        return self.operation is not None and self.operation.done()


class NvmeTier:
    """Reads and writes extents from and to staging buffers. Thread-safe.

    Args:
        config: the sections `aio` and `zero_optimization.offload_optimizer.nvme_path` are used.
        paths: other folders than that.
        faults: failures to inject, for tests.

    Raises:
        SwapIOError: a path cannot be used.
        EngineUnavailable: the engine that was asked for cannot run here.
    """

    def __init__(
        self, config: OffloadConfig, *, paths: Sequence[Path] | None = None, faults: FaultSpec | None = None
    ) -> None:
        aio = config.aio
        self._owner_pid = os.getpid()
        self._closed = False
        self._lock = threading.RLock()  # re-entrant: a signal handler may use what it interrupted
        self._under_way: set[_Flight] = set()
        self._bytes_by_kind: Counter[tuple[Op, str]] = Counter()
        self.space = SwapSpace(paths or config.nvme_paths, weights=aio.path_weights, direct=aio.direct)
        try:
            options = EngineOptions(
                queue_depth=aio.queue_depth,
                block_size=aio.block_size,
                rings=aio.rings,
                alignment=self.space.alignment,
                max_operations=MAX_OPERATIONS,
                faults=faults,
            )
            self._opened: OpenedEngine = _open_engine(aio.engine, options, self.space.paths[0])
        except BaseException:
            self.space.close()
            raise
        self.registration = Registration()
        # Also when nobody calls close(): first the engine ends what is under way, then its memory and files may go.
        self._finalizer = weakref.finalize(
            self, _shut, self._owner_pid, self._opened.engine, self.space, self._under_way
        )

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
        return self._opened

    def reserve(self, sizes: Sequence[int]) -> list[Extent]:
        """One extent per size, with the space of all of them promised.

        Raises:
            OutOfSpaceError: names the path that is full and all the bytes needed there; nothing is kept.
        """
        return self.space.allocate_all(sizes)

    def free(self, extent: Extent) -> None:
        """Give an extent back. Its bytes may be handed out again at once."""
        self.space.free(extent)

    def memory(self, extent: Extent) -> None:
        """None: the bytes of an extent are reached through a staging buffer."""

    def path_of(self, extent: Extent) -> Path:
        """The file in which an extent begins."""
        return self.space.path_of(extent.stripes[0].fd)

    def describe(self, extent: Extent) -> str:
        """Name every stripe of an extent: its bytes, offset and file."""
        stripes = extent.stripes
        return ", ".join(f"{size} bytes at offset {offset} of {self.space.path_of(fd)}" for fd, offset, size in stripes)

    @property
    def engine(self) -> Engine:
        """The engine that does the I/O."""
        return self._opened.engine

    @property
    def engine_reason(self) -> str:
        """Why this engine and no other, in one sentence."""
        return self._opened.reason

    def register(self, pools: Sequence[BufferPool]) -> Registration:
        """Register the memory of `pools` and the swap files with the engine, in place of what was registered before.

        Says once what was refused.
        """
        regions = [region for pool in pools for region in pool.regions]
        self.registration = self.engine.register(regions, self.space.fds)
        for refusal in self.registration.refusals:
            _say_once(refusal)
        return self.registration

    def read(
        self, extent: Extent, buffer: StagingBuffer, *, what: str, kind: str, size_bytes: int | None = None
    ) -> Transfer[StagingBuffer]:
        """Start reading the first `size_bytes` (all by default) of an extent into a buffer.

        Args:
            extent: where from.
            buffer: where to; held until the transfer is done.
            what: names the bytes in an error message, for example "subgroup 3".
            kind: what the bytes are counted as, for example "optimizer state".
            size_bytes: a multiple of the alignment.
        """
        return self._start(Op.READ, extent, buffer, what, kind, size_bytes)

    def write(
        self, extent: Extent, buffer: StagingBuffer, *, what: str, kind: str, size_bytes: int | None = None
    ) -> Transfer[StagingBuffer]:
        """Start writing a buffer to the first `size_bytes` (all by default) of an extent. Arguments as in `read`."""
        return self._start(Op.WRITE, extent, buffer, what, kind, size_bytes)

    def bytes_of_kind(self, op: Op, kind: str) -> int:
        """Bytes handed to the engine under this kind, since construction."""
        with self._lock:
            return self._bytes_by_kind[op, kind]

    def bytes_by_kind(self, op: Op) -> dict[str, int]:
        """Bytes handed to the engine in this direction since construction, under every kind there was."""
        with self._lock:
            return {kind: count for (its_op, kind), count in self._bytes_by_kind.items() if its_op is op and count}

    def stats(self) -> EngineStats:
        """Counters of the engine since it was opened."""
        return self.engine.stats()

    def close(self) -> None:
        """Wait for what is under way, close the engine, delete the swap files. Idempotent; no-op in a forked child."""
        if os.getpid() == self._owner_pid:
            self._closed = True
            # Not by the finalizer, which runs once: what is interrupted here is done by the next call.
            _shut(self._owner_pid, self._opened.engine, self.space, self._under_way)
            self._finalizer.detach()

    def _start(
        self, op: Op, extent: Extent, buffer: StagingBuffer, what: str, kind: str, size_bytes: int | None
    ) -> Transfer[StagingBuffer]:
        self._check_usable()
        try:
            self.space.check_whole()
        except SwapIOError as error:
            error.extent = f"{what}; {error.extent}"
            raise
        if (size_bytes or extent.size_bytes) > buffer.size_bytes:
            raise ValueError(f"{what}: {size_bytes or extent.size_bytes} bytes into a buffer of {buffer.size_bytes}")
        segments = extent.segments(buffer.address, 0, size_bytes)
        flight = _Flight(buffer)
        with self._lock:
            # Held here, the buffer's memory cannot go away under the kernel when the caller drops the transfer.
            self._under_way.difference_update([other for other in self._under_way if other.done()])
            self._under_way.add(flight)
        flight.operation = operation = self.engine.submit(op, segments)
        while operation is None:
            self._wait_for_any()
            flight.operation = operation = self.engine.submit(op, segments)
        with self._lock:
            self._bytes_by_kind[op, kind] += operation.size_bytes
        return Transfer(operation, partial(_error, self.space, op, what), buffer)

    def quiesce(self, buffer: StagingBuffer) -> None:
        """Wait until no transfer can touch a buffer, also one whose handle an exception kept from the caller."""
        with self._lock:
            flights = [flight for flight in self._under_way if flight.buffer is buffer]
        if any(flight.operation is None for flight in flights):
            self.engine.drain()
        for flight in flights:
            if flight.operation is not None:
                flight.operation.wait()
        with self._lock:
            self._under_way.difference_update(flights)

    def _wait_for_any(self) -> None:
        with self._lock:
            pending = [flight.operation for flight in self._under_way if flight.operation is not None]
        if pending:
            min(pending, key=lambda operation: operation.submitted_ns).wait()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("NVMe tier")
        if (pid := os.getpid()) != self._owner_pid:
            raise ForkError("NVMe tier", self._owner_pid, pid)


def _open_engine(name: str, options: EngineOptions, path: Path) -> OpenedEngine:
    """`open_engine`; what the system refuses (descriptors, memory, threads) is said with its remedy."""
    try:
        return open_engine(name, options)
    except SwapIOError:
        raise
    except OSError as error:
        raise SwapIOError(
            error.errno or errno.EIO, path=path, offset=0, size_bytes=0, direction="allocate", extent="the I/O engine"
        ) from error


def _shut(owner_pid: int, engine: Engine, space: SwapSpace, under_way: set[_Flight]) -> None:
    if os.getpid() != owner_pid:
        return
    engine.close()
    space.close()
    under_way.clear()


def _error(space: SwapSpace, op: Op, what: str, failure: Failure) -> OSError:
    return SwapIOError(
        failure.errno,
        path=space.path_of(failure.fd),
        offset=failure.offset,
        size_bytes=failure.size_bytes,
        direction="read" if op is Op.READ else "write",
        extent=what,
    )


_said: set[str] = set()


def _say_once(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        logger.warning(sentence)
