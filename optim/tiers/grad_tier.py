"""Keep gradient partitions on NVMe, in one block for each group of parameters that FSDP2 reduces together.

When the reduced gradient of a parameter has arrived, it is copied into the block's staging buffer, and ``p.grad``
becomes a stand-in. The next micro-batch adds to the stand-in, which brings the block back and adds there. A block that
is left is written behind. What the norm needs, the fp64 sums of squares, is taken while the bytes are in memory.

From a device gradients are copied behind the host's back. What is done with one on the CPU is done here when it has
landed: in the same order, with the same bits. Blocks may be kept in host memory, too: then nothing moves but that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from nvme_offload.offload._torch_private import local_tensor, sharded_like
from nvme_offload.offload.config.tiers import OffloadGradientsConfig
from nvme_offload.offload.devices.device import is_device, is_host
from nvme_offload.offload.errors import ClosedError, StateError
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.host.page_locks import PageLocks
from nvme_offload.offload.shards.param_tier import block_layout, stay_remedy
from nvme_offload.offload.staging.block_cache import Block, BlockCache
from nvme_offload.offload.storage.tier import Tier
from ..layout.flat import PartitionStandIn
from .arrivals import Arrivals

KIND = "gradients"
"""The bytes of this tier are counted as this."""
_KEY = "offload_gradients"

_aten = torch.ops.aten
_IN_PLACE: dict[Any, Callable[..., Any]] = {
    _aten.add_: torch.Tensor.add_,
    _aten.mul_: torch.Tensor.mul_,
    _aten.div_: torch.Tensor.div_,
    _aten.zero_: torch.Tensor.zero_,
}
"""Operators that work on a partition where it is: FSDP2's accumulation, scaling, ``zero_grad(set_to_none=False)``."""


