"""Word to a thread, without a lock that an exception could leave taken."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue


class Flag:
    """A `threading.Event` for one thread that waits, made of assignments and calls to C alone.

    An Event takes a lock in Python: a signal handler that raises there leaves it taken, and whoever waits waits on.
    """

    def __init__(self) -> None:
        self.is_set = False
        """Whether somebody has called `set`."""
        self._told: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Wake who waits, now and from now on. From any thread."""
        self.is_set = True
        self._told.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set, or so long at most; whether it is."""
        with suppress(Empty):
            if not self.is_set:
                self._told.get(timeout=seconds)
        return self.is_set
