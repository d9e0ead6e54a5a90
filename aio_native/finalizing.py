"""Finalizers that lose no Ctrl-C.

Python prints what is raised in a finalizer, and goes on: a Ctrl-C that arrives while one joins a thread would end
neither the program nor the wait. `finalize` holds it back until the finalizer has returned.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from .interrupt import DeferredInterrupt, is_inside

P = ParamSpec("P")
T = TypeVar("T")
_LOOK_AGAIN_SECONDS = 0.001


def finalize(owner: T, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> weakref.finalize[..., T]:
    """Call ``function(*args, **kwargs)`` when `owner` is gone, as `weakref.finalize` does, and lose no Ctrl-C.

    Ctrl-C reaches the main thread as soon as the finalizer has returned; a second one ends it at once. When the
    interpreter ends it is dropped: there is no program left to stop.
    """
    return weakref.finalize(owner, _undisturbed, function, args, kwargs)


def _undisturbed(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    has_begun = False
    try:
        with DeferredInterrupt() as interrupt:
            has_begun = True
            try:
                with suppress(KeyboardInterrupt):  # a second one, which has ended a wait
                    function(*args, **kwargs)
            finally:
                if interrupt.take() and threading.main_thread().is_alive():
                    _thread.start_new_thread(_deliver_behind, (sys._getframe(1),))
    finally:
        if not has_begun:  # a handler raised before this was on its guard
            function(*args, **kwargs)


def _deliver_behind(finalizer: FrameType) -> None:
    """Send the main thread SIGINT when it has left a frame."""
    main = threading.main_thread().ident
    while main is not None and is_inside(sys._current_frames().get(main), finalizer):
        time.sleep(_LOOK_AGAIN_SECONDS)
    if main is not None:
        signal.pthread_kill(main, signal.SIGINT)
