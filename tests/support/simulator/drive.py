"""The drive of a world, and the engine over it: the package's own owner thread and judging of completions."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass

from nvme_offload.aio_native.engine import EngineOptions, Op
from nvme_offload.aio_native.injection import Completion
from nvme_offload.aio_native.python_engine import OwnerThread, PythonEngine
from nvme_offload.aio_native.requests import Request
from tests.support.simulator.primitives import world

SECTOR_BYTES = 4096
_POISON = 0xA5  # what the memory of a read holds until its completion: nobody may look at it


@dataclass(frozen=True)
class DriveFault:
    """What befalls `count` requests from the `first` on."""

    kind: str  # ``short``, ``eintr``, ``eagain``, ``eio``, ``enospc`` (writes only), or ``flip``: other bytes, no error
    first: int
    count: int
    op: Op | None = None  # none: requests of both directions


@dataclass(eq=False)
class _UnderWay:
    thread: SimulatedThread
    request: Request
    fault: str


class Drive:
    """Takes requests, and completes them in an order of its own.

    Bytes move when a request completes, so whatever was done to memory too early is seen. A write that fails has
    changed some of its sectors.
    """

    def __init__(self, faults: Iterable[DriveFault], draw: random.Random) -> None:
        self.well = False  # whether it is to be well from now on
        self.struck: set[str] = set()  # the errors that it has answered with, by kind
        self.num_requests = 0
        self._faults = list(faults)
        self._draw = draw
        self._under_way: list[_UnderWay] = []

    @property
    def idle(self) -> bool:
        return not self._under_way

    def take(self, thread: SimulatedThread, request: Request) -> None:
        """Begin a request."""
        self.num_requests += 1
        if request.op is Op.READ:
            ctypes.memset(request.address, _POISON, request.asked_bytes)
        self._under_way.append(_UnderWay(thread, request, self._fault_of(request)))

    def complete_one(self) -> bool:
        """Complete any of the requests under way; False if there is none."""
        if not self._under_way:
            return False
        done = self._under_way.pop(self._draw.randrange(len(self._under_way)))
        done.thread.completed.append((done.request, self._result(done.request, done.fault)))
        return True

    def _fault_of(self, request: Request) -> str:
        if self.well:
            return ""
        for fault in self._faults:
            if fault.op not in (None, request.op) or (fault.kind == "enospc" and request.op is Op.READ):
                continue
            if fault.first <= self.num_requests < fault.first + fault.count:
                return fault.kind
        return ""

    def _result(self, request: Request, fault: str) -> int:
        if fault:
            self.struck.add(fault)
        if fault in ("eintr", "eagain"):
            return -getattr(errno, fault.upper())
        if fault in ("eio", "enospc"):
            if request.op is Op.WRITE and request.asked_bytes > SECTOR_BYTES and self._draw.random() < 0.5:
                self._move(request, self._draw.randrange(1, request.asked_bytes // SECTOR_BYTES) * SECTOR_BYTES)
            return -getattr(errno, fault.upper())
        size = request.asked_bytes
        if fault == "short" and size > 1:
            size = self._draw.randrange(1, size)
        moved = self._move(request, size)
        if fault == "flip" and moved > 0 and request.op is Op.READ:
            place = request.address + self._draw.randrange(moved)
            ctypes.memset(place, ctypes.c_ubyte.from_address(place).value ^ 1, 1)
        return moved

    def _move(self, request: Request, size_bytes: int) -> int:
        memory = (ctypes.c_char * size_bytes).from_address(request.address)
        call = os.preadv if request.op is Op.READ else os.pwritev
        try:
            return call(request.fd, [memory], request.offset)
        except OSError as error:
            return -(error.errno or errno.EIO)


class SimulatedThread(OwnerThread):
    def __init__(self, name: str, options: EngineOptions) -> None:
        self.completed: list[Completion] = []
        self._drive = world().drive
        self._rung = False
        super().__init__(name, options)

    def _open(self) -> None:
        pass

    def _start(self, request: Request) -> None:
        self._drive.take(self, request)

    def _reap(self, timeout: float | None) -> Iterable[Completion]:
        world().block(lambda: bool(self.completed or self._rung), timeout, "completions")
        self._rung = False
        completed, self.completed = self.completed, []
        return completed

    def _ring_bell(self) -> None:
        self._rung = True
        world().pause()


class SimulatedEngine(PythonEngine):
    """The package's Python engine, over the drive of the world."""

    name = "simulated"
    owner_type = SimulatedThread
