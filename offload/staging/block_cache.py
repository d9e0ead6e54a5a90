"""Blocks on NVMe that visit a fixed set of staging buffers: read ahead, written behind, kept while needed soonest.

A block is what is read, used and written as one. Whoever uses one holds it, which keeps it in its buffer; whoever
changed it says so when releasing it, and the write runs behind. What the buffers keep is what is needed soonest, by the
order of earlier uses (`offload.staging.use_order`). Blocks that stay have buffers of their own: nothing moves them.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from ..errors import StateError
from ..host.buffer_pool import BufferPool, StagingBuffer
from ..storage.extent import Extent
from ..storage.tier import Tier
from ..warn import warn_user
from .home import Home
from .mover import PAUSE_SECONDS, Mover
from .slot import Residency, Slot
from .use_order import UseOrder

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
    def stays(self) -> bool:
        """Whether it is in memory for good."""
        return self.home.pool is not None

    def let_go(self) -> None:
        """Let the memory of one that stays go, with its last user. No copy may be under way. Idempotent."""
        if self.buffer is not None and self.home.pool is not None:
            self.buffer.release()
            self.home.pool.close()

    @property
    def held_buffer(self) -> StagingBuffer:
        """Its buffer, while somebody holds it, or for good."""
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


class BlockCache(Mover[Block]):
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
        super().__init__(kind, tier, BufferPool(1, 1), checksum)
        self.tier: Tier = tier
        self.order = UseOrder()
        self.stats = CacheStats()
        self.blocks: list[Block] = []
        self.most_buffers = most_buffers
        self._has_spare = False
        self._staying: list[Block] = []
        self._is_needed = is_needed
        self._on_pressure = on_pressure
        self._lock = lock

    @property
    def staging_bytes(self) -> int:
        """Host memory of all staging buffers."""
        return self.num_buffers * self.buffer_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of each staging buffer."""
        return self.pool.buffer_bytes if self.pool is not None else 0

    def add(self, blocks: Sequence[tuple[str, int | Extent]]) -> list[Block]:
        """Add blocks, by name and bytes, with all of their space promised. On an error nothing was added.

        Those that others wrote are given where they lie, have their bytes there, and take no space before they change.
        """
        self.synchronize()
        reserved = iter(self.tier.reserve([size for _, size in blocks if isinstance(size, int)]))
        added = []
        for place, (name, size) in enumerate(blocks, len(self.blocks)):
            extent = next(reserved) if isinstance(size, int) else size
            added.append(Block(place, name, extent.size_bytes, extent, residency=_BORN[extent.is_of_others]))
        sizes = [block.size_bytes for block in (*self.blocks, *added)]
        self.fit_pool(min(self.most_buffers, len(sizes)), max(sizes, default=0), self._lock)
        self.blocks += added
        return added

    def keep(self, blocks: Sequence[tuple[str, int]], lock: Callable[[BufferPool], object]) -> list[Block]:
        """Make blocks, by name and bytes, full of zeros, that stay in memory of their own. On an error none is kept.

        `lock` page-locks it for a device: copies run behind the host's back.
        """
        made = []
        for name, size_bytes in blocks:
            pool = BufferPool(1, size_bytes)
            lock(pool)
            made.append(Block(-1, name, size_bytes, home=Home("host", pool=pool), residency=Residency.HOST))
            pool.try_acquire(made[-1])
        self._staying += made
        return made

    def drop(self, blocks: Sequence[Block]) -> None:
        """Forget the latest blocks, which nobody holds, with what was put into them, and free their space."""
        for block in blocks:
            if block.stays:
                self._staying.remove(block)
                block.let_go()
                continue
            self.blocks.remove(block)
            self.forget(block)
            if block.extent is not None and not block.extent.is_of_others:
                self.tier.free(block.extent)

    def forget(self, block: Block) -> None:
        """Keep nothing of what was put into a block, which nobody holds: nothing of it is written."""
        block.defer(False)
        super().forget(block)

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
        if block.stays:
            return block.held_buffer
        self.settle_finished(report_writes=False)
        for other in self.residents:
            if other.deferred and other is not block and not other.holds:
                with suppress(OSError):  # tried again, and said, by who needs the buffer or waits for all
                    self.start_write(other)
        self.stats.count(uses=load and is_new)
        try:
            block.holders.add(by)  # nothing that follows takes its buffer, or gives it one
            self._bring(block, change=change, load=load, in_order=in_order)
            assert block.buffer is not None
            block.note_use()
            self.touch(block)
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
            self._begin(block, load=True)
        while block.transfer is not None and (change or block.residency is Residency.READING):
            self.wait()
            self.settle_finished(block, report_writes=False)
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
        if block.stays:
            return
        if changed and block.residency is Residency.DIRTY:
            block.defer(not in_order or self.order.is_next_in_step(block.index))
            if not block.deferred:
                self.start_write(block)
        self.settle_finished(report_writes=False)
        if in_order:
            self._read_ahead()

    def holding(
        self, block: Block, *, change: bool = False, load: bool = True, in_order: bool = True
    ) -> AbstractContextManager[StagingBuffer]:
        """`hold` and `release` around a piece of code. With `change`, whatever it did is kept, also when it raises."""
        return Holding(self, block, lambda: block.held_buffer, change=change, load=load, in_order=in_order)

    def allow_spare(self, allowed: bool) -> None:
        """Use one buffer more where there is none, or not: somebody keeps one."""
        self._has_spare = allowed

    def advance(self) -> None:
        """Start what has become possible since the latest call: reads into the buffers of writes that are done."""
        self.settle_finished(report_writes=False)
        self._read_ahead()

    def park(self) -> None:
        """Give the memory of the staging buffers back; see `Mover.park`. StateError: somebody holds a block."""
        self._on_pressure()
        if held := [block for block in self.residents if block.holds]:
            raise StateError(held[0].name, "a call between two passes", "in use by one that is under way")
        super().park()

    def close(self) -> None:
        """End what is under way, free the memory, delete the swap files. Idempotent."""
        self.tier.close()
        super().close()
        for block in self._staying:
            block.let_go()
        self._staying.clear()
        self.blocks.clear()

    def _read_ahead(self) -> None:
        """Fill the buffers with what is needed soonest. A hint: what fails here is tried again when it is needed.

        Where blocks are used round and round, what was used last is needed last. One block is read ahead at a time
        then, in its place, so that all but two buffers keep what they have until its turn comes.
        """
        goes_round = self.order.goes_round(len(self.blocks))
        if goes_round and any(block.unused for block in self.residents):
            return
        with suppress(OSError):
            self.read_ahead(
                self._soonest(len(self.blocks) if goes_round else self.num_buffers), most=1 if goes_round else None
            )

    def _soonest(self, number: int) -> list[Block]:
        return [self.blocks[index] for index in self.order.soonest(number) if index < len(self.blocks)]

    def _comes(self, block: Block) -> bool:
        """Return whether a block is read ahead."""
        return block.needs_read and not block.holds and not block.unreadable and self._is_needed(block)

    def _may_write(self, block: Block) -> bool:
        return not block.holds

    def _may_leave(self, block: Block) -> bool:
        return block.evictable and not block.holds

    def _leaving(self, window: Sequence[Block], place: int) -> Block | None:
        """Return one that is not needed soon, else the one needed last; later than ``window[place]``, if read ahead."""
        later = (
            block for block in reversed(window[place + 1 :]) if block.buffer is not None and self._may_leave(block)
        )
        return super()._leaving(window, place) or next(
            (block for block in later if place < 0 or not block.unused), None
        )

    def _find_buffer(self, block: Block) -> None:
        """A buffer now: a free one, that of a clean block, or the first that comes free."""
        written_again = pressed = False
        while not self.lease(block):
            leaving = self._leaving(self._soonest(self.num_buffers), -1)
            if leaving is not None:
                self._evict(leaving)
            elif any(other.transfer for other in self.residents if not other.holds):
                self.wait()
                self.settle_finished(report_writes=written_again)
            elif not pressed:
                pressed = True
                self._on_pressure()
            elif not written_again:
                written_again = True
                self.start_writes()
            elif self._has_spare and self.lease_spare(block):
                return
            else:
                raise StateError(
                    block.name,
                    "a free staging buffer",
                    f"all {self.num_buffers} are held: raise buffer_count of the tier of {self.kind}",
                )

    def _begin(self, block: Block, *, load: bool) -> None:
        """Begin the read of a block: ahead, if nobody holds it."""
        super()._begin(block, load=load)
        block.note_use(bool(block.holds))
        self.stats.count(reads=1, reads_ahead=not block.holds)

    def start_write(self, block: Block) -> None:
        """Begin to write a block that was changed."""
        block.defer(False)
        if block.extent is not None and block.extent.is_of_others:
            self._leave_files(block, block.extent)
        super().start_write(block)

    def settle(self, block: Block) -> None:
        """Take note of a transfer that is done, and whether it was a read that failed."""
        block.note_unreadable(block.residency is Residency.READING)
        super().settle(block)
        block.note_unreadable(False)

    def _leave_files(self, block: Block, files: Extent) -> None:
        """Give a block that somebody changed, and whose bytes others wrote, an extent of its own."""
        where = self.tier.describe(files)
        block.lie_in(self.tier.reserve([block.size_bytes])[0])
        warn_user(
            f"{block.name} were read from {where}, and are changed: from now on they are in the swap space",
            of_this_rank=True,
        )

    def wait(self, seconds: float | None = PAUSE_SECONDS) -> None:
        """Wait as `Mover.wait` does, and count the time."""
        start = time.monotonic_ns()
        super().wait(seconds)
        self.stats.count(wait_seconds=(time.monotonic_ns() - start) / 1e9)

    def _evict(self, block: Block) -> None:
        """Give up the buffer of a block, and count what was read in vain."""
        self.stats.count(reads_unused=block.unused)
        block.note_use()
        super()._evict(block)


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
