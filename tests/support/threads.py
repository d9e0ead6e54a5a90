"""Calls that threads make at the same time."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def at_once(calls: Sequence[Callable[[], T]], patience: float = 60.0) -> list[T]:
    """Make each call in a thread of its own, all at once; returns what they return, or raises an error of one."""
    all_begin = threading.Barrier(len(calls))

    def work(call: Callable[[], T]) -> T:
        all_begin.wait(patience)
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(work, calls, timeout=patience))
