"""A thread that keeps tasks going: it copies, submits and reaps, and never waits for one thing only."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from nvme_offload.aio_native.starting import start
from ..devices.device import CopyQueue, Event, use
from ..host.buffer_pool import BufferPool
from ..staging.mover import Mover
from ..staging.slot import Residency
from ..storage.transfer import Transfer
from .pieces import MIN_PIECE_BYTES, Piece
from .records import Queues, Task

_POLL_SECONDS = 0.001  # a device rings no bell
_PAUSE_SECONDS = 0.1  # no descriptor may have been left for a transfer to ring with


def _queue_of(device: torch.device) -> CopyQueue:
    use(device)
    return CopyQueue(device)


@dataclass(eq=False)
class _Flight:
    """A piece under way, and what it waits for: I/O, or a copy of a device."""

    task: Task
    piece: Piece
    steps: Iterator[Transfer[Any] | Event]
    waits_for: Transfer[Any] | Event | None = None

    @property
    def may_go_on(self) -> bool:
        """Whether what it waits for is over."""
        waits_for = self.waits_for
        assert waits_for is not None
        return waits_for.done() if isinstance(waits_for, Transfer) else waits_for.query()

    def go_on(self) -> bool:
        """Go to what is to be waited for next; False at the end, well or not."""
        self.waits_for = None
        try:
            if self.task.error is None:
                self.waits_for = next(self.steps, None)
        except Exception as error:  # whatever it is, the caller's transfer raises it
            self.task.fail(error)
        return self.waits_for is not None


class CopyWorker:
    """Moves the tasks of one direction in a thread of its own.

    The thread sleeps until it is rung. It is rung by the engine for every completed operation, by whoever submits a
    task, and by the partner, the worker of the other direction, whenever that gives a buffer back. While a device
    copies, it looks again every millisecond instead of waiting for that alone. The thread only ever *tries* to acquire
    a buffer, so completed reads are always copied out and their buffers freed.

    While both workers have something to do, each holds at most half of the buffers: a queue of writes cannot keep a
    read waiting, and the other way round.

    Tasks of one piece and tasks of several take turns, so that a small tensor waits for a piece of a huge one and never
    for all of it. Within these two kinds the order is first come, first served.

    This worker alone has `staging`; the partner uses `pool`, too. The thread calls `on_done` when a task is over.
    """

    def __init__(self, name: str, staging: Mover[Piece], pool: BufferPool, on_done: Callable[[Task], None]) -> None:
        self._staging = staging
        self._pool = pool
        self._on_done = on_done
        self._calls: deque[Callable[[], None]] = deque()
        self._queues: Queues = cache(_queue_of)
        self._small: deque[Task] = deque()
        self._large: deque[Task] = deque()
        self._turn_of_large = False
        self._flights: list[_Flight] = []
        self._stopping = False
        self._partner: CopyWorker | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self, partner: CopyWorker) -> None:
        """Start the thread that copies."""
        self._partner = partner
        start(self._thread)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not (self._calls or self._small or self._large or self._flights)

    def ring(self) -> None:
        """Have the thread look around. From any thread."""
        self._staging.ring()

    def submit(self, task: Task) -> None:
        """Queue a task and return at once. From any thread."""
        is_large = task.spec.size_bytes > min(MIN_PIECE_BYTES, self._pool.buffer_bytes)
        (self._large if is_large else self._small).append(task)
        self.ring()

    def call(self, function: Callable[[], None]) -> None:
        """Have the thread call a function soon. From any thread."""
        self._calls.append(function)
        self.ring()

    def stop(self) -> None:
        """End the thread when all is done."""
        self._stopping = True
        if self._thread.is_alive():
            self.ring()
            self._thread.join()

    def free(self) -> None:
        """Let go what waiting needs, once the engine that rings is closed too. Idempotent."""
        self._staging.close()

    def _main(self) -> None:
        # A caller's tensor may be an inference tensor, which can only be written in this mode; others do not mind.
        with torch.inference_mode():
            while not (self._stopping and self.idle):
                # One of each in turn: a freed buffer is in use again before the next long copy.
                called = self._call_one()
                started = self._start_one()
                finished = self._finish_one()
                if not (called or started or finished):
                    self._staging.wait(self._longest_wait)

    @property
    def _longest_wait(self) -> float | None:
        if any(not isinstance(flight.waits_for, Transfer) for flight in self._flights):
            return _POLL_SECONDS
        return _PAUSE_SECONDS if self._flights else None

    def _call_one(self) -> bool:
        if not self._calls:
            return False
        self._calls.popleft()()
        return True

    def _start_one(self) -> bool:
        """Begin the next piece; False if there is none, or no buffer for it."""
        task = self._next_task()
        if task is None:
            return False
        try:
            if task.to_begin is None:
                task.prepare()
        except Exception as error:
            task.fail(error)
        if not task.to_begin:  # it failed, or has no piece at all
            self._on_done(task)
            return True
        piece = task.to_begin[0]
        if piece.extent is not None and not self._lease(piece):
            return False
        task.to_begin.popleft()
        self._turn_of_large = not (self._large and task is self._large[0])
        self._flights.append(_Flight(task, piece, task.move(piece, self._staging, self._queues)))
        self._go_on(self._flights[-1])
        return True

    def _next_task(self) -> Task | None:
        for queue in (self._small, self._large):
            while queue and queue[0].exhausted:
                queue.popleft()
        small, large = (queue[0] if queue else None for queue in (self._small, self._large))
        return (large or small) if self._turn_of_large else (small or large)

    def _lease(self, piece: Piece) -> bool:
        partner_idle = self._partner is None or self._partner.idle
        share = self._pool.num_buffers if partner_idle else self._pool.num_buffers // 2
        return len(self._flights) < max(1, share) and self._staging.lease(piece)

    def _finish_one(self) -> bool:
        """Go on with a piece that waits for nothing any more; False if there is none."""
        flight = next((flight for flight in self._flights if flight.may_go_on), None)
        if flight is not None:
            self._go_on(flight)
        return flight is not None

    def _go_on(self, flight: _Flight) -> None:
        if flight.go_on():
            return
        self._flights.remove(flight)
        self._put_away(flight.piece)
        task = flight.task
        if task.exhausted and all(other.task is not task for other in self._flights):
            self._on_done(task)

    def _put_away(self, piece: Piece) -> None:
        """Give the buffer of a piece back, with whatever did not get to its extent."""
        self._staging.halt(piece)
        if piece.residency is Residency.DIRTY:
            self._staging.forget(piece)
        else:
            self._staging.give_up(piece)
        if self._partner is not None:
            self._partner.ring()
