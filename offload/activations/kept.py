"""A storage that was saved, and the handles by which it is had back."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .._torch_private import storage_identity, version_of
from ..devices.device import Event, Near
from ..errors import check_may_follow
from ..swapper.tensor_transfer import TensorTransfer


class ActivationResidency(enum.Enum):
    """The residency tells where the bytes of a saved storage are."""

    MEMORY = "memory"
    """The bytes are in memory only."""
    LEAVING = "leaving"
    """The bytes are in memory, and being copied to staging buffers."""
    TIER = "tier"
    """The bytes are on the drive, or on their way to it in staging buffers."""
    COMING = "coming"
    """The bytes are on the drive, and on their way to memory."""
    BOTH = "both"
    """The bytes are on the drive and, equal, in memory, which may be given up."""


_MAY_FOLLOW = {
    ActivationResidency.MEMORY: {ActivationResidency.LEAVING},
    ActivationResidency.LEAVING: {ActivationResidency.TIER, ActivationResidency.MEMORY},
    ActivationResidency.TIER: {ActivationResidency.COMING},
    ActivationResidency.COMING: {ActivationResidency.BOTH, ActivationResidency.TIER},
    ActivationResidency.BOTH: {ActivationResidency.TIER},
}
"""Which residency may follow which, and who sees to it:

MEMORY -> LEAVING [ActivationStore._write]
LEAVING -> TIER [ActivationStore._end_copy]: the staging buffers have it all
LEAVING -> MEMORY [ActivationStore._come_back]: the drive does not take it
TIER -> COMING [ActivationStore._read]
COMING -> BOTH [ActivationStore._arrive]
COMING -> TIER [ActivationStore._fetch]: the read has failed
BOTH -> TIER [ActivationStore._send_off]: its memory is given up, and nothing is written again
"""


@dataclass(kw_only=True)
class ActivationStats:
    """Figures of what was saved for backward, and where it went; bytes of whole storages, each counted once."""

    host_budget: int
    """Bytes of memory that saved tensors may take."""
    num_kept: int = 0
    """Storages that somebody has a handle of."""
    held_bytes: int = 0
    """Their bytes in memory, on their way out of it or into it."""
    peak_held_bytes: int = 0
    """The most that `held_bytes` was."""
    num_saved: int = 0
    saved_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    num_reads: int = 0
    num_reads_foreseen: int = 0
    """Reads that had begun before somebody asked for the tensor."""
    seconds_waiting_write: float = 0.0
    """Time for which a forward waited until memory was copied to staging buffers."""
    seconds_waiting_read: float = 0.0
    """Time for which a backward waited for reads."""

    @property
    def seconds_waiting(self) -> float:
        """Time for which forwards and backwards waited."""
        return self.seconds_waiting_write + self.seconds_waiting_read

    def add(self, **amounts: float) -> None:
        """Add to figures, by name. For the store only."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)


class SavedRecord:
    """One storage in one version: the store's knowledge of it.

    Whatever thread lets the last handle go calls `on_death`, with a reference whose key is the number. Its bytes in
    memory are counted.
    """

    def __init__(
        self,
        number: int,
        storage: torch.UntypedStorage,
        version: int,
        stats: ActivationStats,
        on_death: Callable[[weakref.KeyedRef[int, Holder]], object],
    ) -> None:
        self.number = number
        self.size_bytes = storage.nbytes()
        self.version = version
        self.key = storage_identity(storage)
        """Equal for one storage, and for no other one while this object lives."""
        self.residency = ActivationResidency.MEMORY
        self.transfer: TensorTransfer[Any] | None = None
        """The latest one, under way or over; None: there was none, or nobody has heard of it, when it is LEAVING."""
        self.was_sent = False
        """Whether anything may be on the drive under its name."""
        self.landed: Event | None = None
        """Comes behind the copy of a device's bytes to memory; None where they were in host memory from the first."""
        self._stats = stats
        self._counted = 0
        self._on_death = on_death
        self._holder: weakref.KeyedRef[int, Holder] | None = None

    @property
    def name(self) -> str:
        """It is on the drive under this name."""
        return f"activation {self.number}"

    def is_of(self, version: int, since: int) -> bool:
        """Whether its bytes are those that its storage has now, at this `version`, as far as that can be known.

        Records of the forward that is running have numbers from `since` on.
        """
        is_here = self.residency in (ActivationResidency.MEMORY, ActivationResidency.LEAVING)
        aliases = is_here and self.landed is None
        return self.version == version and (aliases or self.number >= since)

    @property
    def holder(self) -> Holder | None:
        """The memory that its handles share; None where nobody has one any more."""
        return self._holder() if self._holder is not None else None

    def hold(self, memory: torch.Tensor, near: Near | None = None) -> Holder:
        """Give the first handle what it needs: once. `near` is what is copied to the memory from a device."""
        self.landed = near.mark if near is not None else None
        holder = Holder(self, memory, near)
        self._holder = weakref.KeyedRef(holder, self._on_death, self.number)
        return holder

    def become(
        self, residency: ActivationResidency, memory: torch.Tensor | None, transfer: TensorTransfer[Any] | None = None
    ) -> None:
        """Change the residency, or raise StateError, and with it the memory that is held, which has 1D bytes.

        The memory is None on the tier and on the way from it. A transfer may begin with the residency.
        """
        check_may_follow(self.name, _MAY_FOLLOW, self.residency, residency)
        self.count(residency is not ActivationResidency.TIER)
        self.was_sent = True
        leaving = residency is ActivationResidency.LEAVING
        self.residency, self.transfer = residency, None if leaving else transfer or self.transfer
        if (holder := self.holder) is not None:
            holder.hold(memory)

    def note_write(self, transfer: TensorTransfer[Any]) -> None:
        """Note what writes it."""
        self.transfer = transfer

    @property
    def leaves(self) -> bool:
        """Whether it is being copied to staging buffers, and nothing has cut short what began that."""
        return self.residency is ActivationResidency.LEAVING and self.transfer is not None

    def count(self, has_memory: bool) -> None:
        """Have its bytes counted, or not. What an exception cuts short another call makes good."""
        size_bytes, stats = self.size_bytes if has_memory else 0, self._stats
        # No call in between: a signal handler sees both or neither.
        stats.held_bytes += size_bytes - self._counted
        self._counted = size_bytes


