"""The upper halves of sharded parameters: in host memory, or on NVMe in one block for each group that FSDP2 gathers.

FSDP2 asks for the upper half of every parameter of a group, one after the other, and copies them into a buffer of its
own (``foreach_all_gather``, ``wait_for_unshard``). Then it tells each of them that it is done
(``fsdp_post_all_gather``). Between the first question and the last answer the block is held in its staging buffer. On
the CPU the copying is over when the next group is asked for; so where an answer never comes, because a group was
gathered ahead and then not used, the hold is given up when its buffer is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nvme_offload.offload.config.tiers import OffloadParamConfig
from nvme_offload.offload.errors import ClosedError, ConfigError, StateError
from nvme_offload.offload.shards.stand_in import StandIn
from nvme_offload.offload.staging.block_cache import Block, BlockCache
from nvme_offload.offload.storage.tier import Tier
from nvme_offload.offload.units import format_bytes

KIND = "parameters"
"""What the bytes of this tier are counted as."""

BUFFER_SIZE_KEY = "zero_optimization.offload_param.buffer_size"

_ALIGNMENT = 64  # bytes: every upper half starts at a cache line


class UpperHalf(Protocol):
    """The upper half of a shard, bf16, padded as FSDP2 gathers it."""

    device: torch.device

    def gather(self) -> torch.Tensor:
        """The padded tensor, for FSDP2 to copy; valid until `end_gather`, or until another group is gathered."""

    def end_gather(self) -> None:
        """Let the upper half go: FSDP2 has copied it."""

    def held(self, *, change: bool) -> AbstractContextManager[torch.Tensor]:
        """The elements, 1D with the padding; what is done to them with `change` is kept."""

    def declared(self, shape: torch.Size) -> torch.Tensor:
        """A tensor of the shard's shape that has the dtype, strides and device; its data only where it is resident."""


class ResidentUpper:
    """An upper half in host memory.

    Args:
        values: bf16, padded, contiguous.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.device = values.device

    def gather(self) -> torch.Tensor:
        """Hand FSDP2 the tensor itself, which is in memory."""
        return self.values

    def end_gather(self) -> None:
        """Do nothing: a gather holds nothing of a tensor in memory."""

    def held(self, *, change: bool) -> AbstractContextManager[torch.Tensor]:
        """Give the tensor itself, 1D, for the time of the block."""
        return nullcontext(self.values.view(-1))

    def declared(self, shape: torch.Size) -> torch.Tensor:
        """Give a view of the tensor without the padding."""
        return self.values.view(-1)[: shape.numel()].view(shape)


class UnbornUpper:
    """An upper half that has no place yet, because nothing has a value yet.

    Args:
        padded_shape: what FSDP2 will gather.
    """

    def __init__(self, padded_shape: torch.Size) -> None:
        self.padded_shape = padded_shape
        self.device = torch.device("cpu")

    def gather(self) -> torch.Tensor:
        """There is nothing to gather.

        Raises:
            StateError: always.
        """
        raise StateError("a parameter", "an optimizer that gives it a place", "none yet")

    def end_gather(self) -> None:
        """Do nothing: a gather holds nothing of a tensor without data."""

    def held(self, *, change: bool) -> AbstractContextManager[torch.Tensor]:
        """Refuse, as `gather` does: there is no data to hold."""
        return nullcontext(self.gather())

    def declared(self, shape: torch.Size) -> torch.Tensor:
        """Give a stand-in without data, of this shape."""
        like = torch.empty(shape, device="meta")
        return StandIn(like, torch.bfloat16, name="a parameter without a value", remedy="give it one first")


class TieredUpper:
    """An upper half in a block of a `ParamTier`.

    Args:
        tier: where the block is.
        block: which.
        byte_offset: of the first element in the block.
        padded_shape: what FSDP2 gathers.
    """

    def __init__(self, tier: ParamTier, block: Block, byte_offset: int, padded_shape: torch.Size) -> None:
        self.block = block
        self.device = torch.device("cpu")
        self._tier = tier
        self._byte_offset = byte_offset
        self._padded_shape = padded_shape
        self._declared: torch.Tensor | None = None

    def gather(self) -> torch.Tensor:
        """A view of the staging buffer; see the module's first lines for how long it is valid."""
        self._tier.begin_gather(self)
        return self.view().view(self._padded_shape)

    def end_gather(self) -> None:
        """Let the block go: FSDP2 has copied it."""
        self._tier.end_gather(self)

    @contextmanager
    def held(self, *, change: bool) -> Iterator[torch.Tensor]:
        """A view of the staging buffer, 1D. For accesses from outside forward, backward and step."""
        with self._tier.holding(self.block, change=change, in_order=False):
            yield self.view()

    def view(self) -> torch.Tensor:
        """1D bf16 with the padding, over the staging buffer. The block must be held."""
        assert self.block.buffer is not None
        return self.block.buffer.view(torch.bfloat16, self._byte_offset, self._padded_shape.numel())

    def declared(self, shape: torch.Size) -> torch.Tensor:
        """Give a stand-in without data, of this shape."""
        if self._declared is None:
            self._declared = StandIn(
                torch.empty(shape, device="meta"),
                torch.bfloat16,
                name=self.block.name,
                remedy="read the parameter itself, which is an fp32 tensor that fetches its data",
            )
        return self._declared


