"""Move the state of one step through a fixed number of staging buffers: reads run ahead, writes run behind.

For every subgroup in turn a step acquires its state, updates it and releases it::

    read k+1, k+2 ...  |  update k  |  write k-1, k-2 ...

Steps that end before they return go through the subgroups in alternating directions. What the end of one step leaves in
the staging buffers is what the next one wants first, so it starts without waiting and these reads never happen. Updates
behind a step go in the order of the next forward, each time the same; what they want first is read in backward.

Where nobody waits for the end of the updates, but for the next one of them, reads go first: a drive that has both to
do would put what was changed long ago before what is wanted next. Writes then go on when there is nothing to read,
which at the latest is when the buffers are full of what is to be written.

Subgroups that live in host memory (all on the cpu tier, some within a host budget) take no staging buffer: the window
of read-ahead looks past them, so that reads and writes go on while they are updated.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from typing import Protocol

import torch

from nvme_offload.offload.errors import StateError
from nvme_offload.offload.host.buffer_pool import BufferPool, StagingBuffer
from nvme_offload.offload.staging.mover import FAILURES, PAUSE_SECONDS, Mover, Sealer
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.tier import Memory, Tier
from nvme_offload.offload.storage.transfer import Transfer
from ..telemetry.stats import Meter, Span, SpanKind
from .slots import Residency, SlotRecord
from .visits import may_write, window_of

KIND = "optimizer state"
"""The bytes of this pipeline are counted as this."""

_SPAN_OF: dict[Residency, SpanKind] = {Residency.READING: "read", Residency.WRITING: "write"}


class Seal(Sealer[SlotRecord], Protocol):
    """Makes of a subgroup's state in a buffer all that another process needs of it."""

    def replay(self, slot: SlotRecord) -> None:
        """Do the updates of the log that was read with the state. CorruptionError: it is not what was written."""

    @property
    def discards(self) -> bool:
        """Whether what is released is given up in place of being written: other state will take its place."""


