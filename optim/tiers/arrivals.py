"""Bring gradients from a device to host memory."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from nvme_offload.aio_native.finalizing import finalize
from nvme_offload.aio_native.starting import start
from nvme_offload.offload.devices.device import CopyQueue, Event, begin_thread
from nvme_offload.offload.host.page_locks import PageLocks
from nvme_offload.offload.host.region import HostRegion

_NUM_ROOMS = 2  # one arrives, one is added
_NUM_KEPT = 2  # one is copied, one waits for that: the stream that computes the third hardly waits for the first

_Handed = SimpleQueue["tuple[_Arrival, Event] | None"]


@dataclass(eq=False)
class _Arrival:
    """A gradient on its way."""

    to: object
    """The block that it belongs to."""
    then: Callable[[], object]
    grad: torch.Tensor | None
    """The gradient on the device, until its memory may be used again."""
    mark: Event | None = None
    """Comes behind its copy; None until the landing thread has been told."""
    has_landed: threading.Event = field(default_factory=threading.Event)
    """Set when `then` is done, or has failed."""
    failure: BaseException | None = None

    def land(self, mark: Event) -> None:
        """Wait for the copy, then call `then`."""
        try:
            mark.synchronize()
            self.grad = None
            self.then()
        except BaseException as error:
            self.failure = error
        self.has_landed.set()

    def let_go(self, queue: CopyQueue) -> None:
        """Let the device's memory be used again, behind the copy, by the stream that brought the gradient."""
        if self.grad is not None:  # else it has landed
            queue.let_current_come_after(self.mark)
            self.grad = None

    def forget_what_follows(self) -> None:
        """Call nothing when it has landed."""
        self.then = lambda: None


class Arrivals:
    """Copies gradients behind the host's back, on a stream of their own, and does what follows when each has landed.

    A thread of its own does that in the order of arrival. Whoever runs backward goes on: it waits in `land` alone, and
    for a room that is still taken.

    A copy begins after what computes the gradient. The device's memory is kept until two later gradients are there.
    Then the stream that brings them, on which it was allocated, waits for the copy and may use it again at once. So
    the device keeps two gradients, however many there are and however far it is behind the host.
    """

    def __init__(self, device: torch.device, locks: PageLocks) -> None:
        self.device = device
        self._queue = CopyQueue(device)
        self._locks = locks
        self._on_way: deque[_Arrival] = deque()
        self._rooms: list[HostRegion | None] = [None] * _NUM_ROOMS
        self._in_room: list[_Arrival | None] = [None] * _NUM_ROOMS
        self._kept: deque[_Arrival] = deque()
        self._next = 0
        self._handed: _Handed = SimpleQueue()
        thread = threading.Thread(
            target=_land_each, args=(self._handed, device), name="nvme_offload: gradients", daemon=True
        )
        self._end = finalize(self, _stop, self._handed, thread)
        start(thread)

    def fill(self, to: object, target: torch.Tensor, grad: torch.Tensor, then: Callable[[], object]) -> None:
        """Copy a gradient to where it stays; `then` is called in another thread when it has landed.

        `to` must keep `target`, host memory of the gradient's shape and dtype, until then. This thread must queue on
        the gradient's stream; it may let go of `grad` at once.
        """
        self._send(_Arrival(to, then, grad), target)

    def bring(self, to: object, grad: torch.Tensor, then: Callable[[torch.Tensor], object]) -> None:
        """Copy a gradient to where it is only needed for a moment: `then` gets it when it has landed."""
        number, self._next = self._next, (self._next + 1) % _NUM_ROOMS
        before = self._in_room[number]
        if before is not None:
            self._wait_for(before)
        room = self._rooms[number]
        if room is None or room.size_bytes < grad.nbytes:
            room = HostRegion(grad.nbytes)
            self._locks.lock(room, self.device, 'write "none" for offload_gradients.device')
            self._rooms[number] = room
        target = room.view(grad.dtype, 0, grad.numel()).view(grad.shape)
        arrival = self._in_room[number] = _Arrival(to, lambda: then(target), grad)
        self._send(arrival, target)

    def land(self, to: object = None) -> None:
        """Wait until all that belong to `to`, or all there are, have landed. It raises what a `then` raised, once."""
        last = next((one for one in reversed(self._on_way) if to is None or one.to is to), None)
        if last is not None:
            self._wait_for(last)
        self._forget_landed()

    def concerns(self, to: object) -> bool:
        """Return whether anything that belongs to `to` is on its way."""
        return any(arrival.to is to and not arrival.has_landed.is_set() for arrival in self._on_way)

    def close(self) -> None:
        """Wait for the copies, and call nothing for them. Idempotent."""
        for arrival in self._on_way:
            arrival.forget_what_follows()
        self._queue.wait()
        self._end()
        for kept in (self._on_way, self._kept):
            kept.clear()
        for room in self._rooms:
            if room is not None:
                room.unpin()

    def _send(self, arrival: _Arrival, target: torch.Tensor) -> None:
        assert arrival.grad is not None
        self._forget_landed()
        self._on_way.append(arrival)  # first: whatever stops what follows, nobody takes the memory before it is over
        self._kept.append(arrival)
        while len(self._kept) > _NUM_KEPT:
            self._kept[0].let_go(self._queue)
            self._kept.popleft()
        try:
            mark = self._queue.carry(target, arrival.grad).mark
        except torch.OutOfMemoryError:
            arrival.forget_what_follows()  # it would find another gradient there
            raise
        self._hand_over(arrival, mark)

    def _hand_over(self, arrival: _Arrival, mark: Event) -> None:
        self._handed.put((arrival, mark))
        arrival.mark = mark  # last: what an exception stops before this is handed over once more

    def _wait_for(self, last: _Arrival) -> None:
        for arrival in self._on_way:
            if arrival.mark is None:
                self._hand_over(arrival, self._queue.mark())
        last.has_landed.wait()

    def _forget_landed(self) -> None:
        while self._on_way and self._on_way[0].has_landed.is_set():
            failure = self._on_way.popleft().failure
            if failure is not None:
                raise failure


def _land_each(handed: _Handed, device: torch.device) -> None:
    """Run the landing thread, which keeps nothing alive while it has nothing to do."""
    begin_thread(device)
    while (item := handed.get()) is not None:
        arrival, mark = item
        if not arrival.has_landed.is_set():  # else it was handed over twice
            arrival.land(mark)
        del item, arrival, mark


def _stop(handed: _Handed, thread: threading.Thread) -> None:
    handed.put(None)
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join()
