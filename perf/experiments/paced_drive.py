"""An engine that is a model of a drive: one server of an exact rate, with the bytes in memory."""

import ctypes
import heapq
import math
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar
from unittest.mock import patch

from nvme_offload.aio_native.engine import Op
from nvme_offload.aio_native.injection import Completion
from nvme_offload.aio_native.null import NullThread
from nvme_offload.aio_native.python_engine import PythonEngine
from nvme_offload.aio_native.registry import REGISTRY, EngineEntry
from nvme_offload.aio_native.requests import Request

STANDS_IN_FOR = "aiofiles"  # the name under which a section gets this engine, inside `paced_drive`

_EARLY_SECONDS = 5e-5  # a completion so little ahead of its time is given at once: waking up takes as long


@dataclass(eq=False)
class Pace:
    """A pace says how fast bytes move; it may be changed while nothing is under way."""

    rate: float = math.inf  # bytes per second, of reads and writes together
    _idle_from: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def due(self, size_bytes: int) -> float:
        """Let the drive serve a request behind all others; return the moment at which it will be done."""
        with self._lock:
            self._idle_from = max(time.monotonic(), self._idle_from) + size_bytes / self.rate
            return self._idle_from


class PacedThread(NullThread):
    """Requests of all engines are served one after the other, in the order in which they come, by one drive."""

    pace: ClassVar[Pace] = Pace()

    def _open(self) -> None:
        super()._open()
        self._memory: dict[int, mmap.mmap] = {}
        self._due: list[tuple[float, int, Completion]] = []
        self._num_requests = 0

    def _start(self, request: Request) -> None:
        size = request.asked_bytes
        inside = self._address(request.fd, request.offset + size) + request.offset
        to, source = (request.address, inside) if request.op is Op.READ else (inside, request.address)
        ctypes.memmove(to, source, size)
        self._num_requests += 1
        heapq.heappush(self._due, (self.pace.due(size), self._num_requests, (request, size)))

    def _reap(self, timeout: float | None) -> Iterable[Completion]:
        wait = timeout
        if self._due:
            until_due = max(0.0, self._due[0][0] - time.monotonic())
            wait = until_due if timeout is None else min(timeout, until_due)
        if wait is None or wait > _EARLY_SECONDS:
            self._bell.wait(wait)
        completed = []
        now = time.monotonic() + _EARLY_SECONDS
        while self._due and self._due[0][0] <= now:
            completed.append(heapq.heappop(self._due)[2])
        return completed

    def _address(self, fd: int, end: int) -> int:
        """Return the bytes of a file: anonymous memory as large as the file, taken when they are first touched."""
        before = self._memory.get(fd)
        if before is None or len(before) < end:  # a file may grow
            self._memory[fd] = mmap.mmap(-1, max(end, os.fstat(fd).st_size))
            if before is not None:
                self._memory[fd][: len(before)] = before
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory[fd]))


class PacedEngine(PythonEngine):
    """A drive of an exact rate."""

    name = "paced"
    owner_type = PacedThread


@contextmanager
def paced_drive() -> Iterator[Pace]:
    """Inside, sections that name the engine `STANDS_IN_FOR` get this one; gives its pace, at first without limit."""
    entry = EngineEntry(__name__, PacedEngine.__name__, None, "a drive of an exact rate")
    PacedThread.pace.rate = math.inf
    with patch.dict(REGISTRY, {STANDS_IN_FOR: entry}):
        yield PacedThread.pace
