"""Waiting for whichever operation is done first."""

from __future__ import annotations

import os
import select
import weakref
from contextlib import suppress

from nvme_offload.aio_native.engine import Operation


class Bell:
    """Rings when any of the operations it was hung on is done. For one waiting thread."""

    def __init__(self) -> None:
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._eventfd, select.POLLIN)
        self._finalizer = weakref.finalize(self, os.close, self._eventfd)

    def hang_on(self, operation: Operation) -> None:
        """Ring when `operation` is done; at once if it already is.

        Where no descriptor is left for that (EMFILE), nothing rings: who waits looks again after its timeout.
        """
        with suppress(OSError, RuntimeError):
            operation.add_waker(self._eventfd)

    def wait(self, timeout: float) -> None:
        """Wait until the bell rings or `timeout` seconds have passed; what rang before counts. Signals are handled."""
        if self._poll.poll(timeout * 1000):
            os.eventfd_read(self._eventfd)

    def close(self) -> None:
        """Close the descriptor; operations hold their own."""
        self._finalizer()
