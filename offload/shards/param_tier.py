"""Sharded parameters are stored in host memory, or on NVMe in one or more blocks for each group that FSDP2 gathers.

FSDP2 asks for every parameter of a group, one after the other, and copies them into a buffer of its own
(``foreach_all_gather``, ``wait_for_unshard``). Then it tells each of them that it is done (``fsdp_post_all_gather``).
A group of trained and frozen parameters is two blocks. It copies none of them before it has asked for all, so all
blocks of a group are one gather: between the first question and the last answer they are held in their staging buffers.
On the CPU the copying of a group is over when another one is asked for; so where an answer comes late or never, because
a group was gathered ahead, its holds are given up when a buffer is wanted. What is gathered ahead needs no buffers.
A rank alone copies no frozen block that takes turns: the buffer is lent to it (`loans`).

Where a device computes, the first question copies the block there, all of it at once and behind the host's back, and
what FSDP2 gets are views of that copy. The block is then held until the copy is over, whatever FSDP2 says. Blocks may
be kept in host memory for that, too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from ..config.tiers import OffloadParamConfig
from ..devices.device import HOST, is_host
from ..errors import ClosedError, ConfigError
from ..host.buffer_pool import BufferPool
from ..host.page_locks import PageLocks
from ..staging.block_cache import Block, BlockCache, Holding, View
from ..storage.foreign_file import FileExtent
from ..storage.tier import Memory, Tier
from ..units import round_up
from .departures import Departure, Departures
from .loans import Loan, Loans
from .stored import Padded, StoredShard, TieredShard, UnbornShard

KIND = "parameters"
"""The bytes of this tier are counted as this."""

_KEY = "zero_optimization.offload_param"

_ALIGNMENT = 64  # bytes: every parameter starts at a cache line


@dataclass(eq=False)
class _Gather:
    """One use by FSDP2 of what it gathers together."""

    together: object
    blocks: set[Block] = field(default_factory=set)
    """FSDP2 has asked for these, and they are held."""
    asked: set[TieredShard] = field(default_factory=set)
    answered: set[TieredShard] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether all that was asked for has been copied."""
        return self.asked == self.answered


