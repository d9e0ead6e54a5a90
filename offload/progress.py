"""A bar on standard error shows people how far something is that takes longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .warn import speaks_for_all

Item = TypeVar("Item")
Advance = Callable[[float], None]
"""Says that so much more is done, in whatever `progress` was given the total of."""

DELAY_SECONDS = 1.0
REFRESH_SECONDS = 0.1

_shown: list[_Bar] = []
"""The bar of what is under way; none, or the outermost one."""


@contextmanager
def progress(name: str, total: float) -> Iterator[Advance]:
    """Show how much of `total`, bytes for example, is done while the block runs.

    Silent where standard error is no terminal, on ranks other than the first, inside a block that shows its own, and
    for a second. Starts no thread, changes nothing on standard output, and is gone from the screen with the block.
    """
    if _shown or not total or not speaks_for_all() or sys.stderr is None or not sys.stderr.isatty():
        yield lambda amount: None
        return
    bar = _Bar(name, total)
    _shown.append(bar)
    try:
        yield bar.advance
    finally:
        _shown.clear()
        bar.stop()


def tracked(name: str, items: Collection[Item], size: Callable[[Item], float] = lambda item: 1.0) -> Iterator[Item]:
    """Go through `items` and show it, see `progress`. An item counts as done when the next one is asked for."""
    with progress(name, sum(map(size, items))) as advance:
        for item in items:
            yield item
            advance(size(item))


def say(line: str) -> None:
    """Print a line on standard error that stays, above the bar where one is shown."""
    console = _shown[0].console if _shown else Console(file=sys.stderr)
    console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Bar:
    """A bar that begins late and is drawn by whoever advances it."""

    def __init__(self, name: str, total: float) -> None:
        self.console = Console(file=sys.stderr)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(
            *columns,
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(name, total=total)
        self._next = time.monotonic() + DELAY_SECONDS

    def advance(self, amount: float) -> None:
        self._progress.advance(self._task, amount)
        if (now := time.monotonic()) >= self._next:
            self._next = now + REFRESH_SECONDS
            self._progress.start()
            self.console.show_cursor(True)  # whatever ends the process now leaves it as it was
            self._progress.refresh()

    def stop(self) -> None:
        self._progress.stop()
