"""THE mover: leases, transfers and checks of each slot, and the loop over all that have a buffer.

Note what is done, lease or evict, read ahead, write behind, wait, and go on after errors: all of it is here, for the
step's pipeline, the cache of blocks and the swapper's threads. Nothing has to be undone: what an exception cuts short
anywhere is made good by the next call (`Mover.recover`).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from nvme_offload.aio_native.bell import Bell
from ..errors import CorruptionError, StateError
from ..host.buffer_pool import BufferPool, StagingBuffer
from ..storage.extent import Extent
from ..storage.tier import Tier
from ..storage.transfer import Transfer
from .slot import Residency, Slot

FAILURES = (OSError, CorruptionError)
"""Errors with which a transfer fails: it did not happen, or it brought other bytes."""

PAUSE_SECONDS = 0.1
_UINT64 = (1 << 64) - 1  # checksums are unsigned; torch keeps them as int64

_ON_THE_WAY = (Residency.READING, Residency.WRITING)

S = TypeVar("S", bound=Slot)
S_in = TypeVar("S_in", bound=Slot, contravariant=True)


class WriteTarget(NamedTuple):
    """A part of a buffer goes to this extent: from byte `start` on, all that it holds where `size_bytes` is None."""

    extent: Extent
    start: int = 0
    size_bytes: int | None = None


class Sealer(Protocol[S_in]):
    """Sees to it that what is written can be found and trusted by another process."""

    def seal(self, slot: S_in) -> WriteTarget:
        """Complete what is in the buffer of a slot, and choose what of it goes where.

        What could not be written is asked for again.
        """

    def begin_read(self, slot: S_in) -> int | None:
        """Return how many of the first bytes of a slot's extent are read now, as the alignment allows; None: all."""

    def read_elsewhere(self, slot: S_in, error: CorruptionError) -> bool:
        """Whether another copy can be read in place of that which `verify` has found damaged."""

    def verify(self, slot: S_in) -> None:
        """Look whether what was read into the buffer of a slot is what was written.

        Raises:
            CorruptionError: it is not.
        """


AnySlot = TypeVar("AnySlot")
"""A slot, or whatever stands for it: in `offload plan` slots are numbers."""


def leaving(
    residents: Iterable[AnySlot], window: Iterable[AnySlot], may_leave: Callable[[AnySlot], bool]
) -> AnySlot | None:
    """Return the first resident outside the window that may leave its buffer with nothing lost or under way."""
    wanted = set(window)
    return next((slot for slot in residents if may_leave(slot) and slot not in wanted), None)


