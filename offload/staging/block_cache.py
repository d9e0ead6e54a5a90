"""Blocks on NVMe that visit a fixed set of staging buffers: read ahead, written behind, kept while needed soonest.

A block is what is read, used and written as one. Whoever uses one holds it, which keeps it in its buffer; whoever
changed it says so when releasing it, and the write runs behind. What the buffers keep is what is needed soonest, by the
order of earlier uses (`offload.staging.use_order`).
"""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from nvme_offload.offload.errors import StateError
from nvme_offload.offload.host.buffer_pool import BufferPool, StagingBuffer
from nvme_offload.offload.staging.slot import FAILURES, Residency, Slot, Staging
from nvme_offload.offload.staging.use_order import UseOrder
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.tier import Tier
from nvme_offload.offload.warn import warn_user

View = TypeVar("View")

_BORN = (Residency.UNBORN, Residency.ON_TIER)


@dataclass(eq=False)
class Block(Slot):
    """A slot of the cache, and what its policy knows of it."""

    holders: set[object] = field(default_factory=set, init=False)
    unreadable: bool = field(default=False, init=False)
    """The latest read failed: it is not read ahead then, only by who needs it."""
    unused: bool = field(default=False, init=False)
    """It was read ahead and has not been used since."""
    deferred: bool = field(default=False, init=False)
    """DIRTY, and written when something else is needed: the next change may be to the same block."""

    def note_use(self, used: bool = True) -> None:
        """Note whether it has been used since it was read ahead."""
        self.unused = not used

    def defer(self, deferred: bool = True) -> None:
        """Have it written when something else is needed; or, once that is, no longer."""
        self.deferred = deferred

    def note_unreadable(self, unreadable: bool) -> None:
        """Note whether its latest read failed, or may yet."""
        self.unreadable = unreadable

    @property
    def held_buffer(self) -> StagingBuffer:
        """Its buffer, while somebody holds it."""
        assert self.buffer is not None
        return self.buffer

    @property
    def holds(self) -> int:
        """Count the users that need the block in its buffer."""
        return len(self.holders)


@dataclass
class CacheStats:
    """Counters since the cache was made; `wait_seconds` is what users waited for reads, or for a buffer."""

    uses: int = 0
    """Times a block was held whose bytes were needed."""
    reads: int = 0
    reads_ahead: int = 0
    reads_unused: int = 0
    """Reads ahead whose block was given up again unused: the order was not as it had been."""
    wait_seconds: float = 0.0

    def count(self, **more: float) -> None:
        """Add to counters, by name."""
        for name, number in more.items():
            setattr(self, name, getattr(self, name) + number)