class StepPipeline(Mover[SlotRecord]):
    """Subgroups on NVMe visit the staging buffers; those in host memory of their own are passed over on the way.

    `offload.staging` decides what happens to one of them, and to all that have a buffer; here is which comes next.

    Args:
        give_birth: fills the memory of a subgroup that has no state yet.
        tier: where the extents are; None where no subgroup has one.
        pool: staging buffers, each large enough for any subgroup with an extent.
        checksum: 1D int32 to its checksums, int64; what is read must have those of what was written. None: no checks.
        seal: completes what is written, so that another process can go on with it; None: nothing outlives this one.
    """

    def __init__(
        self,
        give_birth: Callable[[SlotRecord, Memory], None],
        meter: Meter,
        tier: Tier | None = None,
        pool: BufferPool | None = None,
        checksum: Callable[[torch.Tensor], torch.Tensor] | None = None,
        seal: Seal | None = None,
    ) -> None:
        super().__init__(KIND, tier, pool, checksum)
        self.sealer = self.seal = seal
        self._give_birth = give_birth
        self._meter = meter
        self._reads_go_first = False
        self._on_pause: Callable[[], None] | None = None

    def acquire(
        self,
        order: Sequence[SlotRecord],
        position: int,
        *,
        for_change: bool = True,
        load: bool = True,
        replay: bool = True,
    ) -> Memory:
        """Return the memory of ``order[position]`` with its valid state; reads of what follows on NVMe are under way.

        If a write that ran behind failed, this raises, its bytes stay in their buffer, and the next call writes them
        again. CorruptionError: what was read is not what was written (with checksums on).

        Args:
            order: subgroups in the order in which they will be asked for.
            position: the one wanted now.
            for_change: first write again what could not be written. Readers do not insist: a drive that takes no more
                writes must not keep them from state that is still in memory.
            load: False when all of the state is about to be overwritten; then a copy on the tier is not read.
            replay: False for whoever applies the log that is read with it; see `LogState.needs_replay`.
        """
        window, slot = self.window(order, position), order[position]
        if for_change:
            self.start_writes()
        self.settle_finished()
        self.read_ahead(window, load=load)
        if (memory := slot.home.memory) is not None:
            return self._at_home(slot, memory)
        while slot.buffer is None or slot.transfer is not None:
            with self._meter.waiting("staging buffers" if slot.buffer is None else "drive"):
                if for_change and self.is_quiet:
                    self.start_writes()  # which let reads go first that have ended by now
                if self.is_quiet:  # every buffer holds state that could not be written
                    self._take_spare_buffer(slot, load)
                else:
                    self.wait()
                self.settle_finished(slot)
                self.read_ahead(window, load=load)
        if slot.residency is Residency.UNBORN:
            self._give_birth(slot, slot.buffer)
        if replay and slot.log is not None and slot.log.needs_replay:
            self._catch_up(slot)
        return slot.buffer

    @contextmanager
    def reads_first(self) -> Iterator[None]:
        """Let writes begin in here only where `advance` finds the drive idle. Later, call `start_writes` once."""
        self._reads_go_first = True
        try:
            yield
        finally:
            self._reads_go_first = False

    @contextmanager
    def pausing(self, on_pause: Callable[[], None]) -> Iterator[None]:
        """Call `on_pause` now and then while something in here waits. If it raises, that can be waited for again."""
        self._on_pause = on_pause
        try:
            yield
        finally:
            self._on_pause = None

    def advance(self, ahead: Sequence[SlotRecord]) -> None:
        """Note what is done and start reads of the first of `ahead`, without waiting. It raises as `acquire` does."""
        self.settle_finished(ahead[0] if ahead else None)
        self.read_ahead(self.window(ahead))
        self.start_writes()

    def _may_write(self, slot: SlotRecord) -> bool:
        """Return whether one more write may begin: where reads go first, only beside few transfers."""
        num_under_way = sum(other.transfer is not None for other in self.residents)
        return may_write(num_under_way, reads_first=self._reads_go_first)

    def _may_leave(self, slot: SlotRecord) -> bool:
        """Return whether the buffer of a subgroup is one of those that all share, and may be another's."""
        return slot.evictable and slot.home.is_visited

    def window(self, order: Sequence[SlotRecord], position: int = 0) -> list[SlotRecord]:
        """Return the subgroups on NVMe from `position` on, as many as there are staging buffers.

        Between them come those with a buffer of their own that must be read first, or that are wanted now.
        """
        return window_of(
            islice(order, position, None),
            self.num_buffers,
            visits=lambda slot: slot.home.is_visited,
            reads_alone=lambda slot: slot.home.memory is None and (slot is order[position] or slot.needs_read),
        )

    def is_here(self, slot: SlotRecord) -> bool:
        """Return whether `acquire` for a change would wait for nothing: not for an old write either."""
        if slot.home.memory is not None:
            return True
        return slot.buffer is not None and slot.transfer is None and slot.residency is not Residency.DIRTY

    def waiting(self) -> AbstractContextManager[None]:
        """Count the time inside as waiting for the drive."""
        return self._meter.waiting()

    def begin_change(self, slot: SlotRecord) -> None:
        """Let changes of the acquired memory count only from `will_change` on; without that they are forgotten.

        In host memory there is one copy, and nothing to go back to.
        """
        if slot.residency is Residency.STAGED:
            slot.become(Residency.ON_TIER)

    def will_change(self, slot: SlotRecord, updated: Iterable[int] = ()) -> None:
        """Say that the acquired memory is about to differ from the tier; parameters in `updated` have a gradient."""
        if slot.home.memory is None:
            if slot.log is not None:
                slot.log.begin_version(frozenset(updated))
            slot.become(Residency.DIRTY)

    def release(self, slot: SlotRecord) -> None:
        """Let go of the acquired memory: a change is written behind, anything else stays as a clean copy."""
        if self.seal is not None and self.seal.discards:
            self.forget(slot)
        if slot.residency is Residency.DIRTY and slot.buffer is not None:
            if not self._reads_go_first:
                self.start_write(slot)
            elif self.seal is not None:  # as it is now, though it is written later
                self.seal.seal(slot)

    def writes_under_way(self) -> list[Transfer[StagingBuffer]]:
        """Return the transfers of all that is being written; what could not be written before is begun once more."""
        with suppress(*FAILURES):
            self.settle_finished()
        self.start_writes()
        return [slot.transfer for slot in self.residents if slot.residency is Residency.WRITING and slot.transfer]

    def adopt(self, slot: SlotRecord, extent: Extent, num_logged: int) -> None:
        """Take a subgroup's state from where a run that ended has left it, and keep nothing else of it.

        All of `extent` is read; it ends with `num_logged` entries of a log.
        """
        self.forget(slot)
        if slot.log is not None:
            slot.log.begin_anew(num_logged)
        slot.lie_in(extent)
        slot.note_checksums(None)
        slot.become(Residency.ON_TIER)

    def forget(self, slot: SlotRecord) -> None:
        """Give up a subgroup that nobody will ask for: wait for its transfer, and keep nothing of its state."""
        super().forget(slot)
        if slot.log is not None:
            slot.log.begin_anew(0)

    def synchronize(self) -> None:
        """Wait for everything under way, and count that. Bytes that could not be written stay: see `Mover`."""
        with self._meter.waiting():
            super().synchronize()

    def _catch_up(self, slot: SlotRecord) -> None:
        """Apply the log. Where an exception cuts that short, the state is read again: it must not be done twice."""
        assert self.seal is not None
        self.begin_change(slot)
        self.seal.replay(slot)
        slot.become(Residency.STAGED)

    def _at_home(self, slot: SlotRecord, memory: Memory) -> Memory:
        if slot.residency is Residency.UNBORN:
            self._give_birth(slot, memory)
            slot.become(Residency.HOST)
        return memory

    def _begin(self, slot: SlotRecord, *, load: bool) -> None:
        if slot.needs_read and slot.log is not None:
            slot.log.begin_read(load=load)
        super()._begin(slot, load=load)

    def _take_spare_buffer(self, slot: SlotRecord, load: bool) -> None:
        """Give a reader a buffer outside the pool when the drive takes no writes, so that state can be rescued."""
        if not self.lease_spare(slot):
            raise StateError(slot.name, "a staging buffer", "all of them hold state that the drive does not take")
        self._begin(slot, load=load)

    def wait(self, seconds: float | None = PAUSE_SECONDS) -> None:
        """Wait as `Mover.wait` does; see `pausing`."""
        super().wait(seconds)
        if self._on_pause is not None:
            self._on_pause()

    def settle(self, slot: SlotRecord) -> None:
        """Take note of a transfer that is done, and when the drive was at it."""
        if slot.transfer is not None:
            operation, kind = slot.transfer.operation, _SPAN_OF[slot.residency]
            self._meter.spans.append(Span(kind, slot.index, operation.submitted_ns, operation.completed_ns))
        super().settle(slot)


class HeldState(AbstractContextManager[Memory]):
    """The state of one subgroup, outside a step; it is written back and waited for.

    If the block raises, what is on NVMe stays as it was. Without `load` the block must set all of the state.
    """

    def __init__(self, pipeline: StepPipeline, slot: SlotRecord, *, load: bool = True) -> None:
        self._pipeline, self._slot, self._load = pipeline, slot, load

    def __enter__(self) -> Memory:
        memory = self._pipeline.acquire([self._slot], 0, load=self._load)
        self._pipeline.begin_change(self._slot)
        return memory

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._pipeline.will_change(self._slot)
            self._pipeline.release(self._slot)
            self._pipeline.synchronize()
