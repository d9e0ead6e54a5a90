"""A tier is this to whoever keeps bytes on it.

A tier promises space in extents and moves bytes between an extent and a staging buffer. Who uses one need not know
whether files, memory or nothing at all is behind it, and never asks: what he may need is here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from nvme_offload.aio_native.engine import EngineStats, Op
from ..host.buffer_pool import BufferPool, StagingBuffer
from .extent import Extent
from .transfer import Transfer


class Memory(Protocol):
    """Bytes that can be worked on: a staging buffer, or an extent that is memory itself."""

    def view(self, dtype: torch.dtype, byte_offset: int, numel: int) -> torch.Tensor:
        """1D tensor [numel] over the bytes from `byte_offset`."""


class Tier(Protocol):
    """A place with capacity and bandwidth: NVMe, host memory, a device's, and the paper one of ``offload plan``."""

    @property
    def name(self) -> str:
        """Return the name of the engine that moves the bytes."""

    @property
    def alignment(self) -> int:
        """Return what sizes of extents are rounded up to, in bytes."""

    def reserve(self, sizes: Sequence[int]) -> list[Extent]:
        """One extent per size, in bytes, with the space of all of them promised.

        An extent that nobody has any more is free again, as when an exception comes before its owner has it.

        Raises:
            OutOfSpaceError: names bytes needed and free; nothing is kept.
        """

    def free(self, extent: Extent) -> None:
        """Give an extent back. Its bytes may be handed out again at once: no transfer may be using it."""

    def memory(self, extent: Extent) -> Memory | None:
        """The bytes of an extent themselves, where the tier is memory; None where a staging buffer is needed."""

    def path_of(self, extent: Extent) -> Path:
        """The file in which an extent begins, for messages."""

    def describe(self, extent: Extent) -> str:
        """The whole place of an extent, in words."""

    def register(self, pools: Sequence[BufferPool]) -> object:
        """Make the memory of these pools known, in place of that of earlier ones, which may go after this."""

    def read(
        self, extent: Extent, buffer: StagingBuffer, *, what: str, kind: str, size_bytes: int | None = None
    ) -> Transfer[StagingBuffer]:
        """Start reading the first `size_bytes` (all by default) of an extent into a buffer.

        Args:
            extent: where from.
            buffer: where to; its memory is kept until the transfer is done.
            what: names the bytes in an error message, for example "subgroup 3".
            kind: what the bytes are counted as, for example "optimizer state".
            size_bytes: a multiple of the alignment.

        Raises:
            SwapIOError: the extent is damaged; nothing was started.
        """

    def write(
        self,
        extent: Extent,
        buffer: StagingBuffer,
        *,
        what: str,
        kind: str,
        start: int = 0,
        size_bytes: int | None = None,
    ) -> Transfer[StagingBuffer]:
        """Start writing a buffer to the first `size_bytes` (all by default) of an extent.

        Arguments as in `read`; `start` is the byte of the buffer that comes first, a multiple of the alignment.
        """

    def quiesce(self, buffer: StagingBuffer) -> None:
        """Wait until no transfer can touch a buffer, also one whose handle an exception kept from the caller."""

    def bytes_of_kind(self, op: Op, kind: str) -> int:
        """Bytes moved in this direction under this kind, since construction."""

    def stats(self) -> EngineStats:
        """Counters since construction."""

    def close(self) -> None:
        """Wait for what is under way and let everything go. Idempotent."""
