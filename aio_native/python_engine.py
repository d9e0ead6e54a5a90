"""The Python engines share a handle to a thread, which ends with it."""

import contextlib
import errno
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import ClassVar

from . import engine
from .finalizing import finalize
from .injection import Completion, FaultInjector
from .operation import PythonOperation
from .requests import Request, RequestQueue, check_segments, lost
from .starting import start


class OwnerThread(ABC):
    """A thread with all that is its own; nothing in here refers to the engine that hands operations in.

    There is one, whatever ``options.rings`` says, since a second one would only wait for the interpreter lock; it keeps
    as many requests in flight as all the rings together would, that is ``queue_depth * rings``, within ``max_depth``.
    """

    max_depth = 2**15

    def __init__(self, name: str, options: engine.EngineOptions) -> None:
        self.name = name
        self.depth = min(options.queue_depth * options.rings, self.max_depth)
        self.breakdown: engine.Breakdown | None = None
        self._options = options
        self.pid = os.getpid()
        """The process that has the thread: a forked child does not."""
        # Re-entrant, so that a signal handler may submit although it interrupted a submission.
        self._lock = threading.RLock()
        self._inbox: list[PythonOperation] = []
        self._bell_rung = False
        self._closing = False
        self._serving = False
        """Whether there is a bell, and somebody whom it reaches. Changed under the lock."""
        self._num_operations = 0
        self._requests = RequestQueue(options, self.depth)
        self._injector = FaultInjector(options.faults, options.alignment) if options.faults else None
        self._cpu_clocks: list[int] = []
        self._cpu_ns_at_end: int | None = None
        self._opened: SimpleQueue[BaseException | None] = SimpleQueue()
        self._ident: int | None = None
        self._thread = threading.Thread(target=self._main, name=f"{self.name}-engine", daemon=True)

    # What an engine adds. All but `_ring_bell` run in the thread.

    @abstractmethod
    def _open(self) -> None:
        """Acquire what the thread needs; what it raises, `begin` raises."""

    @abstractmethod
    def _start(self, request: Request) -> None:
        """Begin the transfer of ``request.asked_bytes``."""

    @abstractmethod
    def _reap(self, timeout: float | None) -> Iterable[Completion]:
        """Wait for completions, the bell or the timeout in seconds, and return the completions."""

    @abstractmethod
    def _ring_bell(self) -> None:
        """End ``_reap`` soon. From any thread, under the lock, between ``_open`` and ``_shut`` only."""

    def _shut(self) -> bool:
        """Free what ``_open`` acquired. False where requests may be under way after it."""
        return True

    # The thread.

    def _main(self) -> None:
        self._ident = threading.get_ident()
        self._adopt_thread()
        try:
            self._open()
        except BaseException as error:
            self._opened.put(error)  # `begin` raises it
            return
        with self._lock:
            self._serving = True
        self._opened.put(None)
        code = errno.EIO
        try:
            while self._issue():
                self._absorb(self._reap(self._injector.patience() if self._injector else None))
        except OSError as error:  # the system refuses what it used to allow: every operation says so
            code = error.errno or code
        finally:
            self._end(code)

    def _adopt_thread(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._cpu_clocks.append(time.pthread_getcpuclockid(threading.get_ident()))

    def _issue(self) -> bool:
        """Start what the queue depth allows; False when the engine is closing and nothing is left."""
        with self._lock:
            arrived, self._inbox = self._inbox, []
            self._bell_rung = False
            if self._closing and not arrived and self._requests.idle:
                self._serving = False
                return False
        for operation in arrived:
            self._requests.add(operation)
        while (request := self._requests.next()) is not None:
            if self._injector:
                request.asked_bytes = self._injector.ask(request.size_bytes)
            self._start(request)
        return True

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
        """Free everything; where the thread broke, with this errno, stop accepting and leave nobody waiting."""
        with self._lock:
            broken, self._serving = self._serving, False
            self._cpu_ns_at_end = self._cpu_ns()
        ended = self._shut()
        if broken:
            with self._lock:
                self.breakdown = engine.Breakdown(code, ended)
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

    # What the engine asks of it, from any thread.

    def begin(self) -> None:
        """Start, and wait until it is served; raises what ``_open`` raises."""
        start(self._thread)
        if (error := self._opened.get()) is not None:
            raise error

    def hand_in(self, op: engine.Op, segments: Sequence[engine.Segment]) -> PythonOperation | None:
        """Have an operation done; None if `max_operations` are under way."""
        with self._lock:
            if self._closing:
                raise RuntimeError(f"the {self.name} engine is closed")
            if self._num_operations >= self._options.max_operations:
                return None
            operation = PythonOperation(op, segments)
            if self.breakdown is not None:
                operation.complete(lost(operation, self.breakdown.errno))
                return operation
            # An exception may come after any call. Counted first, or the count would fall below zero; rung before it
            # is said, or the bell would never be rung again.
            self._num_operations += 1
            self._inbox.append(operation)
            if not self._bell_rung:
                self._wake()
                self._bell_rung = True
        return operation

    def look(self) -> bool:
        """Have it look at what was handed in, also where an exception came before the bell; whether it has work."""
        with self._lock:
            if self._num_operations:
                self._wake()
            return bool(self._num_operations)

    def stats(self) -> engine.EngineStats:
        """Count since it began; can be asked after `end`, too."""
        with self._lock:
            at_end = self._cpu_ns_at_end
            return self._requests.stats(self._cpu_ns() if at_end is None else at_end)

    def end(self) -> None:
        """End the thread, also one that only began, when all under way is done. Idempotent; no-op in a forked child."""
        if os.getpid() != self.pid:
            return
        with self._lock:
            self._closing = True
            self._wake()
        # Not for itself, where the garbage collector ran in it; nor for one that never began or is about to, and that
        # ends at once when it finds itself closing.
        if self._thread.is_alive() and threading.get_ident() != self._ident:
            self._thread.join()

    def _wake(self) -> None:
        if self._serving:
            self._ring_bell()


class PythonEngine(engine.Engine):
    """An engine whose owner thread is written in Python, and ends when nobody has the engine any more.

    So it may be lost to an exception anywhere between its construction and its owner.
    """

    owner_type: ClassVar[type[OwnerThread]]

    def __init__(self, options: engine.EngineOptions) -> None:
        self.options = options
        self._owner = self.owner_type(self.name, options)
        # Before it begins, so that there is no moment at which nobody would end it. Not when the interpreter ends: it
        # is a daemon, and whoever has memory under way then waits for that.
        finalize(self, self._owner.end).atexit = False
        self._owner.begin()

    @property
    def depth(self) -> int:
        """Requests in flight at most."""
        return self._owner.depth

    @property
    def breakdown(self) -> engine.Breakdown | None:
        """Return how the owner thread broke; None while it works."""
        return self._owner.breakdown

    def submit(self, op: engine.Op, segments: Sequence[engine.Segment]) -> PythonOperation | None:
        """Hand in an operation and return at once; None if `max_operations` are under way."""
        self._check_process()
        check_segments(segments, self.options.alignment)
        return self._owner.hand_in(op, segments)

    def drain(self) -> None:
        """Wait until nothing is under way."""
        self._check_process()
        while self._owner.look():
            time.sleep(engine.DRAIN_POLL_SECONDS)

    def register(self, buffers: Sequence[tuple[int, int]], fds: Sequence[int]) -> engine.Registration:
        """Register nothing: the requests of this engine have no registered form."""
        self._check_process()
        return engine.Registration()

    def stats(self) -> engine.EngineStats:
        """Return the counters since the engine was opened; they can be read after ``close`` too."""
        self._check_process()
        return self._owner.stats()

    def close(self) -> None:
        """Finish what is under way and stop the owner thread. Idempotent; does nothing in a forked child."""
        self._owner.end()

    def _check_process(self) -> None:
        if os.getpid() != self._owner.pid:
            raise RuntimeError(
                f"this {self.name} engine was made in process {self._owner.pid} and its owner thread stayed there: "
                f"make an engine of its own in process {os.getpid()}"
            )