class Partition:
    """This rank's gradient of one parameter, and where it is in its block.

    Args:
        leaf: the parameter, as the user knows it.
        dtype: of the accumulation.
    """

    def __init__(self, tier: GradTier, leaf: torch.Tensor, block: Block, byte_offset: int, dtype: torch.dtype) -> None:
        self.leaf = leaf
        self.block = block
        self.tile_sums = torch.empty(0, dtype=torch.float64, device="cpu")
        """fp64 sums of squares of the partition's tiles of 65536 elements, as far as gradients have landed."""
        self.num_changes = 0
        """Number of gradients that arrived, and of changes in place."""
        self._byte_offset = byte_offset
        self.shape = local_tensor(leaf).shape
        self._dtype = dtype
        self.tier = tier
        handlers = {op: partial(tier.change, self, change) for op, change in _IN_PLACE.items()}
        self._make_stand_in = partial(
            PartitionStandIn,
            torch.empty(self.shape, device="meta"),
            dtype,
            name=block.name,
            remedy="use optimizer.clip_grad_norm_ to clip, optimizer.zero_grad to drop them, get_full_grad to look",
            device=local_tensor(leaf).device,
            handlers=handlers,
        )
        self.stand_in: PartitionStandIn | None = None

    @property
    def is_valid(self) -> bool:
        """Whether ``p.grad`` is what is kept here: else it was dropped, or has just arrived."""
        return self.leaf.grad is not None and local_tensor(self.leaf.grad) is self.stand_in

    def note_change(self) -> None:
        """Note that a gradient arrives, or the one there is changes."""
        self.num_changes += 1

    def take_sums(self, tile_sums: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take the sums of the gradient as it is. The block must be held."""
        self.tile_sums = tile_sums(self.view())

    def view(self) -> torch.Tensor:
        """Return the gradient as a 1D view of the staging buffer. The block must be held."""
        return self.block.held_buffer.view(self._dtype, self._byte_offset, self.shape.numel())

    @property
    def landed_sums(self) -> torch.Tensor:
        """`tile_sums`, once gradients on their way from a device have landed."""
        self.tier.land()
        return self.tile_sums

    def copy(self) -> torch.Tensor:
        """Copy the gradient into memory of its own."""
        return self.tier.copy_of(self)

    def set(self, values: torch.Tensor) -> None:
        """Overwrite the gradient with values of its shape."""
        self.tier.change(self, torch.Tensor.copy_, values)

    def shaped(self) -> torch.Tensor:
        """Return `view` in the shard's shape."""
        return self.view().view(self.shape)

    def forget(self) -> None:
        """Drop the stand-in: whoever looks at the gradient finds that it is gone."""
        self.stand_in = None

    def become_grad(self) -> None:
        """Put a new stand-in where the gradient that arrived was."""
        assert self.leaf.grad is not None
        self.stand_in = self._make_stand_in()
        self.stand_in.partition = self
        self.leaf.grad = sharded_like(self.stand_in, self.leaf.grad)


class GradTier:
    """Blocks of gradient partitions on NVMe, or in host memory beside a device. For one thread at a time.

    Args:
        tier: of its own; closed with it.
        tile_sums: fp64 sums of squares of the blocks of a flat gradient.
        checksum: see `BlockCache`.
        locks: page-lock what a device copies to; None: where it can be done.
    """

    def __init__(
        self,
        config: OffloadGradientsConfig,
        tier: Tier,
        tile_sums: Callable[[torch.Tensor], torch.Tensor],
        checksum: Callable[[torch.Tensor], torch.Tensor] | None = None,
        locks: PageLocks | None = None,
    ) -> None:
        self.cache = BlockCache(
            tier,
            KIND,
            config.buffer_count,
            checksum=checksum,
            is_needed=lambda block: block in self._due or (self._is_needed(block) and block not in self._spent),
            on_pressure=self._give_up_stale,
            lock=self._lock,
        )
        self._tile_sums = tile_sums
        self._partitions: dict[torch.Tensor, Partition] = {}
        self._by_block: dict[Block, list[Partition]] = {}
        self._locks = locks or PageLocks(None)
        self._arrivals: Arrivals | None = None
        self._open: list[Block] = []
        """Blocks on the tier that are held: the one that a gradient came to last, after those that wait for some."""
        self._spent: set[Block] = set()
        """Used by the latest step, and not changed since: ``zero_grad`` drops them, so they are not read ahead."""
        self._due: set[Block] = set()
        """A step that has returned will use them, though ``zero_grad`` drops them."""
        self._hooks: list[Any] = []
        self._closed = False

    def reserve(
        self, groups: Sequence[tuple[str, Sequence[tuple[torch.Tensor, torch.dtype]]]], *, in_memory: bool = False
    ) -> Sequence[Block]:
        """Reserve blocks for groups, each a name and its parameters with their accumulation dtypes. `take` comes later.

        All of their space is promised. It raises OutOfSpaceError with the bytes needed and free, MemoryError or
        RuntimeError if host memory cannot be had or pinned; then nothing was reserved.
        """
        self.flush()
        devices = {local_tensor(leaf).device for _, params in groups for leaf, _ in params}
        device = next((device for device in devices if is_device(device)), None)
        if device is not None and self._arrivals is None:
            self._arrivals = Arrivals(device, self._locks)
        partitions = [[(local_tensor(leaf).numel(), dtype) for leaf, dtype in params] for _, params in groups]
        layouts = list(map(block_layout, partitions))
        sizes = [(f"{KIND} of {name}", size) for (name, _), (_, size) in zip(groups, layouts, strict=True)]
        if in_memory:
            remedy = stay_remedy(_KEY)
            blocks = self.cache.keep(sizes, lambda pool: self._locks.lock(pool, device, remedy) if device else None)
        else:
            blocks = self.cache.add(sizes)
        for block, (_, params), (offsets, _) in zip(blocks, groups, layouts, strict=True):
            placed = zip(params, offsets, strict=True)
            self._by_block[block] = [Partition(self, leaf, block, at, dtype) for (leaf, dtype), at in placed]
        return blocks

    def _lock(self, buffers: BufferPool) -> None:
        if self._arrivals is not None:
            self._locks.lock(buffers, self._arrivals.device, f"lower {_KEY}.buffer_count")

    def take(self, blocks: Sequence[Block]) -> None:
        """Take gradients when they arrive, from now on."""
        for block in blocks:
            for partition in self._by_block[block]:
                self._partitions[partition.leaf] = partition
                self._hooks.append(partition.leaf.register_post_accumulate_grad_hook(self._arrived))  # type: ignore[no-untyped-call]

    def takes(self, leaf: torch.Tensor) -> bool:
        """Return whether the gradient of a parameter comes here when it arrives."""
        return leaf in self._partitions

    def drop(self, blocks: Sequence[Block]) -> None:
        """Forget the latest blocks, of which no gradient was taken."""
        for block in blocks:
            del self._by_block[block]
        self.cache.drop(blocks)

    def change(self, partition: Partition, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run an in-place operator on a partition. StateError: its stand-in is no longer the parameter's gradient."""
        if not partition.is_valid:
            raise StateError(partition.block.name, "the present gradient", "one that was dropped")
        self._hold_open(partition.block)
        partition.note_change()
        if (
            self._arrivals is not None
            and args
            and isinstance(args[0], torch.Tensor)
            and args[0].shape == partition.shape
        ):
            operand, *others = args
            if not is_host(operand.device):
                self._arrivals.bring(
                    partition.block,
                    operand.detach().contiguous(),
                    lambda landed: self._run(partition, operator, landed, *others, **kwargs),
                )
                return
        self.land()
        on_host = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
        self._run(partition, operator, *on_host, **kwargs)

    def _run(self, partition: Partition, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            operator(partition.shaped(), *args, **kwargs)
        partition.take_sums(self._tile_sums)

    def land(self) -> None:
        """Wait for gradients on their way from a device, and for what follows when they land."""
        if self._arrivals is not None:
            self._arrivals.land()

    def begin_step(self, due: Iterable[Block]) -> None:
        """Note that backward is over and a step begins, which uses blocks that are `due` after it has returned."""
        self.flush()
        self._spent.clear()
        self._due = set(due)

    def forget(self, block: Block) -> None:
        """Keep no gradient of a block: a step has used them all before they were written."""
        for partition in self._by_block[block]:
            partition.forget()
        block.holders.discard(self)
        if block in self._open:
            self._open.remove(block)
        self.cache.forget(block)

    def end_use(self, block: Block) -> None:
        """Note that a step needs this block no more."""
        self._spent.add(block)
        self._due.discard(block)

    def copy_of(self, partition: Partition) -> torch.Tensor:
        """Return a copy of a partition in the shard's shape. StateError: as for `change`."""
        if not partition.is_valid:
            raise StateError(partition.block.name, "the present gradient", "one that was dropped")
        self.flush()
        with self.cache.holding(partition.block, in_order=False):
            return partition.shaped().clone()

    def flush(self) -> None:
        """Let the last blocks be written: the backward pass is over."""
        self.land()
        while self._open:
            self._release(self._open[0])

    def _release(self, block: Block) -> None:
        try:
            self.cache.release(block, by=self, changed=True)
        finally:
            self._open.remove(block)

    def _release_landed(self) -> None:
        """Let blocks be written for which nothing is on its way; wait for one where they take too many buffers."""
        arrivals = self._arrivals
        if arrivals is not None and len(self._open) >= max(1, self.cache.num_buffers - 1):
            arrivals.land(self._open[0])
        for block in list(self._open):
            if arrivals is None or not arrivals.concerns(block):
                self._release(block)

    def close(self) -> None:
        """Take no more gradients, free the memory and delete the swap files. Idempotent."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._arrivals is not None:
            self._arrivals.close()
        self._open.clear()
        self._partitions.clear()
        self._by_block.clear()
        self._spent.clear()
        self._due.clear()
        self.cache.close()

    def _arrived(self, leaf: torch.Tensor) -> None:
        partition = self._partitions[leaf]
        if leaf.grad is None or partition.is_valid:
            return
        arrived = local_tensor(leaf.grad)
        self._hold_open(partition.block)
        partition.note_change()
        if self._arrivals is None or is_host(arrived.device):
            partition.shaped().copy_(arrived)
            partition.take_sums(self._tile_sums)
        else:
            take_sums = partial(partition.take_sums, self._tile_sums)
            self._arrivals.fill(partition.block, partition.shaped(), arrived, take_sums)
        partition.become_grad()

    def _hold_open(self, block: Block) -> None:
        if self._closed:
            raise ClosedError("the gradient tier")
        if block.stays or block in self._open:
            return
        self._release_landed()
        self._spent.discard(block)
        self.cache.order.note(block.index)
        self.cache.hold(block, by=self, change=True, load=self._is_needed(block))
        self._open.append(block)

    def _give_up_stale(self) -> None:
        """End holds that an exception left behind."""
        for block in self.cache.residents:
            if block not in self._open:
                block.holders.discard(self)

    def _is_needed(self, block: Block) -> bool:
        return any(partition.is_valid for partition in self._by_block[block])
