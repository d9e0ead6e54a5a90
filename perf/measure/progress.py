"""How far a measurement is: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress:
    """Bars on a terminal, plain lines elsewhere. Goes to standard error: standard output is for results."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        """Print one line that stays."""
        self._console.print(line, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str, total: int | None) -> Iterator[Callable[[str], None]]:
        """Gives what is to be called, with a short text or none, after each of `total` pieces of work."""
        if not self._console.is_terminal:
            self.say(f"{name} ...")
            last = ""

            def note(text: str) -> None:
                nonlocal last
                last = text

            start = time.monotonic()
            yield note
            self.say(f"{name}: {time.monotonic() - start:.1f} s{', ' + last if last else ''}")
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        with Bars(*columns, TimeElapsedColumn(), console=self._console, transient=True) as bars:
            task = bars.add_task(name, total=total, text="")
            yield lambda text: bars.update(task, advance=1, text=text)