class BlockCache:
    """Blocks of one kind on one tier, and their staging buffers. For one thread at a time.

    Args:
        tier: where the extents are; closed with the cache.
        most_buffers: staging buffers, each as large as the largest block; at least 2. No more than blocks are made.
        checksum: 1D int32 to its checksums, int64; what is read must have those of what was written. None: no checks.
        is_needed: whether what the extent of a block holds still means something: only that is read ahead.
        on_pressure: called when no buffer can be had: gives back holds that nobody needs any more.
        lock: called with new staging buffers: page-locks them, where a device copies to or from them.
    """

    def __init__(
        self,
        tier: Tier,
        kind: str,
        most_buffers: int,
        *,
        checksum: Callable[[torch.Tensor], torch.Tensor] | None = None,
        is_needed: Callable[[Block], bool] = lambda block: True,
        on_pressure: Callable[[], None] = lambda: None,
        lock: Callable[[BufferPool], None] = lambda pool: None,
    ) -> None:
        self.tier = tier
        self.kind = kind
        self.order = UseOrder()
        self.stats = CacheStats()
        self.blocks: list[Block] = []
        self.most_buffers = most_buffers
        self._is_needed = is_needed
        self._on_pressure = on_pressure
        self._lock = lock
        self._pool = BufferPool(1, 1)
        self._staging: Staging[Block] = Staging(kind, tier, self._pool, checksum)

    @property
    def residents(self) -> list[Block]:
        """Blocks that hold a buffer, the one used longest ago first."""
        return self._staging.residents

    @property
    def num_buffers(self) -> int:
        """Count the staging buffers that there are."""
        return self._pool.num_buffers

    @property
    def staging_bytes(self) -> int:
        """Host memory of all staging buffers."""
        return self._pool.size_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of each staging buffer."""
        return self._pool.buffer_bytes

    def add(self, blocks: Sequence[tuple[str, int | Extent]]) -> list[Block]:
        """Add blocks, by name and bytes, with all of their space promised. On an error nothing was added.

        Those that others wrote are given where they lie, have their bytes there, and take no space before they change.
        """
        self._finish_transfers()  # and reads nothing ahead: the buffers may be exchanged
        reserved = iter(self.tier.reserve([size for _, size in blocks if isinstance(size, int)]))
        added = []
        for place, (name, size) in enumerate(blocks, len(self.blocks)):
            extent = next(reserved) if isinstance(size, int) else size
            added.append(Block(place, name, extent.size_bytes, extent, residency=_BORN[extent.is_of_others]))
        self._fit_pool([block.size_bytes for block in (*self.blocks, *added)])
        self.blocks += added
        return added

    def drop(self, blocks: Sequence[Block]) -> None:
        """Forget the latest blocks, which nobody holds, with what was put into them, and free their space."""
        for block in blocks:
            self.blocks.remove(block)
            self.forget(block)
            if block.extent is not None and not block.extent.is_of_others:
                self.tier.free(block.extent)

    def forget(self, block: Block) -> None:
        """Keep nothing of what was put into a block, which nobody holds: nothing of it is written."""
        block.deferred = False
        self._staging.forget(block)

    def hold(
        self,
        block: Block,
        *,
        by: object = None,
        change: bool = False,
        load: bool = True,
        in_order: bool = True,
        is_new: bool = True,
    ) -> StagingBuffer:
        """Keep a block in a staging buffer, with its bytes in it, until `release`.

        Holding it once more `by` the same is no other hold. With `change` a write that is under way is waited for, and
        from here on the bytes count, whatever happens to the caller. Without `load` all of it is about to be
        overwritten, and nothing is read; a block that nothing was put into yet is full of zeros. A use that is
        `in_order` is part of the order that repeats itself: what follows it is read ahead. One that is not `is_new`
        continues another and is not counted.

        A SwapIOError loses nothing: what could not be written is still in memory and is written again by the next call.
        """
        self._settle_finished()
        for other in self.residents:
            if other.deferred and other is not block and not other.holds:
                with suppress(OSError):  # tried again, and said, by who needs the buffer or waits for all
                    self._start_writing(other)
        self.stats.count(uses=load and is_new)
        try:
            block.holders.add(by)  # nothing that follows takes its buffer, or gives it one
            self._bring(block, change=change, load=load, in_order=in_order)
            assert block.buffer is not None
            block.note_use()
            self._staging.touch(block)
            if in_order:
                self._read_ahead()
        except BaseException:
            block.holders.discard(by)
            raise
        return block.buffer

    def _bring(self, block: Block, *, change: bool, load: bool, in_order: bool) -> None:
        """Have the bytes in a buffer; with `change`, and without `load`, say that what is there counts."""
        if block.buffer is None:
            self._find_buffer(block)
        if load and block.needs_read:
            self._start_reading(block)
        while block.transfer is not None and (change or block.residency is Residency.READING):
            self._await_completion()
            self._settle_finished(wanted=block)
            if in_order:
                self._read_ahead()
        if block.residency is Residency.UNBORN and load:
            assert block.buffer is not None
            block.buffer.view(torch.uint8, 0, block.size_bytes).zero_()
        if block.residency in (Residency.UNBORN, Residency.ON_TIER):
            block.become(Residency.DIRTY)  # whoever asked for it without its bytes fills it now
        elif change and block.residency is Residency.STAGED:
            block.become(Residency.DIRTY)

    def release(self, block: Block, *, by: object = None, changed: bool = False, in_order: bool = True) -> None:
        """Let a held block go; a change is written behind, after the last of its uses in a row, or by the next call."""
        block.holders.discard(by)
        if changed and block.residency is Residency.DIRTY:
            block.defer(not in_order or self.order.is_next_in_step(block.index))
            if not block.deferred:
                self._start_writing(block)
        self._settle_finished()
        if in_order:
            self._read_ahead()

    def holding(
        self, block: Block, *, change: bool = False, load: bool = True, in_order: bool = True
    ) -> AbstractContextManager[StagingBuffer]:
        """`hold` and `release` around a piece of code. With `change`, whatever it did is kept, also when it raises."""
        return Holding(self, block, lambda: block.held_buffer, change=change, load=load, in_order=in_order)

    def advance(self) -> None:
        """Start what has become possible since the latest call: reads into the buffers of writes that are done."""
        self._settle_finished()
        self._read_ahead()

    def synchronize(self) -> None:
        """Wait for everything under way. What a SwapIOError left in its buffer is written by the next call."""
        self._finish_transfers()
        self._read_ahead()

    def _finish_transfers(self) -> None:
        self._staging.recover()
        self._write_again()
        failure: Exception | None = None
        while any(block.transfer for block in self.residents):
            self._await_completion()
            try:
                self._settle_finished(report_writes=True)
            except FAILURES as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End what is under way, free the memory, delete the swap files. Idempotent."""
        self.tier.close()
        self._pool.close()
        self._staging.close()
        self.blocks.clear()

    def _fit_pool(self, sizes: Sequence[int]) -> None:
        num_buffers, size_bytes = min(self.most_buffers, len(sizes)), max(sizes, default=0)
        if num_buffers <= self.num_buffers and size_bytes <= self.buffer_bytes:
            return
        for block in self.residents:
            self._give_up_buffer(block)
        larger = BufferPool(num_buffers, size_bytes)
        self._lock(larger)
        self.tier.register([larger])
        self._pool.close()
        self._pool = larger
        self._staging.use_pool(larger)

    def _read_ahead(self) -> None:
        """Fill the buffers with what is needed soonest. A hint: what fails here is tried again when it is needed.

        Where blocks are used round and round, what was used last is needed last. One block is read ahead at a time
        then, in its place, so that all but two buffers keep what they have until its turn comes.
        """
        goes_round = self.order.goes_round(len(self.blocks))
        if goes_round and any(block.unused for block in self.residents):
            return
        soonest = self.order.soonest(len(self.blocks) if goes_round else self.num_buffers)
        window = [self.blocks[index] for index in soonest if index < len(self.blocks)]
        for place, block in enumerate(window):
            if not block.needs_read or block.holds or block.unreadable or not self._is_needed(block):
                continue
            lease = self._staging.lease
            if block.buffer is None and not (lease(block) or (self._evict_for(window, place) and lease(block))):
                return
            try:
                self._start_reading(block, ahead=True)
            except OSError:
                return
            if goes_round:
                return

    def _clean(self) -> list[Block]:
        """Blocks whose buffers may be had."""
        return [block for block in self.residents if block.evictable and not block.holds]

    def _evict_for(self, window: Sequence[Block], place: int) -> bool:
        """Give up the buffer of a clean block that is needed later than ``window[place]``, the latest of them."""
        clean = self._clean()
        outside = [block for block in clean if block not in window]
        later = [block for block in reversed(window[place + 1 :]) if block in clean and not block.unused]
        for block in (*outside, *later):
            self._give_up_buffer(block)
            return True
        return False

    def _find_buffer(self, block: Block) -> None:
        """A buffer now: a free one, that of a clean block, or the first that comes free."""
        written_again = pressed = False
        while not self._staging.lease(block):
            window = [self.blocks[index] for index in self.order.soonest(self.num_buffers)]
            clean = self._clean()
            if clean:
                # The one needed last: not soon at all, then the last of those that are.
                last = max(clean, key=lambda other: window.index(other) if other in window else 1 << 30)
                self._give_up_buffer(last)
            elif any(other.transfer for other in self.residents if not other.holds):
                self._await_completion()
                self._settle_finished(report_writes=written_again)
            elif not pressed:
                pressed = True
                self._on_pressure()
            elif not written_again:
                written_again = True
                self._write_again()
            else:
                raise StateError(
                    block.name,
                    "a free staging buffer",
                    f"all {self.num_buffers} are held: raise buffer_count of the tier of {self.kind}",
                )

    def _start_reading(self, block: Block, *, ahead: bool = False) -> None:
        self._staging.start_read(block)
        block.note_use(not ahead)
        self.stats.count(reads=1, reads_ahead=ahead)

    def _start_writing(self, block: Block) -> None:
        block.defer(False)
        if block.extent is not None and block.extent.is_of_others:
            self._leave_files(block, block.extent)
        self._staging.start_write(block)

    def _leave_files(self, block: Block, files: Extent) -> None:
        """Give a block that somebody changed, and whose bytes others wrote, an extent of its own."""
        where = self.tier.describe(files)
        block.lie_in(self.tier.reserve([block.size_bytes])[0])
        warn_user(
            f"{block.name} were read from {where}, and are changed: from now on they are in the swap space",
            of_this_rank=True,
        )

    def _write_again(self) -> None:
        for block in self.residents:
            if block.residency is Residency.DIRTY and not block.holds:
                self._start_writing(block)

    def _await_completion(self) -> None:
        start = time.monotonic_ns()
        self._staging.wait()
        self.stats.count(wait_seconds=(time.monotonic_ns() - start) / 1e9)

    def _settle_finished(self, wanted: Block | None = None, *, report_writes: bool = False) -> None:
        """Take note of finished transfers; raise for a failed read of `wanted` and, if asked to, for failed writes.

        A failed write leaves its bytes in their buffer; whoever needs that buffer, or waits for all, writes them again.
        """
        self._staging.recover()
        failure: Exception | None = None
        for block in self.residents:
            if block.transfer is None or not block.transfer.done():
                continue
            reading = block.residency is Residency.READING
            block.note_unreadable(reading)
            try:
                self._staging.settle(block)
                block.note_unreadable(False)
            except FAILURES as error:
                if block is wanted or (report_writes and not reading):
                    failure = failure or error
        if failure is not None:
            raise failure

    def _give_up_buffer(self, block: Block) -> None:
        self.stats.count(reads_unused=block.unused)
        block.note_use()
        self._staging.give_up(block)


class Holding(AbstractContextManager[View], Generic[View]):
    """`BlockCache.hold` and `release` around a piece of code, which gets what `view` makes of the buffer.

    The block is held for as long as this object lives, at most: an exception on the way in or out may lose it.
    """

    def __init__(
        self, cache: BlockCache, block: Block, view: Callable[[], View], *, change: bool, load: bool, in_order: bool
    ) -> None:
        self._cache, self._block, self._view = cache, block, view
        self._change, self._load, self._in_order = change, load, in_order
        self._key = weakref.ref(self, block.holders.discard)
        hash(self._key)  # it keeps that, and is looked for when this object has gone

    def __enter__(self) -> View:
        try:
            self._cache.hold(self._block, by=self._key, change=self._change, load=self._load, in_order=self._in_order)
            return self._view()
        except BaseException:
            self._block.holders.discard(self._key)
            raise

    def __exit__(self, *exception: object) -> None:
        self._block.holders.discard(self._key)  # first, whatever stops what follows
        self._cache.release(self._block, by=self._key, changed=self._change, in_order=self._in_order)