@dataclass(eq=False)
class _Gather:
    """One use of a block by FSDP2."""

    block: Block
    asked: set[TieredUpper] = field(default_factory=set)
    answered: set[TieredUpper] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether all that was asked for has been copied."""
        return self.asked == self.answered


class ParamTier:
    """Blocks of upper halves on NVMe. For one thread at a time.

    Args:
        config: `zero_optimization.offload_param`.
        tier: of its own; closed with it.
        checksum: see `BlockCache`.
    """

    def __init__(
        self,
        config: OffloadParamConfig,
        tier: Tier,
        checksum: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._config = config
        self.cache = BlockCache(tier, KIND, config.buffer_count, read_ahead=config.read_ahead, checksum=checksum)
        self.cache.on_pressure = self._give_up_stale
        self._gathers: list[_Gather] = []  # not complete, the latest last
        self._latest: _Gather | None = None
        self._closed = False

    def reserve(self, groups: Sequence[tuple[str, Sequence[torch.Size]]]) -> list[list[TieredUpper]]:
        """Blocks for groups of parameters, with all of their space promised.

        Args:
            groups: the name of each, and the padded shapes of its parameters.

        Returns:
            A place for each parameter; `put` its values there before anything else.

        Raises:
            ConfigError: a block is larger than a staging buffer may be.
            OutOfSpaceError: names bytes needed and free.
            Nothing was reserved then.
        """
        layouts = [block_layout((shape.numel(), torch.bfloat16) for shape in shapes) for _, shapes in groups]
        sizes = [(f"{KIND} of {name}", size) for (name, _), (_, size) in zip(groups, layouts, strict=True)]
        check_block_sizes(sizes, self._config.buffer_size, BUFFER_SIZE_KEY)
        blocks = self.cache.add(sizes)
        return [
            [TieredUpper(self, block, at, shape) for at, shape in zip(offsets, shapes, strict=True)]
            for block, (offsets, _), (_, shapes) in zip(blocks, layouts, groups, strict=True)
        ]

    def put(self, places: Sequence[TieredUpper], values: Sequence[UpperHalf]) -> None:
        """Fill a block for the first time, with the upper halves of all of its parameters. The write runs behind.

        Those that have no value yet are zero; nothing is written where none has one.
        """
        if all(isinstance(upper, UnbornUpper) for upper in values):
            return
        with self.cache.holding(places[0].block, change=True):
            for place, upper in zip(places, values, strict=True):
                if not isinstance(upper, UnbornUpper):
                    place.view().copy_(upper.gather().reshape(-1))

    def begin_gather(self, upper: TieredUpper) -> None:
        """Hold the block of a parameter that FSDP2 is about to copy, if it is not held for that already.

        Raises:
            SwapIOError: it cannot be read; names the block.
            ClosedError: after ``close``.
        """
        self._check_open()
        gather = next((gather for gather in self._gathers if gather.block is upper.block), None)
        if gather is None and self._latest is not None and self._latest.block is upper.block:
            gather = self._latest  # its parameters are asked for and copied one by one
        is_new = gather is None or upper in gather.asked
        if gather is None or is_new:
            if gather in self._gathers:
                self._end(gather)
            gather = _Gather(upper.block)
            self.cache.order.note(upper.block.index)
        if gather not in self._gathers:
            self.cache.hold(upper.block, by=gather, is_new=is_new)
            self._gathers.append(gather)
        gather.asked.add(upper)
        self._latest = gather

    def end_gather(self, upper: TieredUpper) -> None:
        """FSDP2 has copied a parameter; with the last one of its block the hold ends."""
        for gather in self._gathers:
            if gather.block is upper.block:
                gather.answered.add(upper)
                if gather.complete:
                    self._end(gather)
                return

    @contextmanager
    def holding(self, block: Block, *, change: bool, in_order: bool) -> Iterator[None]:
        """Keep a block in its staging buffer, outside forward and backward; see `BlockCache.hold`."""
        self._check_open()
        with self.cache.holding(block, change=change, in_order=in_order):
            yield

    def close(self) -> None:
        """Free the memory and delete the swap files, with the parameters in them. Idempotent."""
        self._closed = True
        self._gathers.clear()
        self.cache.close()

    def _end(self, gather: _Gather | None) -> None:
        if gather is not None:
            self._gathers.remove(gather)
            self.cache.release(gather.block, by=gather)

    def _give_up_stale(self) -> None:
        """End all but the latest gather: FSDP2 copied those before it asked for anything else.

        And holds for gathers that an exception took from the list.
        """
        for block in self.cache.residents:
            lost = {by for by in block.holders if isinstance(by, _Gather) and by not in self._gathers}
            block.holders.difference_update(lost)
        for gather in list(self._gathers):
            if gather is not self._latest:
                self._end(gather)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the parameter tier, which holds the weights,")


def block_layout(tensors: Iterable[tuple[int, torch.dtype]]) -> tuple[list[int], int]:
    """Byte offsets in a block of tensors of so many elements and these dtypes, and the bytes of the block."""
    offsets, end = [], 0
    for numel, dtype in tensors:
        offsets.append(end)
        end += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(end, _ALIGNMENT)


def check_block_sizes(sizes: Iterable[tuple[str, int]], limit: int | None, key: str) -> None:
    """Raise ConfigError for the first block, by name and bytes, that is larger than a staging buffer may be.

    Args:
        sizes: name and bytes of each block.
        limit: 16-bit elements of a staging buffer; None: no limit.
        key: that sets the limit.
    """
    for name, size_bytes in sizes:
        if limit is not None and size_bytes > 2 * limit:
            what = f"{name} take {size_bytes} bytes ({format_bytes(size_bytes)}), for they are gathered together"
            room = f"a staging buffer of {limit} elements holds {2 * limit}"
            raise ConfigError(
                [f"{key} = {limit}: {what}; {room}; write at least {-(-size_bytes // 2)}, or gather smaller blocks"]
            )