class ParamTier:
    """Blocks of parameters on NVMe, or in host memory beside a device. For one thread at a time.

    The tier is of its own, and closed with it. `locks` page-lock what a device copies from; None: where it can be done.
    """

    def __init__(
        self,
        config: OffloadParamConfig,
        tier: Tier,
        checksum: Callable[[torch.Tensor], torch.Tensor] | None = None,
        locks: PageLocks | None = None,
    ) -> None:
        self._locks = locks or PageLocks(None)
        self.cache = BlockCache(
            tier, KIND, config.buffer_count, checksum=checksum, on_pressure=self._give_up_stale, lock=self._lock
        )
        self._gathers: list[_Gather] = []  # not complete, the latest last
        self._latest: _Gather | None = None
        self._keeps = False
        self._kept: _Gather | None = None
        """Its blocks stay in their buffers until others are gathered: somebody will change them there."""
        self._departures: Departures | None = None
        self.loans = Loans(self.cache)
        self._shards: dict[Block, list[TieredShard]] = {}
        self._together: dict[Block, object] = {}
        self._closed = False

    def reserve(
        self,
        groups: Sequence[tuple[str, Sequence[Padded]]],
        device: torch.device = HOST,
        *,
        in_memory: bool = False,
        together: Sequence[object] | None = None,
        in_files: Mapping[int, FileExtent] | None = None,
    ) -> list[list[TieredShard]]:
        """Make a block for each named group of parameters, all space promised; returns each parameter's place.

        `put` the values there before anything else. On an error nothing was reserved.

        Args:
            groups: names and the forms of parameters.
            device: computes with them.
            in_memory: the blocks stay in host memory, beside a device.
            together: the same object for each of the blocks that FSDP2 gathers together, also of other calls; by
                default each is gathered alone.
            in_files: the groups, by number, whose bytes others wrote: they have values already.

        Raises:
            ConfigError: the blocks of a gather are more than there may be staging buffers.
        """
        together = [object() for _ in groups] if together is None else together
        if is_host(device):
            self._check_room([name for name, _ in groups], together)
        if self._departures is None and not is_host(device):
            self._departures = Departures(device, self._hold_for)
        found = in_files or {}
        layouts = [block_layout((form.numel, form.dtype) for form in forms) for _, forms in groups]
        offsets = [found[n].offsets if n in found else at for n, (at, _) in enumerate(layouts)]
        sizes = [(f"{KIND} of {name}", size) for (name, _), (_, size) in zip(groups, layouts, strict=True)]
        blocks = (
            self.cache.keep(sizes, lambda pool: self._locks.lock(pool, device, stay_remedy(_KEY)))
            if in_memory
            else self.cache.add([(name, found.get(n, size)) for n, (name, size) in enumerate(sizes)])
        )
        made = [
            [TieredShard(self, block, at, form, device) for at, form in zip(starts, forms, strict=True)]
            for block, starts, (_, forms) in zip(blocks, offsets, groups, strict=True)
        ]
        self._shards.update(zip(blocks, made, strict=True))
        self._together.update(zip(blocks, together, strict=True))
        return made

    def _check_room(self, names: Sequence[str], together: Sequence[object]) -> None:
        """Raise ConfigError where a gather would need more buffers at once than there may be."""
        most = self.cache.most_buffers
        for name, key in zip(names, together, strict=True):
            needed = [*self._together.values(), *together].count(key)
            if needed > most:
                why = f"FSDP2 copies the {needed} blocks of {name!r} and what is gathered with it at once"
                raise ConfigError([f"{_KEY}.buffer_count = {most}: {why}; write {needed} or more"])

    def _lock(self, buffers: BufferPool) -> None:
        if self._departures is not None:
            self._locks.lock(buffers, self._departures.device, f"lower {_KEY}.buffer_count")

    def drop(self, blocks: Sequence[Block]) -> None:
        """Forget the latest blocks, which nothing was gathered from, and free their space."""
        for block in blocks:
            del self._shards[block], self._together[block]
        self.cache.drop(blocks)

    def put(self, places: Sequence[TieredShard], values: Sequence[StoredShard]) -> None:
        """Fill a block for the first time, with all of its parameters. The write runs behind.

        Those that have no value yet are zero; nothing is written where none has one.
        """
        if all(isinstance(stored, UnbornShard) for stored in values):
            return
        with self.holding(places[0].block, lambda: None, change=True, in_order=True):
            for place, stored in zip(places, values, strict=True):
                if not isinstance(stored, UnbornShard):
                    place.view().copy_(stored.gather().reshape(-1))

    def begin_gather(self, shard: TieredShard) -> None:
        """Hold the block of a parameter that FSDP2 is about to copy, with all that it asks for in the same gather."""
        self._check_open()
        block = shard.block
        together = self._together[block]
        gather = next((gather for gather in self._gathers if gather.together is together), None)
        if gather is None and self._latest is not None and self._latest.together is together:
            gather = self._latest  # its parameters are asked for and copied one by one
        if gather is None or shard in gather.asked:
            self._end(gather)
            gather = _Gather(together)
        is_new = block not in gather.blocks
        if is_new:
            gather.blocks.add(block)
            self.cache.order.note(block.index)
        try:
            if gather not in self._gathers:
                self._gathers.append(gather)
            self._latest = gather  # first: who finds a buffer for it ends all others
            self._keep(gather if self._keeps else None)
            if gather not in block.holders:
                self.cache.hold(block, by=gather, is_new=is_new)
        except BaseException:
            self._let_go(gather)
            raise
        gather.asked.add(shard)
        if self._keeps:
            self._keep(gather)  # once more: who finds a buffer may keep nothing
            block.holders.add(self)

    def sent(self, shard: TieredShard) -> torch.Tensor:
        """Return the bytes of a parameter's block on the device that computes with it, copied once for all in it."""
        self._check_open()
        assert self._departures is not None
        return self._departures.take(shard.block, shard, self._shards[shard.block], self._together[shard.block])

    def keep_latest(self, keeps: bool) -> None:
        """Keep the blocks that were gathered last in their buffers until others are gathered; or keep none."""
        self._keeps = keeps
        if not keeps and self._kept is not None:
            self._keep(None)
            self.cache.advance()

    def _keep(self, gather: _Gather | None) -> None:
        if self._kept is not None and self._kept is not gather:
            for block in self._kept.blocks:
                block.holders.discard(self)
        self._kept = gather

    def end_gather(self, shard: TieredShard) -> None:
        """Note that FSDP2 has copied a parameter; with the last one of a gather its holds end."""
        for gather in self._gathers:
            if gather.together is self._together.get(shard.block):
                gather.answered.add(shard)
                if gather.complete:
                    self._end(gather)
                return

    def holding(
        self, block: Block, view: Callable[[], View], *, change: bool, in_order: bool
    ) -> AbstractContextManager[View]:
        """Keep a block in host memory, outside forward and backward, and give what `view` does; see `BlockCache.hold`.

        One that is to change has been copied by whoever was about to copy it.
        """
        self._check_open()
        if change and self._departures is not None:
            self._departures.end_all(block)
        return Holding(self.cache, block, view, change=change, load=True, in_order=in_order)

    def close(self) -> None:
        """Free the memory and delete the swap files, with the parameters in them. Idempotent."""
        self._closed = True
        self._gathers.clear()
        if self._departures is not None:
            self._departures.close()
        self._shards.clear()
        self._together.clear()
        self.cache.close()

    def _hold_for(self, block: Block, by: object) -> Memory:
        if not block.stays:
            self.cache.order.note(block.index)
        return self.cache.hold(block, by=by)

    def _end(self, gather: _Gather | None) -> None:
        if gather in self._gathers:
            self._let_go(gather)
            self.cache.advance()

    def _let_go(self, gather: _Gather) -> None:
        """Hold nothing for a gather. The holds go first: one that is in the list and holds nothing, holds anew."""
        for block in gather.blocks:
            block.holders.discard(gather)
        if gather in self._gathers:
            self._gathers.remove(gather)

    def _give_up_stale(self) -> None:
        """Have a buffer: end the earliest gathers that FSDP2 has copied, or wait for a device; at last, keep nothing.

        And holds for gathers that an exception took from the list.
        """
        departures = self._departures
        for block in self.cache.residents:
            lost = {by for by in block.holders if isinstance(by, _Gather | Departure | Loan) and not self._knows(by)}
            block.holders.difference_update(lost)
        if departures is not None:
            departures.free_one()
        for gather in [gather for gather in self._gathers if self._is_copied(gather)]:
            self._let_go(gather)
            if any(block.evictable and not block.holds for block in gather.blocks):
                return
        self.loans.call_in()
        self._keep(None)

    def _is_copied(self, gather: _Gather) -> bool:
        """Whether FSDP2 has copied what it asked for: it does so when it has asked for all, before it does anything.

        Of a gather that an exception cut off it wants nothing any more.
        """
        blocks = (block for block in self._shards if self._together[block] is gather.together)
        return gather is not self._latest or all(gather.asked.issuperset(self._shards[block]) for block in blocks)

    def _knows(self, by: _Gather | Departure | Loan) -> bool:
        if isinstance(by, Loan):
            return by.is_out
        if isinstance(by, _Gather):
            return by in self._gathers
        return self._departures is not None and self._departures.knows(by)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the parameter tier, which holds the weights,")


def stay_remedy(key: str) -> str:
    """Say what to do where memory of blocks that stay beside a device cannot be page-locked."""
    return f'write "nvme" for {key}.device, or lower host_budget'


def block_layout(tensors: Iterable[tuple[int, torch.dtype]]) -> tuple[list[int], int]:
    """Return the byte offsets in a block of tensors of so many elements and these dtypes, and the block's bytes."""
    offsets, end = [], 0
    for numel, dtype in tensors:
        offsets.append(end)
        end += round_up(numel * dtype.itemsize, _ALIGNMENT)
    return offsets, max(end, _ALIGNMENT)
