"""The io_uring engine in C++: Python is involved once per operation, however many requests it takes."""

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from nvme_offload.aio_native import _native
from nvme_offload.aio_native.engine import (
    DRAIN_POLL_SECONDS,
    Breakdown,
    Engine,
    EngineOptions,
    EngineStats,
    EngineUnavailable,
    Failure,
    Op,
    Operation,
    Registration,
    Segment,
    check_timeout,
)
from nvme_offload.aio_native.faults import FaultSpec
from nvme_offload.aio_native.requests import check_segments
from nvme_offload.aio_native.uring_refusal import explain_refusal


class UringOperation:
    """An operation of the C++ engine. See `aio_native.engine.Operation`."""

    __slots__ = ("_native",)

    def __init__(self, native: Any) -> None:
        self._native = native

    @property
    def size_bytes(self) -> int:
        """Bytes that the operation moves: the sum over its segments."""
        return int(self._native.size_bytes)

    @property
    def failure(self) -> Failure | None:
        """Return what went wrong with the operation, or None. Final once ``done()`` is true."""
        fields = self._native.failure
        return Failure(*fields) if fields else None

    @property
    def submitted_ns(self) -> int:
        """When the operation was handed in, on the clock of ``time.monotonic_ns``."""
        return int(self._native.submitted_ns)

    @property
    def completed_ns(self) -> int:
        """When the operation's last request completed, on the clock of ``time.monotonic_ns``; 0 before."""
        return int(self._native.completed_ns)

    def done(self) -> bool:
        """Whether every request of the operation has completed."""
        return bool(self._native.done())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait without the GIL; False when `timeout` seconds passed first."""
        check_timeout(timeout)
        return bool(self._native.wait(timeout))

    def add_waker(self, eventfd: int) -> None:
        """Let the engine write 1 to `eventfd` when the operation is done."""
        self._native.add_waker(eventfd)


class UringEngine(Engine):
    """io_uring through liburing, with one owner thread per ring and optional registered buffers and files.

    With `no_io` no-ops are submitted in place of transfers, to measure everything except the drive.
    """

    name = "io_uring"

    def __init__(self, options: EngineOptions, *, no_io: bool = False) -> None:
        if not hasattr(_native, "UringEngine"):
            raise EngineUnavailable(
                "the package was built without liburing. Install its development files (Debian: apt-get install "
                "liburing-dev; Fedora: dnf install liburing-devel) and install the package again"
            )
        self.options = options
        try:
            self._engine = _native.UringEngine(
                queue_depth=options.queue_depth,
                block_size=options.block_size,
                alignment=options.alignment,
                rings=options.rings,
                max_operations=options.max_operations,
                no_io=no_io,
                faults=_native_faults(options.faults),
            )
        except OSError as error:
            raise EngineUnavailable(explain_refusal(error.errno or errno.ENOSYS)) from error

    @property
    def breakdown(self) -> Breakdown | None:
        """Return how a ring of this engine broke; None while all of them work."""
        code, ended = self._engine.breakdown()
        return Breakdown(code, ended) if code else None

    def submit(self, op: Op, segments: Sequence[Segment]) -> Operation | None:
        """Hand in an operation and return at once; None when the engine is busy."""
        check_segments(segments, self.options.alignment)
        native = self._engine.submit(int(op), list(segments))
        return None if native is None else UringOperation(native)

    def register(self, buffers: Sequence[tuple[int, int]], fds: Sequence[int]) -> Registration:
        """Register memory (each region at most 1 GiB, of anonymous pages) and files, replacing what was before."""
        buffers_error, files_error = self._engine.register(list(buffers), list(fds))
        refusals = []
        if buffers_error:
            refusals.append(
                f"registered buffers refused ({os.strerror(buffers_error)}): requests pin their pages one by one "
                f"instead; {_remedy_for_buffers(buffers_error)}"
            )
        if files_error:
            refusals.append(f"registered files refused ({os.strerror(files_error)}): requests name plain descriptors")
        has_buffers, has_files = bool(buffers) and not buffers_error, bool(fds) and not files_error
        return Registration(buffers=has_buffers, files=has_files, refusals=tuple(refusals))

    def drain(self) -> None:
        """Wait until nothing is under way."""
        while self._engine.under_way():
            time.sleep(DRAIN_POLL_SECONDS)

    def stats(self) -> EngineStats:
        """Counters since the engine was opened."""
        native = self._engine.stats()
        return EngineStats(**{name: getattr(native, name) for name in EngineStats.__dataclass_fields__})

    def close(self) -> None:
        """Finish what is under way, stop the threads, free the rings."""
        self._engine.close()


def _remedy_for_buffers(code: int) -> str:
    if code == errno.ENOMEM:
        return "raise RLIMIT_MEMLOCK (ulimit -l) above the size of the staging buffers to get them"
    if code in (errno.EPERM, errno.EACCES):
        return "a seccomp filter that allows io_uring_register gives them back"
    return "everything works without them"


def _native_faults(faults: FaultSpec | None) -> Any:
    if faults is None:
        return None
    named = asdict(faults)
    return _native.FaultSpec(short_transfer=named.pop("short"), **named)
