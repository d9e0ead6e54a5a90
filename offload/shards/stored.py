"""A sharded parameter is stored where it is computed with, in a block of a tier, or nowhere yet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

from .._torch_private import Lent
from ..devices.device import HOST, is_host
from ..errors import StateError
from ..staging.block_cache import Block, View
from .stand_in import StandIn


class Padded(NamedTuple):
    """A shard is stored like this: the shape that FSDP2 gathers, padding included, and the dtype."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.shape.numel()


class StoredShard(Protocol):
    """The kept part of a shard, which is gathered: the upper half, a copy in fp16, or all of it in fp32."""

    device: torch.device
    """The device that computes with it."""
    form: Padded

    @property
    def has_value(self) -> bool:
        """Whether its bytes are in files that others wrote, so that nobody needs to put them there."""

    def gather(self) -> torch.Tensor:
        """The padded tensor, for FSDP2 to copy; valid until `end_gather`, or until another group is gathered."""

    def end_gather(self) -> None:
        """Let it go: FSDP2 has copied it."""

    def held(self, *, change: bool) -> AbstractContextManager[torch.Tensor]:
        """The elements, 1D with the padding; what is done to them with `change` is kept."""

    def declared(self, shape: torch.Size) -> torch.Tensor:
        """A tensor of the shard's shape that has the dtype, strides and device; its data only where it is resident."""


class ResidentShard:
    """Stored where it is computed with: `values` are padded and contiguous."""

    has_value = False

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._come_back: Callable[[], object] = lambda: None
        self.device = values.device
        self.form = Padded(values.shape, values.dtype)

    @property
    def values(self) -> torch.Tensor:
        """The tensor; if its bytes have left their device, they come back first."""
        self._come_back()
        return self._values

    def leaving(self, come_back: Callable[[], object]) -> torch.Tensor:
        """Return the tensor, whose bytes are about to leave their device, and which `come_back` brings back."""
        self._come_back = come_back
        return self._values

    def gather(self) -> torch.Tensor:
        """Hand FSDP2 the tensor itself, which is there."""
        return self.values

    def end_gather(self) -> None:
        """Do nothing: a gather holds nothing of a tensor in memory."""

    def held(self, *, change: bool) -> AbstractContextManager[torch.Tensor]:
        """Give the tensor itself, 1D, for the time of the block."""
        return nullcontext(self.values.view(-1))

    def declared(self, shape: torch.Size) -> torch.Tensor:
        """Give a view of the tensor without the padding."""
        return self.values.view(-1)[: shape.numel()].view(shape)


class UnbornShard:
    """A shard that has no place yet, because nothing has a value yet."""

    has_value = False

    def __init__(self, form: Padded, device: torch.device = HOST) -> None:
        self.form = form
        self.device = device

    def gather(self) -> torch.Tensor:
        """Raise StateError: there is nothing to gather."""
        raise StateError("a parameter", "an optimizer that gives it a place", "none yet")

    def end_gather(self) -> None:
        """Do nothing: a gather holds nothing of a tensor without data."""

    def held(self, *, change: bool) -> AbstractContextManager[torch.Tensor]:
        """Refuse, as `gather` does: there is no data to hold."""
        return nullcontext(self.gather())

    def declared(self, shape: torch.Size) -> torch.Tensor:
        """Give a stand-in without data, of this shape."""
        like = torch.empty(shape, device="meta")
        name, remedy = "a parameter without a value", "give it one first"
        return StandIn(like, self.form.dtype, name=name, remedy=remedy, device=self.device)


class Lender(Protocol):
    """`Loans` are this to shards in blocks."""

    def lend(self, block: Block, byte_offset: int, size_bytes: int, withdraw: Callable[[], object]) -> Lent | None:
        """Return bytes of a block that is held, for longer, and what to call when they are let go."""


class ShardTier(Protocol):
    """A `ParamTier` is this to the shards in its blocks."""

    @property
    def loans(self) -> Lender:
        """Lends staging buffers."""

    def begin_gather(self, shard: TieredShard) -> None:
        """Hold the block of a parameter that FSDP2 is about to copy, if it is not held for that already."""

    def sent(self, shard: TieredShard) -> torch.Tensor:
        """Give the bytes of a parameter's block on the device that computes with it."""

    def end_gather(self, shard: TieredShard) -> None:
        """Note that FSDP2 has copied a parameter."""

    def holding(
        self, block: Block, view: Callable[[], View], *, change: bool, in_order: bool
    ) -> AbstractContextManager[View]:
        """Keep a block in host memory, outside forward and backward, and give what `view` does."""


class TieredShard:
    """Stored in a block of a `ParamTier`, from `byte_offset` on."""

    def __init__(self, tier: ShardTier, block: Block, byte_offset: int, form: Padded, device: torch.device) -> None:
        self.block = block
        self.device = device
        self.form = form
        self._tier = tier
        self._byte_offset = byte_offset
        self._declared: torch.Tensor | None = None

    @property
    def has_value(self) -> bool:
        """Return whether its bytes are in files that others wrote, so that nobody needs to put them there."""
        return self.block.extent is not None and self.block.extent.is_of_others

    def gather(self) -> torch.Tensor:
        """Return a view of the staging buffer, or of its copy on a device; see `param_tier`."""
        if not is_host(self.device):
            stop = self._byte_offset + self.form.numel * self.form.dtype.itemsize
            return self._tier.sent(self)[self._byte_offset : stop].view(self.form.dtype).view(self.form.shape)
        self._tier.begin_gather(self)
        return self.view().view(self.form.shape)

    def end_gather(self) -> None:
        """Let the block go: FSDP2 has copied it."""
        self._tier.end_gather(self)

    def lend(self, withdraw: Callable[[], object]) -> Lent | None:
        """Lend the bytes of what `gather` gave, for longer than until `end_gather`; see `Loans.lend`."""
        size_bytes = self.form.numel * self.form.dtype.itemsize
        return self._tier.loans.lend(self.block, self._byte_offset, size_bytes, withdraw)

    def held(
        self, *, change: bool, view: Callable[[], torch.Tensor] | None = None
    ) -> AbstractContextManager[torch.Tensor]:
        """Give a view of the staging buffer, 1D, or another. For accesses from outside forward, backward and step."""
        return self._tier.holding(self.block, view or self.view, change=change, in_order=False)

    def view(self) -> torch.Tensor:
        """Return the elements over the staging buffer, 1D with the padding. The block must be held."""
        return self.block.held_buffer.view(self.form.dtype, self._byte_offset, self.form.numel)

    def declared(self, shape: torch.Size) -> torch.Tensor:
        """Give a stand-in without data, of this shape."""
        if self._declared is None:
            self._declared = StandIn(
                torch.empty(shape, device="meta"),
                self.form.dtype,
                name=self.block.name,
                remedy="read the parameter itself, which is a tensor that fetches its data",
                device=self.device,
            )
        return self._declared
