"""Waiting for whichever operation is done first."""

import os
import select
from contextlib import suppress

from .descriptor import Descriptor
from .engine import Operation


class Bell:
    """Rings when any of the operations it was hung on is done, or when somebody rings it.

    One thread, or one event loop, waits for it. Engine threads ring it without running Python. OSError: it cannot be
    made, because no file descriptor is left.
    """

    def __init__(self) -> None:
        try:
            self._descriptor = Descriptor(os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            remedy = "nothing is left to wait with: raise the limit (`ulimit -n`), or close what is not needed"
            raise OSError(error.errno, f"{error.strerror}; {remedy}") from error
        self._eventfd = self._descriptor.fileno()
        self._poll = select.poll()
        self._poll.register(self._eventfd, select.POLLIN)

    def fileno(self) -> int:
        """Return the descriptor that can be read once it has rung, for an event loop."""
        return self._eventfd

    def hang_on(self, operation: Operation) -> bool:
        """Ring when `operation` is done, or at once; False: no descriptor is left, and who waits must look again."""
        with suppress(OSError, RuntimeError):
            operation.add_waker(self._eventfd)
            return True
        return False

    def ring(self) -> None:
        """Wake who waits. From any thread; does nothing once it is closed."""
        with suppress(BlockingIOError):  # its counter is full: it has been rung
            if (eventfd := self._descriptor.fileno()) >= 0:
                os.eventfd_write(eventfd, 1)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it rings (True) or `timeout` seconds have passed; what rang before counts. Signals are handled."""
        if not self._poll.poll(None if timeout is None else timeout * 1000):
            return False
        with suppress(BlockingIOError):  # another wake-up took the count
            os.eventfd_read(self._eventfd)
            return True
        return False

    def close(self) -> None:
        """Close the descriptor; operations hold their own. Idempotent."""
        self._descriptor.close()
