"""Threads that begin whole, and are waited for, whatever interrupts who does it.

`threading.Thread.start` waits for the new thread with a lock that it takes in Python. A signal handler that raises
there leaves that lock taken, and the new thread waits for it for ever. Handlers run in the main thread alone, so the
thread is started by another one, which C begins in one call.
"""

import _thread
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from .finalizing import finalize


def start(thread: threading.Thread) -> None:
    """Start a thread; RuntimeError: the system refuses one. An exception in between leaves one that begins, or none."""
    told: SimpleQueue[BaseException | None] = SimpleQueue()
    try:
        _thread.start_new_thread(_start, (thread, told))
        refusal = told.get()
    except RuntimeError as error:
        refusal = error
    if isinstance(refusal, RuntimeError):
        remedy = "raise what limits threads or address space: ulimit -u, ulimit -v, pids.max of the control group"
        raise RuntimeError(f"the thread {thread.name} is refused: {refusal}; {remedy}") from refusal
    if refusal is not None:
        raise refusal


def _start(thread: threading.Thread, told: SimpleQueue[BaseException | None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the new thread has this mask from its beginning
    try:
        thread.start()
    except BaseException as error:
        told.put(error)
    else:
        told.put(None)


class Flag:
    """A `threading.Event` for one thread that waits, made of assignments and calls to C alone.

    An Event takes a lock in Python: a signal handler that raises there leaves it taken, and whoever waits waits on.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._told: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Wake who waits, now and from now on. From any thread."""
        self.is_set = True
        self._told.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set, or so long at most; return whether it is."""
        with suppress(Empty):
            if not self.is_set:
                self._told.get(timeout=seconds)
        return self.is_set


class Pending:
    """A call that a thread of a `ThreadPool` makes."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._made = Flag()

    def result(self) -> Any:
        """Wait; return what the call returned, or raise what it raised, as often as this is called."""
        self._made.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def make(self) -> None:
        """Make the call."""
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        self._made.set()


class ThreadPool:
    """Threads that make calls, in the order in which they were submitted, until it is closed: the rest is dropped.

    `concurrent.futures` has locks as `threading.Thread.start` has them: interrupted, it may wait for ever.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._submitted: SimpleQueue[Pending | None] = SimpleQueue()
        shared = self._submitted, Flag()
        make = partial(threading.Thread, target=_make_each, args=shared, name=name, daemon=True)
        self._ending = *shared, [make() for _ in range(num_threads)]
        self._finalizer = finalize(self, _end, *self._ending)  # for whoever is interrupted before or in `close`
        for thread in self._ending[2]:
            start(thread)

    def close(self) -> None:
        """End the threads."""
        _end(*self._ending)
        self._finalizer.detach()

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Pending:
        """Have a call made."""
        pending = Pending(partial(call, *arguments))
        self._submitted.put(pending)
        return pending


def _make_each(submitted: SimpleQueue[Pending | None], over: Flag) -> None:
    while (pending := submitted.get()) is not None and not over.is_set:
        pending.make()
    submitted.put(None)  # for the next thread


def _end(submitted: SimpleQueue[Pending | None], over: Flag, threads: list[threading.Thread]) -> None:
    over.set()
    submitted.put(None)
    for thread in threads:
        if thread.is_alive():  # else it ended, was refused, or begins yet and finds that it is over
            thread.join()
