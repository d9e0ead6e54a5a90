"""A thread that makes a step last while others compute: one commit at a time, in the order in which they were begun."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nvme_offload.offload.errors import ClosedError, StateError

_LOOK_SECONDS = 0.1  # a signal handler may come between the end of a commit and the word of it


class Committer:
    """Runs commits in a thread of its own, which begins with the first one.

    For one thread to use. A commit that fails is remembered, not raised: the run goes on from the one before.
    """

    def __init__(self) -> None:
        self._commit: Callable[[], None] | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._closed = False
        self.waited_seconds = 0.0
        """How long `wait` waited, in all."""
        self.commit_seconds = 0.0
        """How long commits took, in all, whether anybody waited or not."""
        self.num_committed = 0
        """Commits that succeeded."""
        self.num_failed = 0
        """Commits that failed."""

    @property
    def is_busy(self) -> bool:
        """Whether a commit is under way."""
        return self._commit is not None

    def begin(self, commit: Callable[[], None]) -> None:
        """Have the thread call `commit`, and return at once.

        Args:
            commit: waits for the writes of a step, makes them last and writes the manifest; raises where it cannot.

        Raises:
            StateError: another one is under way: `wait` first.
            ClosedError: after `close`.
        """
        if self._closed:
            raise ClosedError("committer")
        if self._commit is not None:
            raise StateError("committer", "no commit under way", "one is")
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
                self._thread.start()
            self._commit = commit
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until no commit is under way. What was interrupted here goes on and can be waited for again."""
        if self._commit is None:
            return
        begun = time.perf_counter()
        try:
            with self._changed:
                while self._commit is not None:
                    self._changed.wait(_LOOK_SECONDS)
        finally:
            self.waited_seconds += time.perf_counter() - begun

    def take_failure(self) -> Exception | None:
        """What the latest commit failed with, once; None where it did not, or is under way."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Wait for what is under way and end the thread. Idempotent."""
        self.wait()
        self._closed = True
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._commit is None:
                    if self._closed:
                        return
                    self._changed.wait()
                commit = self._commit
            self._make(commit)
            del commit  # it knows the whole optimizer, which may go while this thread sleeps
            with self._changed:
                self._commit = None
                self._changed.notify_all()

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
