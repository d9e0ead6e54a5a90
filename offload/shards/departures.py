"""Blocks of parameters on their way from host memory to a device that computes with them."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..devices.device import Event, sent, wait_for_all
from ..staging.block_cache import Block
from ..storage.tier import Memory


@dataclass(eq=False)
class Departure:
    """One copy of a block, from which all of its parameters are taken."""

    block: Block
    missing: set[object]
    """Places in the block that were not taken yet."""
    copy: torch.Tensor | None = None
    """On the device; None before it was made, and when all was taken."""
    mark: Event | None = None
    """Behind the copying; None where an exception came before that was known."""

    def send(self, memory: Memory, device: torch.device) -> None:
        """Start the copy."""
        self.copy, self.mark = sent(memory.view(torch.uint8, 0, self.block.size_bytes), device)

    def let_go(self) -> None:
        """Keep the copy for nobody any more."""
        self.copy = None


class Departures:
    """Copies blocks to a device, one at a time for each gather, on the stream on which FSDP2 gathers.

    The memory of a block is held until its copy is over, which the device says; who changes it, or takes it for another
    block, asks here first. The host waits for nothing else. `hold` brings a block into host memory and keeps it there
    for whom it is told.
    """

    def __init__(self, device: torch.device, hold: Callable[[Block, object], Memory]) -> None:
        self.device = device
        self._hold = hold
        self._on_way: deque[Departure] = deque()
        self._giving: dict[Block, Departure] = {}
        """Copies that not all places were taken from, of what is gathered together."""
        self._together: object = None

    def take(self, block: Block, place: object, places: Iterable[object], together: object) -> torch.Tensor:
        """Return a copy of a block, uint8 [bytes], on the device, as soon as its stream comes there.

        It is another copy when the same `place` asks again. The device's memory is not kept here after the last of
        `places`, or when somebody asks for what is not gathered `together` with it.
        """
        self._end_finished()
        if together is not self._together:  # a gather of those before was given up halfway
            for other in list(self._giving):
                self._give_no_more(other)
            self._together = together
        departure = self._giving.get(block)
        if departure is None or place not in departure.missing:
            departure = self._send(block, places)
        assert departure.copy is not None
        copy = departure.copy
        departure.missing.discard(place)
        if not departure.missing:
            self._give_no_more(block)
        return copy

    def knows(self, departure: object) -> bool:
        """Whether this is a copy that may not be over."""
        return departure in self._on_way

    def free_one(self) -> None:
        """Wait for copies until there is a block on a tier that nobody holds any more, if there can be."""
        while self._on_way:
            block = self._on_way[0].block
            self._wait_for(self._on_way[0])
            if not (block.stays or block.holds):
                return

    def end_all(self, block: Block) -> None:
        """Wait until a block may be changed; later gathers copy it again. Copies of others may still be under way."""
        self._give_no_more(block)
        while (departure := next((one for one in self._on_way if one.block is block), None)) is not None:
            self._wait_for(departure)

    def close(self) -> None:
        """Wait for all copies. Idempotent."""
        self._giving.clear()
        while self._on_way:
            self._wait_for(self._on_way[-1])

    def _send(self, block: Block, places: Iterable[object]) -> Departure:
        departure = Departure(block, set(places))
        self._on_way.append(departure)  # first: whatever stops what follows, nobody takes the memory before it is over
        try:
            memory = self._hold(block, departure)
        except BaseException:
            block.holders.discard(departure)
            self._on_way.remove(departure)
            raise
        departure.send(memory, self.device)
        self._giving[block] = departure
        return departure

    def _give_no_more(self, block: Block) -> None:
        if (departure := self._giving.pop(block, None)) is not None:
            departure.let_go()

    def _end_finished(self) -> None:
        while self._on_way and (mark := self._on_way[0].mark) is not None and mark.query():
            self._end(self._on_way[0])

    def _wait_for(self, departure: Departure) -> None:
        if departure.mark is None:
            wait_for_all(self.device)
        elif not departure.mark.query():
            departure.mark.synchronize()
        self._end(departure)
        self._end_finished()  # those before it are over, too, where one stream copies

    def _end(self, departure: Departure) -> None:
        self._on_way.remove(departure)
        departure.block.holders.discard(departure)  # what is read ahead is up to the next hold