class Holder:
    """The memory of a record. Handles have it, and the store does not: it goes with the last of them."""

    __slots__ = ("__weakref__", "memory", "near", "record")

    def __init__(self, record: SavedRecord, memory: torch.Tensor, near: Near | None) -> None:
        self.record = record
        self.memory: torch.Tensor | None = memory
        self.near = near
        """The bytes on the device that they were saved on, as long as they are there."""

    def hold(self, memory: torch.Tensor | None) -> None:
        """Have other memory, or none."""
        self.memory = memory

    def hold_near(self, near: Near | None) -> None:
        """Have other memory on the device, or none."""
        self.near = near


class Handle(Protocol):
    """It stands for a tensor that was given away; the bytes are kept as long as it lives."""

    def take(self) -> torch.Tensor:
        """Return the tensor: same shape, strides, dtype and bits. It may be taken again.

        Raises:
            SwapIOError, CorruptionError: it cannot be read.
            RuntimeError: the tensor was changed in place since, as torch has it.
        """


class InPlace:
    """A handle of a tensor that stays where it is."""

    __slots__ = ("_saved_version", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # a result that is saved has the graph, and the graph has this
        self._saved_version = version_of(tensor)

    def take(self) -> torch.Tensor:
        """See `Handle.take`."""
        _check_unchanged(self._tensor, self._tensor.shape, self._saved_version)
        return self._tensor


class KeptTensor:
    """A handle of a tensor whose storage is kept: its shape, strides and place there."""

    __slots__ = ("_fetch", "_holder", "_layout", "_saved_version", "counter")

    def __init__(self, holder: Holder, fetch: Callable[[Holder], torch.Tensor], tensor: torch.Tensor) -> None:
        self._holder = holder
        self._fetch = fetch
        self._layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.counter = counter_of(tensor)
        """It shares the tensor's version counter, and holds no memory."""
        self._saved_version = version_of(tensor)

    @property
    def number(self) -> int:
        """The number of its record."""
        return self._holder.record.number

    def take(self) -> torch.Tensor:
        """See `Handle.take`."""
        _check_unchanged(self.counter, self._layout[1], self._saved_version)
        memory = self._fetch(self._holder)
        offset, size, stride = self._layout
        itemsize = self.counter.dtype.itemsize
        whole = memory[: memory.numel() // itemsize * itemsize].view(self.counter.dtype)
        return whole.as_strided(size, stride, offset)


def _check_unchanged(counter: torch.Tensor, size: torch.Size, saved_version: int) -> None:
    """Raise what torch raises for a saved tensor that was changed in place. Where there are hooks, it does not look."""
    if (version := version_of(counter)) != saved_version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{counter.dtype} {list(size)}] is at version {version}; expected version {saved_version} instead"
        )


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the version counter of another, and holds no memory."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View all bytes of a tensor's storage, 1D uint8."""
    none = tensor.detach().as_strided((0,), (1,), 0).view(torch.uint8)
    return none.as_strided((tensor.untyped_storage().nbytes(),), (1,), 0)
