"""Ctrl-C at a place of our choosing."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """Holds SIGINT back inside a ``with`` block; whoever is in the block calls `deliver` where stopping is safe.

    On leaving, the handler that was there before is restored and, if a signal came, gets it. A second Ctrl-C gets it
    at once: a drive that no longer answers must not hold the program. Outside the main thread, where Python delivers
    no signals, this does nothing.
    """

    def __init__(self) -> None:
        self._pending = False
        self._installed = False

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            # None: a handler that Python did not install and could not restore. SIG_IGN and SIG_DFL need no deferring.
            if callable(self._previous):
                signal.signal(signal.SIGINT, self._note)
                self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._installed:
            return
        signal.signal(signal.SIGINT, self._previous)
        self._installed = False
        pending, self._pending = self._pending, False
        if pending and not isinstance(error, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def deliver(self) -> None:
        """Give a signal that came to the handler that was there before, which raises KeyboardInterrupt or does not."""
        if self._pending and callable(self._previous):
            self._pending = False
            self._previous(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending and callable(self._previous):
            self._previous(number, frame)
        self._pending = True