class Mover(Generic[S]):
    """Moves slots of one kind between staging buffers and a tier. For one thread at a time.

    A buffer whose slot is DIRTY is never given up, so bytes that could not be written are still there when the drive is
    well again. The tier is None where no slot has an extent. A buffer is large enough for any slot. `checksum` takes 1D
    int32 and gives int64: what is read must have those of what was written. None: no checks.

    First comes what may happen to one slot, then the loop over all that have a buffer. What is wanted next, and what
    must stay, is said by who uses it, in the methods from `_may_write` to `_begin`.
    """

    _prepare: Callable[[BufferPool], object] = staticmethod(lambda pool: None)
    """Gets staging buffers that are new, or whose memory was given back."""
    _is_parked = False

    def __init__(
        self,
        kind: str,
        tier: Tier | None,
        pool: BufferPool | None,
        checksum: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.kind = kind
        self.tier = tier
        self.pool = pool
        self.sealer: Sealer[S] | None = None
        """Completes what is written; None where the bytes end with the process."""
        self._own_pools: dict[BufferPool, None] = {}
        self._spare: BufferPool | None = None
        self._checksum = checksum
        self._listener: Bell | None = None
        self._bell = Bell()
        self._clock = count(1)

    @property
    def residents(self) -> list[S]:
        """Slots that hold a buffer, the one touched longest ago first; of those that rest in one of their own, none."""
        owners: list[S] = [owner for pool in (self.pool, self._spare) if pool is not None for owner in pool.owners]
        of_own = (owner for pool in self._own_pools for owner in pool.owners)
        owners += [owner for owner in of_own if owner.residency is not Residency.STAGED]
        return sorted(owners, key=attrgetter("touched"))

    def touch(self, slot: S) -> None:
        """Make a slot the one used last."""
        slot.touched = next(self._clock)

    def lease(self, slot: S) -> bool:
        """Give a slot a buffer that is free; False if none is."""
        self.wake()
        self.touch(slot)
        if slot.home.pool is not None:
            self._own_pools[slot.home.pool] = None
        pool = slot.home.pool or self.pool
        return pool is not None and pool.try_acquire(slot) is not None

    def lease_spare(self, slot: S) -> bool:
        """Give a slot a buffer outside the pool: a reader can rescue bytes with it when the drive takes no writes."""
        if self._spare is None and self.pool is not None:
            self._spare = BufferPool(1, self.pool.buffer_bytes)
        self.touch(slot)
        return self._spare is not None and self._spare.try_acquire(slot) is not None

    def start_read(self, slot: S) -> None:
        """Start bringing a slot's bytes into its buffer; after a SwapIOError `recover` makes the record right."""
        assert self.tier is not None
        assert slot.extent is not None
        assert slot.buffer is not None
        size_bytes = self.sealer.begin_read(slot) if self.sealer is not None else None
        slot.become(Residency.READING)
        slot.transfer = self.tier.read(slot.extent, slot.buffer, what=slot.name, kind=self.kind, size_bytes=size_bytes)
        self._ring_for(slot.transfer)

    def start_write(self, slot: S) -> None:
        """Start writing a changed slot to its extent. Raises as `start_read` does."""
        assert self.tier is not None
        assert slot.buffer is not None
        target = self._target_of(slot) if self.sealer is None else self.sealer.seal(slot)
        slot.become(Residency.WRITING)
        slot.transfer = self.tier.write(
            target.extent, slot.buffer, what=slot.name, kind=self.kind, start=target.start, size_bytes=target.size_bytes
        )
        self._ring_for(slot.transfer)

    def _ring_for(self, transfer: Transfer[StagingBuffer]) -> None:
        self._bell.hang_on(transfer.operation)
        if self._listener is not None:
            self._listener.hang_on(transfer.operation)

    def recover(self) -> None:
        """Make good what an exception cut short: wait for transfers that nobody has a handle of."""
        for slot in self.residents:
            if slot.transfer is None:
                self.halt(slot)

    def halt(self, slot: S) -> None:
        """Wait until nothing touches the buffer of a slot. What was on the way counts as not moved."""
        if slot.residency in _ON_THE_WAY:
            assert self.tier is not None
            if slot.buffer is not None:
                self.tier.quiesce(slot.buffer)
            slot.become(Residency.ON_TIER if slot.residency is Residency.READING else Residency.DIRTY)

    def wait(self, seconds: float | None = PAUSE_SECONDS) -> None:
        """Wait until some transfer is done, somebody rings, or `seconds` have passed; None: however long it takes."""
        self._bell.wait(seconds)

    def ring(self) -> None:
        """Wake who waits. From any thread."""
        self._bell.ring()

    def ring_also(self, bell: Bell) -> None:
        """Ring this bell, too, whenever a transfer is done that begins from here on: for who does not wait here."""
        self._listener = bell

    def settle(self, slot: S) -> None:
        """Take note of a transfer that is done, or raise: what was read wrong is given up, what did not go stays.

        What was read wrong and is elsewhere, too, is read again: then another transfer is under way.
        """
        assert slot.transfer is not None
        reading = slot.residency is Residency.READING
        try:
            slot.transfer.wait()
            if reading and slot.extent and slot.buffer and not slot.extent.arrive(slot.buffer):
                slot.become(Residency.ON_TIER)
                self.start_read(slot)
                return
            if reading:
                self._verify(slot)
        except FAILURES as error:
            slot.become(Residency.ON_TIER if reading else Residency.DIRTY)
            if isinstance(error, CorruptionError) and self.sealer and self.sealer.read_elsewhere(slot, error):
                self.start_read(slot)
                return
            if reading:
                self.give_up(slot)
            raise
        slot.become(Residency.STAGED)

    def give_up(self, slot: S) -> None:
        """End the lease of a slot that is `evictable`, or raise StateError where bytes would be lost."""
        if slot.residency is Residency.STAGED:
            slot.become(Residency.ON_TIER)
        if not slot.evictable or slot.transfer is not None:
            raise StateError(slot.name, "bytes that are on the tier", slot.residency.value)
        if slot.buffer is not None:
            slot.buffer.release()

    def forget(self, slot: S) -> None:
        """Keep nothing of a slot: wait for its transfer, and end its lease."""
        self.halt(slot)
        if slot.residency is Residency.STAGED:
            slot.become(Residency.ON_TIER)
        if slot.residency is not Residency.UNBORN:
            slot.become(Residency.UNBORN)
        self.give_up(slot)
        if slot.home.pool is not None:
            self._own_pools.pop(slot.home.pool, None)

    def close(self) -> None:
        """Let the memory go, and what waiting needs. Nothing may be under way any more."""
        self._bell.close()
        self._listener = None
        for pool in (*self._own_pools, self.pool):
            if pool is not None:
                pool.close()
        self.pool = self._spare = None
        self._own_pools.clear()

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
            self.wait()
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
        self._spare = None

    def park(self) -> None:
        """Write what was changed, and give the memory of all buffers back. The next lease takes it again.

        An exception loses nothing: what is not written is still in its buffer.
        """
        if self.tier is None or self.pool is None:
            return
        self.drop_copies()
        for slot in [owner for pool in self._own_pools for owner in pool.owners]:
            self.give_up(slot)
        self._is_parked = True  # first: whoever comes from here on registers them again
        self.tier.register([])
        for pool in (self.pool, *self._own_pools):
            pool.discard()

    def wake(self) -> None:
        """Take back the memory that `park` has given back; no-op without that."""
        if self._is_parked and self.tier is not None and self.pool is not None:
            self._prepare(self.pool)
            self.tier.register([self.pool])
            self._is_parked = False

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
        self._prepare = prepare
        prepare(larger)
        self.tier.register([larger])
        # In this order: an exception in between leaves nobody with a pool that is closed, and it is done again.
        self.pool = larger
        if before is not None:
            before.close()

    def _checksums_of(self, slot: S) -> torch.Tensor | None:
        if self._checksum is None or slot.buffer is None:
            return None
        return self._checksum(slot.buffer.view(torch.int32, 0, slot.size_bytes // 4))

    def _target_of(self, slot: S) -> WriteTarget:
        assert slot.extent is not None
        slot.note_checksums(self._checksums_of(slot))
        return WriteTarget(slot.extent)

    def _verify(self, slot: S) -> None:
        if self.sealer is not None:
            if self._checksum is not None:
                self.sealer.verify(slot)
            return
        actual = self._checksums_of(slot) if slot.checksums is not None else None
        if actual is None or slot.checksums is None or torch.equal(actual, slot.checksums):
            return
        place = int((actual != slot.checksums).nonzero()[0])
        pair = (int(slot.checksums[place]) & _UINT64, int(actual[place]) & _UINT64)
        assert self.tier is not None
        assert slot.extent is not None
        extent = f"{slot.name}: {self.tier.describe(slot.extent)}"
        raise CorruptionError(self.tier.path_of(slot.extent), extent, *pair)
