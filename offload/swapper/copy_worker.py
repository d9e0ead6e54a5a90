"""A thread that keeps staged copies going: it copies, submits and reaps, and never waits for one thing only."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nvme_offload.aio_native.bell import Bell
from nvme_offload.aio_native.starting import start
from nvme_offload.offload.host.buffer_pool import BufferPool, StagingBuffer
from nvme_offload.offload.storage.transfer import Transfer
from nvme_offload.offload.swapper.staged_copy import CopyQueues, DeviceCopy, StagedCopy, Waitable

_POLL_SECONDS = 0.001  # a device rings no bell


@dataclass(eq=False)
class _Flight:
    """A piece under way, with the buffer it holds."""

    copy: StagedCopy
    steps: Iterator[Waitable]
    buffer: StagingBuffer | None
    waits_for: Waitable


class CopyWorker:
    """Runs staged copies of one direction in a thread of its own.

    The thread sleeps until its bell rings. It is rung by the engine for every completed operation, by whoever
    submits a copy, and by the partner, the worker of the other direction, whenever that gives a buffer back. While a
    device copies, it looks again every millisecond instead of waiting for that alone. The thread only ever *tries* to
    acquire a buffer, so completed reads are always copied out and their buffers freed.

    While both workers have something to do, each holds at most half of the buffers: a queue of writes cannot keep a
    read waiting, and the other way round.

    Copies of one piece and copies of several take turns, so that a small tensor waits for a piece of a huge one and
    never for all of it. Within these two kinds the order is first come, first served.
    """

    def __init__(self, name: str, pool: BufferPool) -> None:
        self._pool = pool
        self._bell = Bell()
        self._calls: deque[Callable[[], None]] = deque()
        self._queues = CopyQueues()
        self._small: deque[StagedCopy] = deque()
        self._large: deque[StagedCopy] = deque()
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
    def alive(self) -> bool:
        """Whether the thread that copies runs."""
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or in flight."""
        return not (self._calls or self._small or self._large or self._flights)

    def submit(self, copy: StagedCopy) -> None:
        """Queue a copy and return at once. From any thread."""
        (self._large if copy.num_pieces > 1 else self._small).append(copy)
        self.ring()

    def call(self, function: Callable[[], None]) -> None:
        """Have the thread call a function soon. From any thread."""
        self._calls.append(function)
        self.ring()

    def ring(self) -> None:
        """Have the thread look around. From any thread."""
        self._bell.ring()

    def stop(self) -> None:
        """End the thread when all is done."""
        self._stopping = True
        if self.alive:
            self.ring()
            self._thread.join()

    def free(self) -> None:
        """Close the bell, once the engine that rings it is closed too. Idempotent."""
        self._bell.close()

    def _main(self) -> None:
        # A caller's tensor may be an inference tensor, which can only be written in this mode; others do not mind.
        with torch.inference_mode():
            while not (self._stopping and self.idle):
                # One of each in turn: a freed buffer is in use again before the next long copy.
                called = self._call_one()
                started = self._start_one()
                finished = self._finish_one()
                if not (called or started or finished):
                    self._bell.wait(_POLL_SECONDS if self._device_copies else None)

    @property
    def _device_copies(self) -> bool:
        return any(isinstance(flight.waits_for, DeviceCopy) for flight in self._flights)

    def _call_one(self) -> bool:
        if not self._calls:
            return False
        self._calls.popleft()()
        return True

    def _start_one(self) -> bool:
        """Begin the next piece; False if there is none, or no buffer for it."""
        copy = self._next_copy()
        if copy is None:
            return False
        wants_buffer = copy.takes_buffers and copy.num_pieces > 0
        buffer = self._try_acquire() if wants_buffer else None
        if wants_buffer and buffer is None:
            return False
        self._turn_of_large = copy.num_pieces <= 1
        try:
            if not copy.prepared:
                copy.prepared = True
                copy.prepare()
            if copy.num_pieces:
                self._begin(copy, buffer)
        except Exception as error:  # whatever it is, the caller's transfer raises it
            copy.fail(error)
            self._release(buffer)
        self._settle(copy)
        return True

    def _next_copy(self) -> StagedCopy | None:
        for queue in (self._small, self._large):
            while queue and queue[0].exhausted:
                queue.popleft()
        small, large = (queue[0] if queue else None for queue in (self._small, self._large))
        return (large or small) if self._turn_of_large else (small or large)

    def _begin(self, copy: StagedCopy, buffer: StagingBuffer | None) -> None:
        steps = copy.move(copy.num_started, buffer, self._queues)
        waits_for = next(steps, None)
        copy.num_started += 1
        if waits_for is None:
            self._release(buffer)
            return
        self._flights.append(_Flight(copy, steps, buffer, waits_for))
        copy.num_in_flight += 1
        self._hang_on(waits_for)

    def _hang_on(self, waits_for: Waitable) -> None:
        if isinstance(waits_for, Transfer) and not self._bell.hang_on(waits_for.operation):
            waits_for.operation.wait()  # wait here, and ring ourselves
            self._bell.ring()

    def _finish_one(self) -> bool:
        """Go on with a piece that waits for nothing any more; False if there is none."""
        flight = next((flight for flight in self._flights if flight.waits_for.done()), None)
        if flight is None:
            return False
        copy, following = flight.copy, None
        try:
            flight.waits_for.wait()
            if copy.error is None:
                following = next(flight.steps, None)
        except Exception as error:
            copy.fail(error)
        if following is not None:
            flight.waits_for = following
            self._hang_on(following)
            return True
        self._flights.remove(flight)
        self._release(flight.buffer)
        copy.num_in_flight -= 1
        self._settle(copy)
        return True

    def _settle(self, copy: StagedCopy) -> None:
        if copy.exhausted and copy.num_in_flight == 0:
            copy.on_done(copy)

    def _try_acquire(self) -> StagingBuffer | None:
        partner_idle = self._partner is None or self._partner.idle
        share = self._pool.num_buffers if partner_idle else self._pool.num_buffers // 2
        return self._pool.try_acquire() if len(self._flights) < max(1, share) else None

    def _release(self, buffer: StagingBuffer | None) -> None:
        if buffer is None:
            return
        buffer.release()
        if self._partner is not None:
            self._partner.ring()
