"""Saved tensors of a device: copied to host memory behind the forward, and back ahead of backward."""

import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable

import torch

from ..devices.device import CopyQueue, Event, Near
from .kept import Holder, SavedRecord

_NUM_LEAVING = 2  # one is copied, one waits for that: the stream that computes the third hardly waits for the first
NUM_AHEAD = 2
"""So many storages are brought before backward asks for them: one arrives while the one before it is computed with."""
_NUM_USED = 2  # views of one storage are asked for in turn: it is copied once for all of them
_MAX_ARRIVING = 4  # copies that the host may be ahead of the device: their host memory is not free before they end


class DeviceCopies:
    """Copies of saved storages between a device and host memory, on two streams beside the one that computes.

    The device keeps the last two that leave, two that are brought ahead, and two of those that backward has asked for,
    however many are saved. No memory is recorded for a stream (``record_stream``): its owner comes after the copy
    instead, and may use it again at once. So what the allocator reserves does not grow with the layers.

    Under the lock of the store. Nothing here waits, but `close`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._down, self._up = CopyQueue(device), CopyQueue(device)
        self._landing: OrderedDict[int, tuple[Event, torch.Tensor]] = OrderedDict()
        self._arriving: OrderedDict[int, tuple[Event, torch.Tensor]] = OrderedDict()
        """Marks behind copies and their host memory, by number of the record; nobody else may have that until then."""
        self._leaving: OrderedDict[int, tuple[Near, weakref.ref[Holder]]] = OrderedDict()
        self._ahead: OrderedDict[int, Near] = OrderedDict()
        self._used: deque[weakref.ref[Holder]] = deque()

    def leave(self, record: SavedRecord, source: torch.Tensor, target: torch.Tensor) -> Holder:
        """Copy a storage, 1D uint8, to host memory, and have the record hold both. The caller may let go of them."""
        near, number = self._down.carry(target, source), record.number
        self._landing[number] = near.mark, target
        holder = record.hold(target, near)
        self._leaving[number] = near, weakref.ref(holder)
        if len(self._leaving) > _NUM_LEAVING:
            self.forget([next(iter(self._leaving))])
        return holder

    def bring_ahead(self, number: int, source: torch.Tensor) -> None:
        """Copy a record's bytes, 1D uint8, from host memory to new memory of the device."""
        # It comes after what had the memory before, and after the copy that brought `source`: that was let go.
        near = self._ahead[number] = self._up.carry(torch.empty_like(source, device=self.device), source)
        self._arriving[number] = near.mark, source

    def take(self, holder: Holder, source: torch.Tensor | None) -> torch.Tensor:
        """Return the memory on the device, behind whose copy this thread's stream comes; brought now if it must be.

        `source` is the host memory to bring it from; None: it is `near` or ahead.
        """
        number, near = holder.record.number, holder.near
        if near is None:
            if number not in self._ahead:
                assert source is not None
                self.forget([*self._ahead])  # they were not what is asked for
                self.bring_ahead(number, source)
            near = self._ahead.pop(number)
            holder.hold_near(near)
            self._used.append(weakref.ref(holder))
            if len(self._used) > _NUM_USED:
                _forget(self._used.popleft())
        self._up.let_current_come_after(near.mark)
        return near.memory

    def has(self, holder: Holder) -> bool:
        """Whether the bytes are on the device, or on their way there."""
        return holder.near is not None or holder.record.number in self._ahead

    @property
    def may_bring(self) -> bool:
        """Whether one more can be brought ahead."""
        return len(self._ahead) < NUM_AHEAD and self.to_wait_for() is None

    def forget(self, numbers: Iterable[int]) -> None:
        """Let go of the device's memory of records, as far as it leaves or was brought ahead."""
        for number in numbers:
            if (near := self._ahead.get(number)) is not None:
                near.let_go()
                del self._ahead[number]
            if number in self._leaving:
                self._leaving[number][0].let_go()
                _forget(self._leaving.pop(number)[1])

    def copies(self, number: int) -> bool:
        """Whether a record's host memory is copied from or to at this moment."""
        _settle(self._landing)
        _settle(self._arriving)
        return number in self._landing or number in self._arriving

    def to_wait_for(self) -> Event | None:
        """Return what the host has to wait for before it brings more, having come far ahead of the device; or None."""
        _settle(self._arriving)
        marks = [mark for mark, _ in self._arriving.values()]
        return marks[-_MAX_ARRIVING] if len(marks) >= _MAX_ARRIVING else None

    def close(self) -> None:
        """Wait for all copies, and let go of all memory. Idempotent."""
        self._down.wait()
        self._up.wait()
        for kept in (self._landing, self._arriving, self._leaving, self._ahead, self._used):
            kept.clear()


def _settle(flights: OrderedDict[int, tuple[Event, torch.Tensor]]) -> None:
    while flights and next(iter(flights.values()))[0].query():
        flights.popitem(last=False)


def _forget(holder: weakref.ref[Holder]) -> None:
    if (held := holder()) is not None:
        held.hold_near(None)
