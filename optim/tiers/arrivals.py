"""Gradients on their way from a device to host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nvme_offload.offload.devices.device import CopyQueue, Event
from nvme_offload.offload.host.region import HostRegion

_NUM_ROOMS = 2  # one arrives, one is added


@dataclass(eq=False)
class _Arrival:
    """A gradient on its way."""

    to: object
    """What it belongs to: its block."""
    then: Callable[[], object]
    mark: Event | None = None
    """Behind its copy; None where an exception came before that was known."""


class Arrivals:
    """Copies gradients behind the host's back, on a stream of their own, and notices in order which have landed.

    A copy begins after what computes the gradient; the device's memory is free when it is over. Nothing here waits but
    `land`, and who needs a room that is still taken.

    Args:
        device: that the gradients come from.
        pinned: page-lock the memory in which they are added.
    """

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self._device = device
        self._queue = CopyQueue(device)
        self._pinned = pinned
        self._on_way: deque[_Arrival] = deque()
        self._rooms: list[HostRegion | None] = [None] * _NUM_ROOMS
        self._in_room: list[_Arrival | None] = [None] * _NUM_ROOMS
        self._next = 0

    def fill(self, to: object, target: torch.Tensor, grad: torch.Tensor, then: Callable[[], object]) -> None:
        """Copy a gradient to where it stays.

        Args:
            to: what it belongs to, which must keep `target` until it has landed.
            target: host memory of its shape and dtype.
            grad: on the device; it may be let go of at once.
            then: called when it has landed.
        """
        self._send(_Arrival(to, then), target, grad)

    def bring(self, to: object, grad: torch.Tensor, then: Callable[[torch.Tensor], object]) -> None:
        """Copy a gradient to where it is only needed for a moment: `then` gets it when it has landed."""
        number, self._next = self._next, (self._next + 1) % _NUM_ROOMS
        before = self._in_room[number]
        if before is not None:
            self._land_until(before)
        room = self._rooms[number]
        if room is None or room.size_bytes < grad.nbytes:
            room = self._rooms[number] = self._new_room(grad.nbytes)
        target = room.view(grad.dtype, 0, grad.numel()).view(grad.shape)
        arrival = self._in_room[number] = _Arrival(to, lambda: then(target))
        self._send(arrival, target, grad)

    def land(self, to: object = None) -> None:
        """Wait until all that belong to something have landed, or all there are; and do what follows for them."""
        last = next((one for one in reversed(self._on_way) if to is None or one.to is to), None)
        if last is not None:
            self._land_until(last)

    def land_finished(self) -> None:
        """Do what follows for those that have landed, without waiting."""
        while self._on_way and (mark := self._on_way[0].mark) is not None and mark.query():
            self._land_first()

    def concerns(self, to: object) -> bool:
        """Whether anything that belongs to this is on its way."""
        return any(arrival.to is to for arrival in self._on_way)

    def close(self) -> None:
        """Wait for the copies and do nothing more for them. Idempotent."""
        self._queue.wait()
        self._on_way.clear()
        for room in self._rooms:
            if room is not None:
                room.unpin()

    def _send(self, arrival: _Arrival, target: torch.Tensor, grad: torch.Tensor) -> None:
        self._on_way.append(arrival)  # first: whatever stops what follows, nobody takes the memory before it is over
        self._queue.come_after()
        self._queue.copy(target, grad)
        arrival.mark = self._queue.mark()

    def _land_until(self, last: _Arrival) -> None:
        if last in self._on_way:
            self._wait_for(last)  # and so for those before it: copies run in the order in which they are queued
        while last in self._on_way:
            self._land_first()

    def _wait_for(self, arrival: _Arrival) -> None:
        if arrival.mark is None:
            self._queue.wait()
        else:
            arrival.mark.synchronize()

    def _land_first(self) -> None:
        self._on_way.popleft().then()

    def _new_room(self, size_bytes: int) -> HostRegion:
        room = HostRegion(size_bytes)
        if self._pinned:
            room.pin(self._device)
        return room
