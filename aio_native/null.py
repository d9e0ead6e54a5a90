"""The null engine: every request succeeds at once and no byte moves. What is left is our own overhead."""

from collections.abc import Iterable

from .bell import Bell
from .injection import Completion
from .python_engine import OwnerThread, PythonEngine
from .requests import Request


class NullThread(OwnerThread):
    """Completes every request as soon as it looks."""

    def _open(self) -> None:
        self._completed: list[Completion] = []
        # Not a SimpleQueue: its get() waits for ever when a short timeout ends while it begins (seen in Python 3.11).
        self._bell = Bell()

    def _start(self, request: Request) -> None:
        self._completed.append((request, request.asked_bytes))

    def _reap(self, timeout: float | None) -> Iterable[Completion]:
        if not self._completed:
            self._bell.wait(timeout)
        completed, self._completed = self._completed, []
        return completed

    def _ring_bell(self) -> None:
        self._bell.ring()

    def _shut(self) -> bool:
        self._bell.close()
        return True


class NullEngine(PythonEngine):
    """Completes without any I/O, through the code that all Python engines share (fio has one, too)."""

    name = "null"
    owner_type = NullThread
