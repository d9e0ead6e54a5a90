"""Blocks on NVMe that visit a fixed set of staging buffers: read ahead, written behind, kept while needed soonest.

A block is what is read, used and written as one. Whoever uses one holds it, which keeps it in its buffer; whoever
changed it says so when releasing it, and the write runs behind. What the buffers keep is what is needed soonest, by the
order of earlier uses (`offload.staging.use_order`).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from nvme_offload.aio_native.bell import Bell
from nvme_offload.offload.errors import CorruptionError, StateError
from nvme_offload.offload.host.buffer_pool import BufferPool, StagingBuffer
from nvme_offload.offload.staging.use_order import UseOrder
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.tier import Tier
from nvme_offload.offload.storage.transfer import Transfer

_FAILURES = (OSError, CorruptionError)
_PAUSE_SECONDS = 0.1
_UINT64 = (1 << 64) - 1  # checksums are unsigned; torch keeps them as int64


class Residency(enum.Enum):
    """Where the valid copy of a block is."""

    EMPTY = "empty"
    """Nowhere: nothing was put into it yet."""
    ON_TIER = "on tier"
    """Only in its extent."""
    READING = "reading"
    """In its extent, and on its way to a staging buffer."""
    STAGED = "staged"
    """In its extent and, equal to it, in a staging buffer."""
    DIRTY = "dirty"
    """Only in a staging buffer, which must not be given up before it is written."""
    WRITING = "writing"
    """In a staging buffer, and on its way to its extent."""


@dataclass(eq=False)
class Block:
    """A block, where it lives, and what is happening to it."""

    index: int
    name: str
    """For messages, as "parameters of layers.3"."""
    size_bytes: int
    extent: Extent
    residency: Residency = Residency.EMPTY
    buffer: StagingBuffer | None = None
    """Held while READING, STAGED, DIRTY or WRITING."""
    transfer: Transfer[StagingBuffer] | None = None
    """Under way while READING or WRITING."""
    holds: int = 0
    """Users that need it in its buffer."""
    unreadable: bool = False
    """The latest read failed: it is not read ahead then, only by who needs it."""
    unused: bool = False
    """Read ahead and not used since."""
    deferred: bool = False
    """DIRTY, and written when something else is needed: the next change may be to the same block."""
    checksums: torch.Tensor | None = None
    """int64, of what was last written; None with checksums off, or before."""


@dataclass
class CacheStats:
    """Counters since construction."""

    uses: int = 0
    """Times a block was held whose bytes were needed."""
    reads: int = 0
    """Reads from the tier."""
    reads_ahead: int = 0
    """Of those, started before anybody waited for them."""
    reads_unused: int = 0
    """Of those, given up again without having been used: the order was not as it had been."""
    wait_seconds: float = 0.0
    """Time that users spent waiting for reads, or for a buffer."""


class BlockCache:
    """Blocks of one kind on one tier, and their staging buffers. For one thread at a time.

    Args:
        tier: where the extents are; closed with the cache.
        kind: what the bytes are counted as, for example "parameters".
        num_buffers: staging buffers, each as large as the largest block; at least 2.
        read_ahead: start reads before they are needed. Off, every read is waited for (to measure what it saves).
        checksum: 1D int32 to its checksums, int64; what is read must have those of what was written. None: no checks.
    """

    def __init__(
        self,
        tier: Tier,
        kind: str,
        num_buffers: int,
        *,
        read_ahead: bool = True,
        checksum: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.tier = tier
        self.kind = kind
        self.order = UseOrder()
        self.stats = CacheStats()
        self.on_pressure: Callable[[], None] = lambda: None
        """Called when no buffer can be had: gives back holds that nobody needs any more."""
        self.is_needed: Callable[[Block], bool] = lambda block: True
        """Whether what the extent holds still means something: only that is read ahead."""
        self.blocks: list[Block] = []
        self.num_buffers = num_buffers
        self._read_ahead_enabled = read_ahead
        self._checksum = checksum
        self._pool = BufferPool(num_buffers, 1)
        self._resident: list[Block] = []  # the one used longest ago first
        self._bell = Bell()

    @property
    def staging_bytes(self) -> int:
        """Host memory of the staging buffers."""
        return self._pool.size_bytes

    @property
    def buffer_bytes(self) -> int:
        """Of each staging buffer."""
        return self._pool.buffer_bytes

    def add(self, blocks: Sequence[tuple[str, int]]) -> list[Block]:
        """New blocks, by name and bytes, all of their space promised.

        Raises:
            OutOfSpaceError: names bytes needed and free; nothing was added.
            SwapIOError: a write that ran behind failed; nothing was added.
        """
        self._finish_transfers()  # and reads nothing ahead: the buffers may be exchanged
        extents = self.tier.reserve([size_bytes for _, size_bytes in blocks])
        first = len(self.blocks)
        added = [
            Block(first + place, name, extent.size_bytes, extent)
            for place, ((name, _), extent) in enumerate(zip(blocks, extents, strict=True))
        ]
        self._fit_pool(max((block.size_bytes for block in added), default=0))
        self.blocks += added
        return added

    def drop(self, blocks: Sequence[Block]) -> None:
        """Forget the latest blocks, which nobody holds, with what was put into them, and free their space."""
        for block in blocks:
            self.blocks.remove(block)
            if block.transfer is not None:
                block.transfer.operation.wait(None)
                block.transfer = None
            if block.buffer is not None:
                self._give_up_buffer(block)
            self.tier.free(block.extent)

    def hold(
        self, block: Block, *, change: bool = False, load: bool = True, in_order: bool = True, is_new: bool = True
    ) -> StagingBuffer:
        """Keep a block in a staging buffer, with its bytes in it, until `release`.

        Args:
            block: which.
            change: the bytes will be changed; waits for a write of them that is under way.
            load: False where all of it is about to be overwritten; then nothing is read. A block that nothing was put
                into yet is full of zeros.
            in_order: this use is part of the order that repeats itself; what follows it is read ahead.
            is_new: False for the continuation of a use, which is not counted as another.

        Raises:
            SwapIOError: the read failed, or no buffer is free because writes behind failed. Nothing is lost: what
                could not be written is still in memory and is written again by the next call.
            CorruptionError: what was read is not what was written (with checksums on).
        """
        self._settle_finished()
        self._write_deferred(block)
        self.stats.uses += load and is_new
        block.holds += 1  # nothing that follows takes its buffer, or gives it one
        try:
            if block.buffer is None:
                self._start_reading(block, self._buffer_for(block), load=load)
            while block.transfer is not None and (change or block.residency is Residency.READING):
                self._await_completion()
                self._settle_finished(wanted=block)
                if in_order:
                    self._read_ahead()
        except BaseException:
            block.holds -= 1
            raise
        assert block.buffer is not None
        block.unused = False
        self._resident.remove(block)
        self._resident.append(block)
        if in_order:
            self._read_ahead()
        return block.buffer

    def release(self, block: Block, *, changed: bool = False, in_order: bool = True) -> None:
        """Done with a held block; a change is written behind, after the last of its uses in a row.

        Raises:
            SwapIOError: the write cannot be started. The bytes stay in memory and are written by the next call.
        """
        block.holds -= 1
        if changed:
            block.residency = Residency.DIRTY
            block.deferred = not in_order or self.order.is_next_in_step(block.index)
            if not block.deferred:
                self._start_writing(block)
        self._settle_finished()
        if in_order:
            self._read_ahead()

    @contextmanager
    def holding(
        self, block: Block, *, change: bool = False, load: bool = True, in_order: bool = True
    ) -> Iterator[StagingBuffer]:
        """`hold` and `release` around a piece of code. With `change`, whatever it did is kept, also when it raises."""
        buffer = self.hold(block, change=change, load=load, in_order=in_order)
        try:
            yield buffer
        finally:
            self.release(block, changed=change, in_order=in_order)

    def advance(self) -> None:
        """Start what has become possible since the latest call: reads into the buffers of writes that are done."""
        self._settle_finished()
        self._read_ahead()

    def synchronize(self) -> None:
        """Wait for everything under way.

        Raises:
            SwapIOError: a write failed. Its bytes are still in their buffer; the next call writes them again.
        """
        self._finish_transfers()
        self._read_ahead()

    def _finish_transfers(self) -> None:
        self._write_again()
        failure: Exception | None = None
        while any(block.transfer for block in self._resident):
            self._await_completion()
            try:
                self._settle_finished(report_writes=True)
            except _FAILURES as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End what is under way, free the memory, delete the swap files. Idempotent."""
        self.tier.close()
        self._pool.close()
        self._bell.close()
        self._resident.clear()
        self.blocks.clear()

    def _fit_pool(self, size_bytes: int) -> None:
        if size_bytes <= self._pool.buffer_bytes:
            return
        for block in list(self._resident):
            self._give_up_buffer(block)
        larger = BufferPool(self.num_buffers, size_bytes)
        self.tier.register([larger])
        self._pool.close()
        self._pool = larger

    def _read_ahead(self) -> None:
        """Fill the buffers with what is needed soonest. A hint: what fails here is tried again when it is needed."""
        if not self._read_ahead_enabled:
            return
        window = [self.blocks[index] for index in self.order.soonest(self.num_buffers) if index < len(self.blocks)]
        for place, block in enumerate(window):
            if block.residency is not Residency.ON_TIER or block.holds or block.unreadable or not self.is_needed(block):
                continue
            buffer = self._pool.try_acquire() or self._evict_for(window, place)
            if buffer is None:
                return
            try:
                self._start_reading(block, buffer, ahead=True)
            except OSError:
                return

    def _evict_for(self, window: Sequence[Block], place: int) -> StagingBuffer | None:
        """The buffer of a clean block that is needed later than ``window[place]``, the latest of them."""
        clean = [block for block in self._resident if block.residency is Residency.STAGED and not block.holds]
        outside = [block for block in clean if block not in window]
        later = [block for block in reversed(window[place + 1 :]) if block in clean and not block.unused]
        for block in (*outside, *later):
            self._give_up_buffer(block)
            return self._pool.try_acquire()
        return None

    def _buffer_for(self, block: Block) -> StagingBuffer:
        """A buffer now: a free one, that of a clean block, or the first that comes free."""
        written_again = pressed = False
        while True:
            buffer = self._pool.try_acquire()
            if buffer is not None:
                return buffer
            window = [self.blocks[index] for index in self.order.soonest(self.num_buffers)]
            clean = [other for other in self._resident if other.residency is Residency.STAGED and not other.holds]
            if clean:
                # The one needed last: not soon at all, then the last of those that are.
                self._give_up_buffer(max(clean, key=lambda other: window.index(other) if other in window else 1 << 30))
            elif any(other.transfer for other in self._resident if not other.holds):
                self._await_completion()
                self._settle_finished(report_writes=written_again)
            elif not pressed:
                pressed = True
                self.on_pressure()
            elif not written_again:
                written_again = True
                self._write_again()
            else:
                raise StateError(
                    block.name,
                    "a free staging buffer",
                    f"all {self.num_buffers} are held: raise buffer_count of the tier of {self.kind}",
                )

    def _start_reading(self, block: Block, buffer: StagingBuffer, *, load: bool = True, ahead: bool = False) -> None:
        block.buffer = buffer
        self._resident.append(block)
        if not load or block.residency is Residency.EMPTY:
            if load:
                buffer.view(torch.uint8, 0, block.size_bytes).zero_()
            block.residency = Residency.DIRTY  # whoever asked for it without its bytes fills it now
            return
        try:
            block.transfer = self.tier.read(block.extent, buffer, what=block.name, kind=self.kind)
        except BaseException:
            self._give_up_buffer(block)
            raise
        block.residency = Residency.READING
        block.unused = ahead
        self.stats.reads += 1
        self.stats.reads_ahead += ahead
        self._bell.hang_on(block.transfer.operation)

    def _start_writing(self, block: Block) -> None:
        assert block.buffer is not None
        block.deferred = False
        block.checksums = self._checksums_of(block)
        block.transfer = self.tier.write(block.extent, block.buffer, what=block.name, kind=self.kind)
        block.residency = Residency.WRITING
        self._bell.hang_on(block.transfer.operation)

    def _write_again(self) -> None:
        for block in self._resident:
            if block.residency is Residency.DIRTY and not block.holds:
                self._start_writing(block)

    def _write_deferred(self, wanted: Block) -> None:
        for block in self._resident:
            if block.deferred and block is not wanted and not block.holds:
                block.deferred = False
                with suppress(OSError):  # tried again, and said, by who needs the buffer or waits for all
                    self._start_writing(block)

    def _await_completion(self) -> None:
        start = time.monotonic_ns()
        self._bell.wait(_PAUSE_SECONDS)
        self.stats.wait_seconds += (time.monotonic_ns() - start) / 1e9

    def _settle_finished(self, wanted: Block | None = None, *, report_writes: bool = False) -> None:
        """Take note of finished transfers; raise for a failed read of `wanted` and, if asked to, for failed writes.

        A failed write leaves its bytes in their buffer; whoever needs that buffer, or waits for all, writes them again.
        """
        failure: Exception | None = None
        for block in list(self._resident):
            if block.transfer is None or not block.transfer.done():
                continue
            reading = block.residency is Residency.READING
            try:
                self._settle(block)
            except _FAILURES as error:
                if block is wanted or (report_writes and not reading):
                    failure = failure or error
        if failure is not None:
            raise failure

    def _settle(self, block: Block) -> None:
        """Take note of a finished transfer; if it failed, make the record right and raise."""
        transfer, block.transfer = block.transfer, None
        assert transfer is not None
        reading = block.unreadable = block.residency is Residency.READING
        try:
            transfer.wait()
        except OSError:
            block.residency = Residency.ON_TIER if reading else Residency.DIRTY
            if reading:
                self._give_up_buffer(block)
            raise
        block.residency = Residency.STAGED
        if reading:
            self._verify(block)
            block.unreadable = False

    def _checksums_of(self, block: Block) -> torch.Tensor | None:
        if self._checksum is None or block.buffer is None:
            return None
        return self._checksum(block.buffer.view(torch.int32, 0, block.size_bytes // 4))

    def _verify(self, block: Block) -> None:
        actual = self._checksums_of(block)
        if actual is None or block.checksums is None or torch.equal(actual, block.checksums):
            return
        place = int((actual != block.checksums).nonzero()[0])
        pair = (int(block.checksums[place]) & _UINT64, int(actual[place]) & _UINT64)
        self._give_up_buffer(block)
        raise CorruptionError(self.tier.path_of(block.extent), block.name, *pair)

    def _give_up_buffer(self, block: Block) -> None:
        assert block.buffer is not None
        self.stats.reads_unused += block.unused
        block.unused = False
        if block.residency is Residency.STAGED:
            block.residency = Residency.ON_TIER
        block.buffer.release()
        block.buffer = None
        self._resident.remove(block)
