"""One unit on a tier that visits staging buffers, and the machine that moves it. Policy is left to who uses it.

Ctrl-C, a signal handler that raises and a MemoryError strike between any two steps of this code, and nobody can catch
all of them everywhere. So nothing here has to be undone. Five rules make every state in between a known one:

1. CPython runs handlers after a call, at the entry of a function and at a jump back, and nowhere else. Fields that must
   agree are set by assignments with no call between them: `Slot.become` sets residency and transfer so, and
   `BufferPool` the two ends of a lease.
2. Who owns a buffer stands in one place, at the pool. There is no free list and no list of residents to disagree:
   both are read off the leases. So no buffer has two owners, and none is lost.
3. Intent is written down first. A slot is READING or WRITING before its transfer is submitted; where an exception took
   the transfer away, the tier still knows which buffers it touches (`Tier.quiesce`), and `recover` waits for them.
4. Only the residency says whether bytes count. A buffer whose slot is UNBORN or ON_TIER holds nothing, whatever is in
   it, and may be given up; READING ends when its transfer has ended and its bytes were verified, not before.
5. A record is right before memory is given away, and memory is given away only when no transfer can touch it.

What was cut short is made good by the next call that looks: `Staging.recover`, which costs a look at each buffer.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from nvme_offload.aio_native.bell import Bell
from nvme_offload.offload.errors import CorruptionError, StateError, check_may_follow
from nvme_offload.offload.host.buffer_pool import BufferPool, StagingBuffer
from nvme_offload.offload.staging.home import VISITING, Home
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.tier import Tier
from nvme_offload.offload.storage.transfer import Transfer

FAILURES = (OSError, CorruptionError)
"""Errors with which a transfer fails: it did not happen, or it brought other bytes."""

_PAUSE_SECONDS = 0.1
_UINT64 = (1 << 64) - 1  # checksums are unsigned; torch keeps them as int64


class Residency(enum.Enum):
    """The residency tells where the valid copy of a slot's bytes is."""

    UNBORN = "unborn"
    """The bytes are nowhere: none has been written yet."""
    HOST = "host"
    """The bytes are in host memory of their own, for good."""
    ON_TIER = "on tier"
    """The bytes are only in the slot's extent."""
    READING = "reading"
    """The bytes are in the slot's extent, and on their way to a staging buffer."""
    STAGED = "staged"
    """The bytes are in the slot's extent and, equal, in a staging buffer, which may be taken away (evict)."""
    DIRTY = "dirty"
    """The bytes are only in a staging buffer, which must not be given up before it is written."""
    WRITING = "writing"
    """The bytes are in a staging buffer, and on their way to the slot's extent."""


_MAY_FOLLOW = {
    Residency.UNBORN: {Residency.DIRTY, Residency.HOST, Residency.ON_TIER},
    Residency.HOST: {Residency.UNBORN},
    Residency.ON_TIER: {Residency.READING, Residency.STAGED, Residency.DIRTY, Residency.UNBORN},
    Residency.READING: {Residency.STAGED, Residency.ON_TIER},
    Residency.STAGED: {Residency.DIRTY, Residency.ON_TIER},
    Residency.DIRTY: {Residency.WRITING, Residency.UNBORN},
    Residency.WRITING: {Residency.STAGED, Residency.DIRTY},
}
"""Which residency may follow which. UNBORN follows where the bytes are given up for good (`Staging.forget`); ON_TIER
follows it where a run that ended has left them (`StepPipeline.adopt`). ON_TIER with a buffer: somebody works
on what is in the buffer, which counts from STAGED or DIRTY on."""

_ON_THE_WAY = (Residency.READING, Residency.WRITING)
_EVICTABLE = (Residency.STAGED, Residency.ON_TIER, Residency.UNBORN)


@dataclass(eq=False)
class Slot:
    """A unit, where it lives, and what is happening to it."""

    index: int
    name: str
    """Messages call the slot this, as "parameters of layers.3"."""
    size_bytes: int
    extent: Extent | None = None
    home: Home = VISITING
    residency: Residency = Residency.UNBORN
    buffer: StagingBuffer | None = field(default=None, init=False)
    """The staging buffer that is leased to the slot: the pool sets this."""
    transfer: Transfer[StagingBuffer] | None = field(default=None, init=False)
    """The transfer under way while the slot is READING or WRITING."""
    checksums: torch.Tensor | None = field(default=None, init=False)
    """int64, of what was last written; None with checksums off, or before."""
    touched: int = field(default=0, init=False)
    """When it was last leased a buffer or used, on a clock of the machine's."""

    def become(self, residency: Residency) -> None:
        """Change the residency, or raise StateError. A transfer belongs to the old one and is let go."""
        check_may_follow(self.name, _MAY_FOLLOW, self.residency, residency)
        # No call in between: a signal handler sees both changed or neither.
        self.transfer = None
        self.residency = residency

    def lie_in(self, extent: Extent) -> None:
        """Note where its bytes are on the tier from here on."""
        self.extent = extent

    def note_checksums(self, checksums: torch.Tensor | None) -> None:
        """Note those of the bytes that are in its extent, or about to be; None: nobody knows them."""
        self.checksums = checksums

    @property
    def needs_read(self) -> bool:
        """Whether its bytes are in its extent only, and nothing brings them."""
        return self.residency is Residency.ON_TIER

    @property
    def evictable(self) -> bool:
        """Whether its buffer may be given up: what counts is elsewhere, or nowhere."""
        return self.residency in _EVICTABLE


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


class Staging(Generic[S]):
    """The machine: staging buffers of one kind, leased to slots, and the transfers between them and a tier.

    For one thread at a time. The tier is None where no slot has an extent. A buffer is large enough for any slot.
    `checksum` takes 1D int32 and gives int64: what is read must have those of what was written. None: no checks.
    """

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

    def wait(self, seconds: float | None = _PAUSE_SECONDS) -> None:
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

    def drop_spare(self) -> None:
        """Let the spare buffer go, which no slot may hold any more."""
        self._spare = None

    def close(self) -> None:
        """Let the memory go, and what waiting needs. Nothing may be under way any more."""
        self._bell.close()
        self._listener = None
        for pool in (*self._own_pools, self.pool):
            if pool is not None:
                pool.close()
        self.pool = self._spare = None
        self._own_pools.clear()

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
