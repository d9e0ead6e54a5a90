"""The frame of the Python engines: one owner thread that issues requests and takes in completions.

An engine adds how a request is started and how completions are awaited: ``_open``, ``_start``, ``_reap``,
``_ring_bell``, ``_shut``. Submitting hands an operation to the owner thread through a list, and rings a bell
unless one has been rung since the owner looked. All threads are daemons, started by constructing an engine and
never by importing one, and block every signal, so that signals are handled where they always are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from nvme_offload.aio_native.engine import (
    DRAIN_POLL_SECONDS,
    Breakdown,
    Engine,
    EngineOptions,
    EngineStats,
    Op,
    Registration,
    Segment,
)
from nvme_offload.aio_native.injection import Completion, FaultInjector
from nvme_offload.aio_native.operation import PythonOperation
from nvme_offload.aio_native.requests import Request, RequestQueue, lost
from nvme_offload.aio_native.segments import check_segments


class PythonEngine(Engine):
    """An engine whose owner thread is written in Python.

    There is one owner thread whatever ``options.rings`` says, since a second one would only wait for the
    interpreter lock; it keeps as many requests in flight as all the rings together would, that is
    ``queue_depth * rings``, within ``max_depth``.
    """

    max_depth = 2**15

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.depth = min(options.queue_depth * options.rings, self.max_depth)
        self._pid = os.getpid()
        # Re-entrant, so that a signal handler may submit although it interrupted a submission.
        self._lock = threading.RLock()
        self._inbox: list[PythonOperation] = []
        self._bell_rung = False
        self._closing = False
        self._ended = False
        self._breakdown: Breakdown | None = None
        self._num_operations = 0
        self._requests = RequestQueue(options, self.depth)
        self._injector = FaultInjector(options.faults, options.alignment) if options.faults else None
        self._cpu_clocks: list[int] = []
        self._cpu_ns_at_end: int | None = None
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name=f"{self.name}-engine", daemon=True)
        self._thread.start()
        self._opened.result()

    # What an engine adds. All but `_ring_bell` run in the owner thread.

    def _open(self) -> None:
        """Acquire what the owner thread needs; what it raises, the constructor raises."""

    @abstractmethod
    def _start(self, request: Request) -> None:
        """Begin the transfer of ``request.asked_bytes``."""

    @abstractmethod
    def _reap(self, timeout: float | None) -> Iterable[Completion]:
        """Wait for completions, the bell or the timeout in seconds, and return the completions."""

    @abstractmethod
    def _ring_bell(self) -> None:
        """End ``_reap`` soon. From any thread, under the lock, never after the owner thread has ended."""

    def _shut(self) -> bool:
        """Free what ``_open`` acquired. False where requests may be under way after it."""
        return True

    # The owner thread.

    def _main(self) -> None:
        self._adopt_thread()
        try:
            self._open()
        except BaseException as error:
            self._opened.set_exception(error)  # the constructor raises it
            return
        self._opened.set_result(None)
        code = errno.EIO
        try:
            self._serve()
        except OSError as error:  # the system refuses what it used to allow: every operation says so
            code = error.errno or code
        finally:
            self._end(code)

    def _adopt_thread(self) -> None:
        """Called by every thread of the engine as it starts."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._cpu_clocks.append(time.pthread_getcpuclockid(threading.get_ident()))

    def _serve(self) -> None:
        while self._issue():
            self._absorb(self._reap(self._patience()))

    def _issue(self) -> bool:
        """Start what the queue depth allows; False when the engine is closing and nothing is left."""
        with self._lock:
            arrived, self._inbox = self._inbox, []
            self._bell_rung = False
            if self._closing and not arrived and self._requests.idle:
                self._ended = True
                return False
        for operation in arrived:
            self._requests.add(operation)
        while (request := self._requests.next()) is not None:
            if self._injector:
                request.asked_bytes = self._injector.ask(request.size_bytes)
            self._start(request)
        return True

    def _patience(self) -> float | None:
        return self._injector.patience() if self._injector else None

    def _absorb(self, completions: Iterable[Completion]) -> None:
        if self._injector:
            completions = self._injector.sift(completions)
        for request, result in completions:
            self._requests.complete(request, result)
        self._announce_finished()

    def _announce_finished(self) -> None:
        finished = self._requests.take_finished()
        if finished:
            # First make room: whoever sees an operation done must be able to submit the next one.
            with self._lock:
                self._num_operations -= len(finished)
            for operation, failure in finished:
                operation.complete(failure)

    def _end(self, code: int) -> None:
        """Free everything; where the owner thread broke, with this errno, stop accepting and leave nobody waiting."""
        broken = not self._ended
        with self._lock:
            self._ended = True
            self._cpu_ns_at_end = self._cpu_ns()
        ended = self._shut()
        if broken:
            with self._lock:
                self._breakdown = Breakdown(code, ended)
                arrived, self._inbox = self._inbox, []
            for operation in arrived:
                self._requests.add(operation)
            self._requests.abandon(code)
            self._announce_finished()

    def _cpu_ns(self) -> int:
        total = 0
        for clock in self._cpu_clocks:
            with contextlib.suppress(OSError):  # at interpreter exit pool threads end before us
                total += time.clock_gettime_ns(clock)
        return total

    # The interface.

    @property
    def breakdown(self) -> Breakdown | None:
        """How the owner thread broke; None while it works."""
        return self._breakdown

    def submit(self, op: Op, segments: Sequence[Segment]) -> PythonOperation | None:
        """Hand in an operation and return at once; None if `max_operations` are under way."""
        self._check_process()
        check_segments(segments, self.options.alignment)
        with self._lock:
            if self._closing:
                raise RuntimeError(f"the {self.name} engine is closed")
            if self._num_operations >= self.options.max_operations:
                return None
            operation = PythonOperation(op, segments)
            if self._breakdown is not None:
                operation.complete(lost(operation, self._breakdown.errno))
                return operation
            # An exception may come after any call. Counted first, or the count would fall below zero; rung before it
            # is said, or the bell would never be rung again.
            self._num_operations += 1
            self._inbox.append(operation)
            if not self._bell_rung and not self._ended:
                self._ring_bell()
                self._bell_rung = True
        return operation

    def drain(self) -> None:
        """Wait until nothing is under way."""
        self._check_process()
        while True:
            with self._lock:
                if not self._num_operations:
                    return
                if not self._ended:
                    self._ring_bell()
            time.sleep(DRAIN_POLL_SECONDS)

    def register(self, buffers: Sequence[tuple[int, int]], fds: Sequence[int]) -> Registration:
        """Register nothing: the requests of this engine have no registered form."""
        self._check_process()
        return Registration()

    def unregister(self) -> None:
        """Forget everything registered: nothing."""
        self._check_process()

    def stats(self) -> EngineStats:
        """Counters since the engine was opened; they can be read after ``close`` too."""
        self._check_process()
        with self._lock:
            at_end = self._cpu_ns_at_end
            return self._requests.stats(self._cpu_ns() if at_end is None else at_end)

    def close(self) -> None:
        """Finish what is under way and stop the owner thread. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closing = True
            if not self._ended:
                self._ring_bell()
        self._thread.join()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this {self.name} engine was made in process {self._pid} and its owner thread stayed there: "
                f"make an engine of its own in process {os.getpid()}"
            )
