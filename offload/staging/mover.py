"""THE loop over slots: note what is done, lease or evict, read ahead, write behind, wait, and go on after errors.

`Staging` says what may happen to one slot; here is what happens to all that have a buffer. What is wanted next, and
what must stay, is said by who uses it: the step's pipeline, and the cache of blocks. Nothing has to be undone: what an
exception cuts short anywhere is made good by the next call (`Staging.recover`).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.staging.slot import FAILURES, Residency, S, Staging

AnySlot = TypeVar("AnySlot")
"""A slot, or whatever stands for it: in `offload plan` slots are numbers."""


def leaving(
    residents: Iterable[AnySlot], window: Iterable[AnySlot], may_leave: Callable[[AnySlot], bool]
) -> AnySlot | None:
    """Return the first resident outside the window that may leave its buffer with nothing lost or under way."""
    wanted = set(window)
    return next((slot for slot in residents if may_leave(slot) and slot not in wanted), None)


class Mover(Staging[S]):
    """Moves slots through staging buffers. For one thread at a time.

    A buffer whose slot is DIRTY is never given up, so bytes that could not be written are still there when the drive is
    well again. The methods from `_may_write` to `_await_completion` are for who uses it to say more.
    """

    @property
    def num_buffers(self) -> int:
        """Count the staging buffers that all share."""
        return self.pool.num_buffers if self.pool is not None else 0

    @property
    def is_quiet(self) -> bool:
        """Whether no transfer is under way."""
        return not any(slot.transfer for slot in self.residents)

    def _may_write(self, slot: S) -> bool:
        """Whether the write of a changed slot may begin now."""
        return True

    def _may_leave(self, slot: S) -> bool:
        """Whether another slot may have the buffer of this one: nothing is lost, and nobody works on it."""
        return slot.evictable

    def _comes(self, slot: S) -> bool:
        """Whether a slot that is needed soon takes a buffer for that."""
        return True

    def _leaving(self, window: Sequence[S], place: int) -> S | None:
        """The slot whose buffer ``window[place]`` may have: of those that are not needed soon, the one used first."""
        return leaving(self.residents, window, self._may_leave)

    def _evict(self, slot: S) -> None:
        """Give up the buffer of a slot that may leave, for another."""
        self.give_up(slot)

    def _begin(self, slot: S, *, load: bool) -> None:
        """Begin the read of a slot that has a buffer, if it needs one; without `load` all of it will be overwritten."""
        if load and slot.needs_read:
            self.start_read(slot)

    def _await_completion(self) -> None:
        """Wait until some transfer is done, or for a moment."""
        self.wait()

    def read_ahead(self, window: Sequence[S], first: int = 0, *, load: bool = True, most: int | None = None) -> int:
        """Start reads of ``window[first:]`` as far as there are buffers, at most so many; return where to go on."""
        for place in range(first, len(window)):
            slot = window[place]
            if not self._comes(slot):
                continue
            if slot.buffer is None and not (self.lease(slot) or self._lease_of_other(window, place)):
                return place
            self._begin(slot, load=load)
            if most == 1:
                return place + 1
        return len(window)

    def _lease_of_other(self, window: Sequence[S], place: int) -> bool:
        other = self._leaving(window, place)
        if other is not None:
            self._evict(other)
        return other is not None and self.lease(window[place])

    def start_writes(self) -> None:
        """Begin to write what was changed and may be written, also what could not be written before."""
        for slot in self.residents:
            if slot.residency is Residency.DIRTY and self._may_write(slot):
                self.start_write(slot)

    def settle_finished(self, wanted: S | None = None, *, report_writes: bool = True) -> None:
        """Note finished transfers; raise for a failed read of the slot `wanted` now and, if told to, for failed writes.

        Nobody waits for other reads, which ran ahead: they are tried again when they are needed, and raise then. A
        write that failed leaves its bytes in their buffer; whoever needs that, or waits for all, writes them again.
        """
        self.recover()
        failure: Exception | None = None
        for slot in self.residents:
            if slot.transfer is None or not slot.transfer.done():
                continue
            reading = slot.residency is Residency.READING
            try:
                self.settle(slot)
            except FAILURES as error:
                if slot is wanted or (report_writes and not reading):
                    failure = failure or error
        if failure is not None:
            raise failure

    def synchronize(self) -> None:
        """Wait for everything under way. Bytes that could not be written stay, and the next call writes them again."""
        self.recover()
        self.start_writes()
        failure: Exception | None = None
        while not self.is_quiet:
            self._await_completion()
            try:
                self.settle_finished()
            except FAILURES as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def forget_failures(self) -> None:
        """Wait for everything under way. What failed is written again from here on, and not reported again."""
        with suppress(*FAILURES):
            self.synchronize()

    def drop_copies(self) -> None:
        """Write what must be written and give up every buffer."""
        self.synchronize()
        for slot in self.residents:
            self._evict(slot)
        self.drop_spare()

    def fit_pool(
        self, num_buffers: int, buffer_bytes: int, prepare: Callable[[BufferPool], object] = lambda pool: None
    ) -> None:
        """Have at least so many staging buffers of so many bytes: others, which `prepare` gets, where there are less.

        What was changed is written first.
        """
        before = self.pool
        if before is not None and num_buffers <= before.num_buffers and buffer_bytes <= before.buffer_bytes:
            return
        assert self.tier is not None
        larger = BufferPool(num_buffers, buffer_bytes)
        self.drop_copies()
        prepare(larger)
        self.tier.register([larger])
        # In this order: an exception in between leaves nobody with a pool that is closed, and it is done again.
        self.pool = larger
        if before is not None:
            before.close()
