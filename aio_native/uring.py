"""The io_uring engine in C++: Python is involved once per operation, however many requests it takes."""

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from . import _native, engine
from .faults import FaultSpec
from .requests import check_segments
from .uring_refusal import explain_refusal


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
    def failure(self) -> engine.Failure | None:
        """Return what went wrong with the operation, or None. Final once ``done()`` is true."""
        fields = self._native.failure
        return engine.Failure(*fields) if fields else None

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
        engine.check_timeout(timeout)
        return bool(self._native.wait(timeout))

    def add_waker(self, eventfd: int) -> None:
        """Let the engine write 1 to `eventfd` when the operation is done."""
        self._native.add_waker(eventfd)


class UringEngine(engine.Engine):
    """io_uring through liburing, with one owner thread per ring and optional registered buffers and files.

    With `no_io` no-ops are submitted in place of transfers, to measure everything except the drive.
    """

    name = "io_uring"

    def __init__(self, options: engine.EngineOptions, *, no_io: bool = False) -> None:
        if not hasattr(_native, "UringEngine"):
            raise engine.EngineUnavailable(
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
            raise engine.EngineUnavailable(explain_refusal(error.errno or errno.ENOSYS)) from error

    @property
    def breakdown(self) -> engine.Breakdown | None:
        """Return how a ring of this engine broke; None while all of them work."""
        code, ended = self._engine.breakdown()
        return engine.Breakdown(code, ended) if code else None

    def submit(self, op: engine.Op, segments: Sequence[engine.Segment]) -> engine.Operation | None:
        """Hand in an operation and return at once; None when the engine is busy."""
        check_segments(segments, self.options.alignment)
        native = self._engine.submit(int(op), list(segments))
        return None if native is None else UringOperation(native)

    def register(self, buffers: Sequence[tuple[int, int]], fds: Sequence[int]) -> engine.Registration:
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
        return engine.Registration(buffers=has_buffers, files=has_files, refusals=tuple(refusals))

    def drain(self) -> None:
        """Wait until nothing is under way."""
        while self._engine.under_way():
            time.sleep(engine.DRAIN_POLL_SECONDS)

    def stats(self) -> engine.EngineStats:
        """Counters since the engine was opened."""
        native = self._engine.stats()
        return engine.EngineStats(**{name: getattr(native, name) for name in engine.EngineStats.__dataclass_fields__})

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
