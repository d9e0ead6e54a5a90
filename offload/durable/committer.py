"""A thread that makes a step last while others compute: one commit at a time, in the order in which they were begun."""

import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from nvme_offload.aio_native.finalizing import finalize
from nvme_offload.aio_native.starting import start
from ..errors import ClosedError, StateError

_LOOK_SECONDS = 0.1  # a signal handler may come between the end of a commit and the word of it


class Committer:
    """Runs commits in a thread of its own, which begins with the first one.

    For one thread to use. A commit that fails is remembered, not raised: the run goes on from the one before.
    """

    def __init__(self) -> None:
        self._commit: Callable[[], None] | None = None
        # No Condition: it takes its lock in Python, and a signal handler that raises there would leave it taken.
        self._asked: SimpleQueue[bool] = SimpleQueue()
        """Gives the thread something to do, or (True) ends it."""
        self._told: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at_work = threading.Lock()
        """Held by the thread. Who was interrupted in Thread.join would be told that it has ended."""
        self._ending = os.getpid(), self._asked, self._at_work
        # An interpreter that ends while a thread waits in C++ has that unwound where C++ allows it nowhere: abort.
        self._finalizer = finalize(self, _end, *self._ending)
        self._failure: Exception | None = None
        self.waited_seconds = 0.0
        self.commit_seconds = 0.0
        """The time that commits took, in all, whether anybody waited or not."""
        self.num_committed = 0
        self.num_failed = 0

    @property
    def is_busy(self) -> bool:
        """Whether a commit is under way."""
        return self._commit is not None

    def begin(self, commit: Callable[[], None]) -> None:
        """Have the thread call `commit`, which may raise, and return at once; `wait` for the one before first."""
        if not self._finalizer.alive:
            raise ClosedError("committer")
        if self._commit is not None:
            raise StateError("committer", "no commit under way", "one is")
        self._commit = commit
        self._wake()

    def wait(self) -> None:
        """Wait until no commit is under way. What was interrupted here goes on and can be waited for again."""
        if self._commit is None:
            return
        begun = time.perf_counter()
        try:
            while self._commit is not None:
                try:
                    self._told.get(timeout=_LOOK_SECONDS)
                except Empty:
                    self._wake()  # where what began the commit was cut short
        finally:
            self.waited_seconds += time.perf_counter() - begun

    def take_failure(self) -> Exception | None:
        """Return what the latest commit failed with, once; None where it did not, or is under way."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Wait for what is under way and end the thread. Idempotent."""
        self.wait()
        _end(*self._ending)
        self._finalizer.detach()

    def _wake(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
            start(self._thread)
        self._asked.put(False)

    def _run(self) -> None:
        with self._at_work:
            ends = False
            while not ends:
                ends = self._asked.get()
                if self._commit is not None:  # else it was asked twice
                    self._make(self._commit)
                    self._commit = None  # it knows the whole optimizer, which may go while this thread sleeps
                    if self._told.empty():
                        self._told.put(None)
        self._asked.put(True)  # where a start was cut short, there is another thread

    def _make(self, commit: Callable[[], None]) -> None:
        begun = time.perf_counter()
        try:
            commit()
        except Exception as failure:
            self._failure = failure
            self.num_failed += 1
        else:
            self.num_committed += 1
        self.commit_seconds += time.perf_counter() - begun


def _end(pid: int, asked: SimpleQueue[bool], at_work: threading.Lock) -> None:
    if os.getpid() == pid:  # a forked child has the lock, and not the thread
        asked.put(True)
        with at_work:
            pass
