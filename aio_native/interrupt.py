"""Ctrl-C at a place of our choosing."""

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class DeferredInterrupt:
    """Holds SIGINT back inside a ``with`` block; whoever is in the block calls `deliver` where stopping is safe.

    On leaving, the handler that was there before is restored and, if a signal came, gets it. Outside the main thread,
    where Python delivers no signals, this does nothing.
    """

    # SIGINT comes                     what happens                            or else
    # 1. in the block, the first       noted, for `deliver` or the end         a step would be cut off anywhere
    # 2. in the block, once more       the handler of before gets it at once   a drive that hangs would hold the program
    # 3. behind a block whose end was  that handler is put back and gets it;   ours would keep every Ctrl-C from then on
    #    cut off by another handler    a block that is entered looks past ours
    # 4. while no function handles it  nothing was installed                   there would be nobody to hand it to

    def __init__(self) -> None:
        self._pending = False
        self._installed = False
        self._caller: FrameType | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = _looking_past_those_left(signal.getsignal(signal.SIGINT), sys._getframe(1))
            # None: a handler that Python did not install and could not restore. SIG_IGN and SIG_DFL need no deferring.
            if callable(self._previous):
                self._caller = sys._getframe(1)  # first: a SIGINT that came before it would be taken for case 3
                try:
                    signal.signal(signal.SIGINT, self._note)
                except BaseException:  # of another signal's handler: a `with` that was not entered calls no __exit__
                    signal.signal(signal.SIGINT, self._previous)
                    raise
                self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._installed:
            return
        signal.signal(signal.SIGINT, self._previous)
        self._installed = False
        self._caller = None  # whoever puts our handler back later is outside the block: case 3
        if self.take() and not isinstance(error, KeyboardInterrupt):  # one Ctrl-C is one KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)

    def deliver(self) -> None:
        """Give a signal that came to the handler that was there before, which raises KeyboardInterrupt or does not."""
        if self._pending and callable(self._previous):
            self._pending = False  # before it raises: `__exit__` would raise the signal again
            self._previous(signal.SIGINT, None)

    def take(self) -> bool:
        """Say whether a signal came, and leave what follows from it to the caller."""
        pending, self._pending = self._pending, False
        return pending

    def _note(self, number: int, frame: FrameType | None) -> None:
        left = frame is not None and not is_inside(frame, self._caller)  # None: `deliver` of a block inside this one
        if left:  # put back first, for the handler may raise
            signal.signal(signal.SIGINT, self._previous)
        if (left or self._pending) and callable(self._previous):
            self._previous(number, frame)
        self._pending = not left


def is_inside(frame: FrameType | None, outer: FrameType | None) -> bool:
    """Whether a frame is `outer`, or was called from there."""
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None


def _looking_past_those_left(handler: Any, frame: FrameType) -> Any:
    """Return a handler of SIGINT, or what was there before, where it is of a block that is no longer on the stack."""
    while isinstance(owner := getattr(handler, "__self__", None), DeferredInterrupt):
        if is_inside(frame, owner._caller):
            break  # a block around this one, which is to hear of it
        handler = owner._previous
    return handler
