"""Threads that begin whole, whatever interrupts who starts them.

`threading.Thread.start` waits for the new thread with a lock that it takes in Python. A signal handler that raises
there leaves that lock taken, and the new thread waits for it for ever. Handlers run in the main thread alone, so the
thread is started by another one, which C begins in one call.
"""

import _thread
import signal
import threading
from queue import SimpleQueue


def start(thread: threading.Thread) -> None:
    """Start a thread; RuntimeError: the system refuses one. An exception in between leaves one that begins, or none."""
    told: SimpleQueue[BaseException | None] = SimpleQueue()
    _thread.start_new_thread(_start, (thread, told))
    if (refusal := told.get()) is not None:
        raise refusal


def _start(thread: threading.Thread, told: SimpleQueue[BaseException | None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the new thread has this mask from its beginning
    try:
        thread.start()
    except BaseException as error:
        told.put(error)
    else:
        told.put(None)
