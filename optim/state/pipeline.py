"""Reads run ahead, writes run behind: the traffic of one step through a fixed number of staging buffers.

For every subgroup in turn a step acquires its state, updates it and releases it::

    read k+1, k+2 ...  |  update k  |  write k-1, k-2 ...

The steps go through the subgroups in alternating directions. What the end of one step leaves in the staging buffers is
what the next one wants first, so it starts without waiting and these reads never happen.

Subgroups that live in host memory (all on the cpu tier, some within a host budget) take no staging buffer: the window
of read-ahead looks past them, so that reads and writes go on while they are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Protocol

import torch

from nvme_offload.aio_native.bell import Bell
from nvme_offload.offload.errors import CorruptionError, StateError
from nvme_offload.offload.host.buffer_pool import BufferPool, StagingBuffer
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.storage.tier import Tier
from nvme_offload.optim.state.slots import Residency, SlotRecord
from nvme_offload.optim.stats import Meter, Span, SpanKind

KIND = "optimizer state"
"""What the bytes of this pipeline are counted as."""

_FAILURES = (OSError, CorruptionError)  # of a transfer: it did not happen, or brought other bytes
_PAUSE_SECONDS = 0.1
_UINT64 = (1 << 64) - 1  # checksums are unsigned; torch keeps them as int64


class Memory(Protocol):
    """Where a subgroup's state can be worked on: a staging buffer, or host memory of its own."""

    def view(self, dtype: torch.dtype, byte_offset: int, numel: int) -> torch.Tensor:
        """1D tensor over the bytes from `byte_offset`."""


