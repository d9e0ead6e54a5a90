"""The handle that the Python engines give out for a submitted operation."""

import contextlib
import os
import threading
import time
from collections.abc import Sequence

from .engine import Failure, Op, Segment, check_timeout


class PythonOperation:
    """A group of requests on its way; implements `aio_native.engine.Operation`.

    The owner thread of an engine calls ``complete``, once; everything else may be called from any thread.
    """

    __slots__ = (
        "_lock",
        "_waiting",
        "_wakers",
        "completed_ns",
        "failure",
        "op",
        "segments",
        "size_bytes",
        "submitted_ns",
    )

    def __init__(self, op: Op, segments: Sequence[Segment]) -> None:
        self.op = op
        self.segments = tuple(segments)
        self.size_bytes = sum(segment.size_bytes for segment in self.segments)
        self.failure: Failure | None = None
        self.submitted_ns = time.monotonic_ns()
        self.completed_ns = 0
        # Re-entrant: a signal handler may look at the operation whose wait it interrupted. No condition variable: its
        # methods are Python, and an exception in the middle of one leaves the lock held, or not held.
        self._lock = threading.RLock()
        self._waiting: list[threading.Lock] = []
        self._wakers: list[int] = []

    def done(self) -> bool:
        """Whether every request has completed (or was never issued because an earlier one failed)."""
        return self.completed_ns != 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for ``done()``; False when `timeout` seconds passed first.

        In the main thread signal handlers run meanwhile, and what they raise (KeyboardInterrupt) ends the wait.
        """
        check_timeout(timeout)
        finished = threading.Lock()
        finished.acquire()
        with self._lock:
            if self.done():
                return True
            self._waiting.append(finished)
        if finished.acquire(timeout=-1 if timeout is None else min(max(timeout, 0), threading.TIMEOUT_MAX)):
            return True
        with self._lock:
            if finished in self._waiting:
                self._waiting.remove(finished)
        return self.done()

    def add_waker(self, eventfd: int) -> None:
        """Write 1 to `eventfd` when the operation is done; at once if it already is."""
        with self._lock:
            if not self.done():
                # A descriptor of our own: the caller may close his first, and its number then mean another file. Made
                # and noted by one call: an exception between two would lose it.
                self._wakers.extend(map(os.dup, [eventfd]))
                return
        os.eventfd_write(eventfd, 1)

    def complete(self, failure: Failure | None) -> None:
        """Make the operation done, and tell everyone who waits. For the engine only."""
        with self._lock:
            self.failure = failure
            self.completed_ns = time.monotonic_ns()
            wakers, self._wakers = self._wakers, []
            waiting, self._waiting = self._waiting, []
        for finished in waiting:
            finished.release()
        for eventfd in wakers:
            with contextlib.suppress(BlockingIOError):  # its counter is full: a wake-up is pending anyway
                os.eventfd_write(eventfd, 1)
            os.close(eventfd)
