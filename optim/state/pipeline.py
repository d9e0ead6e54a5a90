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

from nvme_offload.aio_native.bell import Bell
from nvme_offload.offload.errors import StateError
from nvme_offload.offload.host.buffer_pool import BufferPool, StagingBuffer
from nvme_offload.offload.staging.slot import FAILURES, Sealer, Staging
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.tier import Memory, Tier
from nvme_offload.offload.storage.transfer import Transfer
from nvme_offload.optim.state.slots import Residency, SlotRecord
from nvme_offload.optim.state.visits import leaving, may_write, window_of
from nvme_offload.optim.telemetry.stats import Meter, Span, SpanKind

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


class StepPipeline:
    """Subgroups on NVMe visit the staging buffers; those in host memory of their own are passed over on the way.

    `offload.staging.slot` decides what happens to one of them; here is which comes next. A buffer whose slot is DIRTY
    is never given up, so state that could not be written is still there when the drive is well again.

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
        self._staging: Staging[SlotRecord] = Staging(KIND, tier, pool, checksum)
        self._staging.sealer = self.seal = seal
        self._give_birth = give_birth
        self._meter = meter
        self._reads_go_first = False
        self._on_pause: Callable[[], None] | None = None

    @property
    def pool(self) -> BufferPool | None:
        """The staging buffers."""
        return self._staging.pool

    def use_pool(self, pool: BufferPool) -> None:
        """Exchange the staging buffers, after `drop_copies`."""
        self._staging.use_pool(pool)

    @property
    def residents(self) -> list[SlotRecord]:
        """Subgroups that hold a buffer, the one that has it longest first."""
        return self._staging.residents

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
        self._settle_finished()
        self._read_ahead(window, load)
        if (memory := slot.home.memory) is not None:
            return self._at_home(slot, memory)
        while slot.buffer is None or slot.transfer is not None:
            with self._meter.waiting("staging buffers" if slot.buffer is None else "drive"):
                if for_change and self.is_quiet:
                    self.start_writes()  # which let reads go first that have ended by now
                if self.is_quiet:  # every buffer holds state that could not be written
                    self._take_spare_buffer(slot, load)
                else:
                    self._await_completion()
                self._settle_finished(slot)
                self._read_ahead(window, load)
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
        self._settle_finished(ahead[0] if ahead else None)
        self._read_ahead(self.window(ahead))
        self.start_writes()

    def start_writes(self) -> None:
        """Begin to write what was changed, also what could not be written before."""
        for slot in self.residents:
            num_under_way = sum(other.transfer is not None for other in self.residents)
            if not may_write(num_under_way, reads_first=self._reads_go_first):
                return
            if slot.residency is Residency.DIRTY:
                self._staging.start_write(slot)

    def window(self, order: Sequence[SlotRecord], position: int = 0) -> list[SlotRecord]:
        """Return the subgroups on NVMe from `position` on, as many as there are staging buffers.

        Between them come those with a buffer of their own that must be read first, or that are wanted now.
        """
        return window_of(
            islice(order, position, None),
            self.pool.num_buffers if self.pool else 0,
            visits=lambda slot: slot.home.is_visited,
            reads_alone=lambda slot: slot.home.memory is None and (slot is order[position] or slot.needs_read),
        )

    def read_into_free_buffers(self, window: Sequence[SlotRecord], first: int) -> int:
        """Start reads of ``window[first:]`` as far as there are buffers, without waiting; return where to go on."""
        self._settle_finished()
        for place in range(first, len(window)):
            if window[place].buffer is None and not self._lease(window[place], window):
                return place
            self._begin(window[place], load=True)
        return len(window)

    def is_here(self, slot: SlotRecord) -> bool:
        """Return whether `acquire` for a change would wait for nothing: not for an old write either."""
        if slot.home.memory is not None:
            return True
        return slot.buffer is not None and slot.transfer is None and slot.residency is not Residency.DIRTY

    @property
    def is_quiet(self) -> bool:
        """Whether no transfer is under way."""
        return not any(slot.transfer for slot in self.residents)

    def waiting(self) -> AbstractContextManager[None]:
        """Count the time inside as waiting for the drive."""
        return self._meter.waiting()

    def ring(self, bell: Bell) -> None:
        """Ring this bell whenever a transfer is done that begins from here on."""
        self._staging.listener = bell

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
            self._forget(slot)
        if slot.residency is Residency.DIRTY and slot.buffer is not None:
            if self._reads_go_first:
                self._staging.complete(slot)
            else:
                self._staging.start_write(slot)

    def writes_under_way(self) -> list[Transfer[StagingBuffer]]:
        """Return the transfers of all that is being written; what could not be written before is begun once more."""
        with suppress(*FAILURES):
            self._settle_finished()
        self.start_writes()
        return [slot.transfer for slot in self.residents if slot.residency is Residency.WRITING and slot.transfer]

    def adopt(self, slot: SlotRecord, extent: Extent, num_logged: int) -> None:
        """Take a subgroup's state from where a run that ended has left it, and keep nothing else of it.

        All of `extent` is read; it ends with `num_logged` entries of a log.
        """
        self._forget(slot, num_logged)
        self._staging.adopt(slot, extent)

    def forget(self, slots: Iterable[SlotRecord]) -> None:
        """Give up subgroups that nobody will ask for: wait for their transfers, and keep nothing of their state."""
        for slot in slots:
            self._forget(slot)

    def _forget(self, slot: SlotRecord, num_logged: int = 0) -> None:
        self._staging.forget(slot)
        if slot.log is not None:
            slot.log.begin_anew(num_logged)

    def synchronize(self) -> None:
        """Wait for everything under way. Bytes that could not be written stay, and the next call writes them again."""
        self._staging.recover()
        self.start_writes()
        failure: Exception | None = None
        with self._meter.waiting():
            while any(slot.transfer for slot in self.residents):
                self._await_completion()
                try:
                    self._settle_finished()
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
            self._staging.give_up(slot)
        self._staging.drop_spare()

    def close(self) -> None:
        """Let the memory go, and what waiting needs. Nothing may be under way any more."""
        self._staging.close()

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

    def _read_ahead(self, window: Sequence[SlotRecord], load: bool = True) -> None:
        for slot in window:
            if slot.buffer is None and not self._lease(slot, window):
                return
            self._begin(slot, load)

    def _lease(self, slot: SlotRecord, window: Sequence[SlotRecord]) -> bool:
        return self._staging.lease(slot) or (self._evict_outside(window) and self._staging.lease(slot))

    def _begin(self, slot: SlotRecord, load: bool) -> None:
        if slot.needs_read:
            if slot.log is not None:
                slot.log.begin_read(load=load)
            if load:
                self._staging.start_read(slot)

    def _take_spare_buffer(self, slot: SlotRecord, load: bool) -> None:
        """Give a reader a buffer outside the pool when the drive takes no writes, so that state can be rescued."""
        if not self._staging.lease_spare(slot):
            raise StateError(slot.name, "a staging buffer", "all of them hold state that the drive does not take")
        self._begin(slot, load)

    def _evict_outside(self, window: Sequence[SlotRecord]) -> bool:
        slot = leaving(self.residents, window, lambda slot: slot.evictable and slot.home.is_visited)
        if slot is not None:
            self._staging.give_up(slot)
        return slot is not None

    def _await_completion(self) -> None:
        self._staging.wait()
        if self._on_pause is not None:
            self._on_pause()

    def _settle_finished(self, wanted: SlotRecord | None = None) -> None:
        """Note finished transfers; raise for a failed write, and for a failed read of the slot wanted now.

        Nobody waits for other reads that ran ahead: they are tried again when they are needed, and raise then.
        """
        self._staging.recover()
        failure: Exception | None = None
        for slot in self.residents:
            if slot.transfer is None or not slot.transfer.done():
                continue
            reading = slot.residency is Residency.READING
            operation, kind = slot.transfer.operation, _SPAN_OF[slot.residency]
            self._meter.spans.append(Span(kind, slot.index, operation.submitted_ns, operation.completed_ns))
            try:
                self._staging.settle(slot)
            except FAILURES as error:
                if slot is wanted or not reading:
                    failure = failure or error
        if failure is not None:
            raise failure


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