class StepPipeline:
    """Subgroups on NVMe visit the staging buffers; those in host memory of their own are passed over on the way.

    Invariant: a slot holds a buffer exactly while it is in ``_resident``, and a buffer whose slot is DIRTY is never
    given up, so state that could not be written is still there when the drive is well again.

    Args:
        give_birth: fills the memory of a subgroup that has no state yet.
        meter: counts waiting and collects the timeline.
        tier: where the extents are; None where no subgroup has one.
        pool: staging buffers, each large enough for any subgroup with an extent.
        checksum: 1D int32 to its checksums, int64; what is read must have those of what was written. None: no checks.
    """

    def __init__(
        self,
        give_birth: Callable[[SlotRecord, Memory], None],
        meter: Meter,
        tier: Tier | None = None,
        pool: BufferPool | None = None,
        checksum: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._tier = tier
        self.pool = pool
        """May be exchanged after `drop_copies`."""
        self._give_birth = give_birth
        self._meter = meter
        self._checksum = checksum
        self._resident: list[SlotRecord] = []
        self._spare: BufferPool | None = None
        self._bell = Bell()
        self.on_pause: Callable[[], None] = lambda: None
        """Called now and then while waiting. May raise: what was waited for goes on and can be waited for again."""

    def acquire(
        self, order: Sequence[SlotRecord], position: int, *, for_change: bool = True, load: bool = True
    ) -> Memory:
        """The memory of ``order[position]`` with its valid state in it; reads of what follows on NVMe are under way.

        Args:
            order: subgroups in the order in which they will be asked for.
            position: of the one wanted now.
            for_change: first write again what could not be written. Readers do not insist: a drive that takes no more
                writes must not keep them from state that is still in memory.
            load: False when all of the state is about to be overwritten; then a copy on the tier is not read.

        Raises:
            SwapIOError: the read failed, or a write that ran behind did. What could not be written is still in its
                buffer, and the next call writes it again.
            CorruptionError: what was read is not what was written (with checksums on).
        """
        window, slot = self._window(order, position), order[position]
        if for_change:
            self._write_again()
        self._settle_finished()
        self._read_ahead(window, load)
        if slot.extent is None:
            return self._in_host_memory(slot)
        with self._meter.waiting():
            while slot.buffer is None or slot.transfer is not None:
                if any(other.transfer for other in self._resident):
                    self._await_completion()
                else:  # every buffer holds state that could not be written
                    self._take_spare_buffer(slot, load)
                self._settle_finished(slot)
                self._read_ahead(window, load)
        if slot.residency is Residency.UNBORN:
            self._give_birth(slot, slot.buffer)
        return slot.buffer

    def will_change(self, slot: SlotRecord) -> None:
        """Say that the acquired memory is about to differ from the tier."""
        if slot.extent is not None:
            slot.move_to(Residency.DIRTY)

    def release(self, slot: SlotRecord) -> None:
        """Done with the acquired memory: a change is written behind, anything else stays as a clean copy."""
        if slot.residency is Residency.DIRTY:
            self._start(slot, Residency.WRITING)

    def discard(self, slot: SlotRecord) -> None:
        """Forget the acquired memory, whatever was done to it: the drive still has what was there before.

        In host memory there is one copy, and nothing to go back to.
        """
        if slot.extent is not None:
            self._give_up_buffer(slot)

    def forget(self, slots: Iterable[SlotRecord]) -> None:
        """Give up subgroups that nobody will ask for: waits for their transfers, keeps nothing of their state."""
        for slot in slots:
            if slot.transfer is not None:
                slot.transfer.operation.wait(None)
                slot.transfer = None
            if slot.buffer is not None:
                self._give_up_buffer(slot)

    def synchronize(self) -> None:
        """Wait for everything under way.

        Raises:
            SwapIOError: a write failed. Its bytes are still in their buffer; the next call writes them again.
        """
        self._write_again()
        failure: Exception | None = None
        with self._meter.waiting():
            while any(slot.transfer for slot in self._resident):
                self._await_completion()
                try:
                    self._settle_finished()
                except _FAILURES as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def forget_failures(self) -> None:
        """Wait for everything under way. What failed is written again from here on, and not reported again."""
        with suppress(*_FAILURES):
            self.synchronize()

    def drop_copies(self) -> None:
        """Write what must be written and give up every buffer."""
        self.synchronize()
        for slot in list(self._resident):
            self._give_up_buffer(slot)
        self._spare = None

    def close(self) -> None:
        """Let the memory go, and what waiting needs. Nothing may be under way any more."""
        self._bell.close()
        self._resident.clear()
        self.pool = self._spare = None

    def _window(self, order: Sequence[SlotRecord], position: int) -> list[SlotRecord]:
        """The next subgroups on NVMe, as many as there are staging buffers."""
        on_tier = (order[i] for i in range(position, len(order)) if order[i].extent is not None)
        return list(islice(on_tier, self.pool.num_buffers if self.pool else 0))

    def _in_host_memory(self, slot: SlotRecord) -> Memory:
        if slot.region is None:
            region = HostRegion(slot.subgroup.size_bytes)
            self._give_birth(slot, region)
            slot.region = region
            slot.move_to(Residency.HOST)
        return slot.region

    def _read_ahead(self, window: Sequence[SlotRecord], load: bool = True) -> None:
        for slot in window:
            if slot.buffer is not None:
                continue
            assert self.pool is not None
            buffer = self.pool.try_acquire() or self._evict_outside(window)
            if buffer is None:
                return
            self._hold(slot, buffer, load)

    def _hold(self, slot: SlotRecord, buffer: StagingBuffer, load: bool) -> None:
        slot.buffer = buffer
        self._resident.append(slot)
        if load and slot.residency is Residency.ON_TIER:
            try:
                self._start(slot, Residency.READING)
            except BaseException:
                # A buffer that nothing is read into would later be taken for the valid state.
                self._give_up_buffer(slot)
                raise

    def _take_spare_buffer(self, slot: SlotRecord, load: bool) -> None:
        """For a reader when the drive takes no writes: a buffer outside the pool, so that state can be rescued."""
        assert self.pool is not None
        if self._spare is None:
            self._spare = BufferPool(1, self.pool.buffer_bytes)
        buffer = self._spare.try_acquire()
        if buffer is None:
            raise StateError(slot.name, "a staging buffer", "all of them hold state that the drive does not take")
        self._hold(slot, buffer, load)

    def _evict_outside(self, window: Sequence[SlotRecord]) -> StagingBuffer | None:
        for slot in self._resident:
            if slot.residency in (Residency.STAGED, Residency.UNBORN) and slot not in window:
                self._give_up_buffer(slot)
                assert self.pool is not None
                return self.pool.try_acquire()
        return None

    def _start(self, slot: SlotRecord, residency: Residency) -> None:
        assert self._tier is not None
        assert slot.extent is not None
        assert slot.buffer is not None
        start = self._tier.write if residency is Residency.WRITING else self._tier.read
        if residency is Residency.WRITING:
            slot.checksums = self._checksums_of(slot)
        slot.transfer = start(slot.extent, slot.buffer, what=slot.name, kind=KIND)
        slot.move_to(residency)
        self._bell.hang_on(slot.transfer.operation)

    def _await_completion(self) -> None:
        self._bell.wait(_PAUSE_SECONDS)
        self.on_pause()

    def _settle_finished(self, wanted: SlotRecord | None = None) -> None:
        """Take note of finished transfers; raise for a failed write, and for a failed read of the slot wanted now.

        Nobody waits for other reads that ran ahead: they are tried again when they are needed, and raise then.
        """
        failure: Exception | None = None
        for slot in list(self._resident):
            if slot.transfer is None or not slot.transfer.done():
                continue
            reading = slot.residency is Residency.READING
            try:
                self._settle(slot)
            except _FAILURES as error:
                if slot is wanted or not reading:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _settle(self, slot: SlotRecord) -> None:
        """Take note of a finished transfer; if it failed, make the record right and raise."""
        transfer, slot.transfer = slot.transfer, None
        assert transfer is not None
        reading = slot.residency is Residency.READING
        operation = transfer.operation
        kind: SpanKind = "read" if reading else "write"
        self._meter.spans.append(Span(kind, slot.subgroup.index, operation.submitted_ns, operation.completed_ns))
        try:
            transfer.wait()
        except OSError:
            slot.move_to(Residency.ON_TIER if reading else Residency.DIRTY)
            if reading:
                self._give_up_buffer(slot)
            raise
        slot.move_to(Residency.STAGED)
        if reading:
            self._verify(slot)

    def _checksums_of(self, slot: SlotRecord) -> torch.Tensor | None:
        if self._checksum is None or slot.buffer is None:
            return None
        return self._checksum(slot.buffer.view(torch.int32, 0, slot.subgroup.size_bytes // 4))

    def _verify(self, slot: SlotRecord) -> None:
        """Raise CorruptionError if what was read is not what was written; the buffer is given up."""
        actual = self._checksums_of(slot)
        if actual is None or slot.checksums is None or torch.equal(actual, slot.checksums):
            return
        block = int((actual != slot.checksums).nonzero()[0])
        pair = (int(slot.checksums[block]) & _UINT64, int(actual[block]) & _UINT64)
        self._give_up_buffer(slot)
        assert self._tier is not None
        assert slot.extent is not None
        raise CorruptionError(self._tier.path_of(slot.extent), slot.name, *pair)

    def _write_again(self) -> None:
        for slot in self._resident:
            if slot.residency is Residency.DIRTY:
                self._start(slot, Residency.WRITING)

    def _give_up_buffer(self, slot: SlotRecord) -> None:
        assert slot.buffer is not None
        if slot.residency is Residency.STAGED:
            slot.move_to(Residency.ON_TIER)
        slot.buffer.release()
        slot.buffer = None
        self._resident.remove(slot)


@contextmanager
def holding(pipeline: StepPipeline, slot: SlotRecord, *, change: bool, load: bool = True) -> Iterator[Memory]:
    """The state of one subgroup, outside a step; with `change` it is written back and waited for.

    If the block raises, what is on NVMe stays as it was. Without `load` the block must set all of the state.
    """
    memory = pipeline.acquire([slot], 0, for_change=change, load=load)
    try:
        yield memory
    except BaseException:
        if change:
            pipeline.discard(slot)
        raise
    if change:
        pipeline.will_change(slot)
        pipeline.release(slot)
        pipeline.synchronize()
