"""An extent of a durable run holds the state, a tail that lives in memory besides, and a trailer that seals both.

::

    [ state | tail | trailer ]        each part begins and ends where direct I/O may

A step reads the state alone and writes all of it. The trailer says which slot and which write this is, and has the
checksums of state and tail, so that it can be told, years later, whether an extent is what a manifest refers to: the
manifest has one number for each slot, the digest of its trailer (its root).
"""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import CorruptionError
from ..storage.tier import Memory
from ..units import round_up

SUMMED_BYTES = 256 << 10
"""Bytes of state, or of the tail, that one checksum covers: those of `aio.checksums` elsewhere."""

_MAGIC = b"nvmeseal"
_HEADER = struct.Struct("<8sQQQQQ")  # magic, incarnation, sequence, slot, sums of the state, sums of the tail
_UINT64 = (1 << 64) - 1


@dataclass(frozen=True)
class ExtentLayout:
    """The places of state, tail and trailer in the extent of one slot, in bytes."""

    state_bytes: int
    tail_bytes: int
    """The bytes that are not read in training and cannot be had again: upper halves, fp32 parameters. May be 0."""
    alignment: int

    @property
    def state_span(self) -> int:
        """Bytes to read in training: the state, rounded up."""
        return round_up(self.state_bytes, self.alignment)

    @property
    def tail_at(self) -> int:
        """Return where the tail begins."""
        return self.state_span

    @property
    def trailer_at(self) -> int:
        """Return where the trailer begins."""
        return self.tail_at + round_up(self.tail_bytes, self.alignment)

    @property
    def trailer_bytes(self) -> int:
        """Bytes of the trailer, rounded up."""
        sums = num_sums(self.state_bytes) + num_sums(self.tail_bytes)
        return round_up(_HEADER.size + 8 * sums, self.alignment)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole extent, and of a staging buffer for it."""
        return self.trailer_at + self.trailer_bytes

    @property
    def parts(self) -> tuple[int, int]:
        """Return what is striped over the paths by itself: what is read alone, and the rest."""
        return self.state_span, self.size_bytes - self.state_span


def num_sums(size_bytes: int) -> int:
    """Return how many checksums cover so many bytes."""
    return -(-size_bytes // SUMMED_BYTES)


@dataclass(frozen=True, eq=False)
class Sums:
    """Checksums of one extent, 1D int64 each: one for every `SUMMED_BYTES`, the last one of what is left."""

    state: torch.Tensor
    tail: torch.Tensor


@dataclass(frozen=True)
class SealedAs:
    """This says which write of which slot an extent is of: `sequence` is the number of the manifest that it is for."""

    slot: int
    sequence: int
    incarnation: int


def seal(memory: Memory, layout: ExtentLayout, sealed_as: SealedAs, sums: Sums) -> int:
    """Write the trailer behind state and tail in a staging buffer; returns its root, an int64."""
    trailer = memory.view(torch.uint8, layout.trailer_at, layout.trailer_bytes)
    head = (sealed_as.incarnation, sealed_as.sequence, sealed_as.slot, sums.state.numel(), sums.tail.numel())
    sums_of_both = [each.numpy().tobytes() for each in (sums.state, sums.tail)]
    content = b"".join([_HEADER.pack(_MAGIC, *head), *sums_of_both])
    trailer.zero_()
    trailer[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return _root(trailer)


def open_sealed(memory: Memory, layout: ExtentLayout, sealed_as: SealedAs, root: int, *, path: str, what: str) -> Sums:
    """Check the trailer of an extent that was read, or raise CorruptionError; returns the sums of state and tail."""
    trailer = memory.view(torch.uint8, layout.trailer_at, layout.trailer_bytes)
    if (actual := _root(trailer)) != root:
        raise CorruptionError(path, f"{what}, its trailer", root & _UINT64, actual & _UINT64)
    content = trailer.numpy().tobytes()
    magic, *head = _HEADER.unpack_from(content)
    counts = num_sums(layout.state_bytes), num_sums(layout.tail_bytes)
    if magic != _MAGIC or head != [sealed_as.incarnation, sealed_as.sequence, sealed_as.slot, *counts]:
        raise CorruptionError(path, f"{what}, its trailer is of another write", sealed_as.sequence, head[1])
    sums = torch.from_numpy(np.frombuffer(content, "<i8", sum(counts), _HEADER.size).copy())
    return Sums(sums[: counts[0]], sums[counts[0] :])


def check_sums(expected: torch.Tensor, actual: torch.Tensor, *, path: str, what: str) -> None:
    """Raise CorruptionError for the first checksum that is not what it must be. Both 1D int64, of one length."""
    wrong = (expected != actual).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise CorruptionError(path, what, int(expected[place]) & _UINT64, int(actual[place]) & _UINT64)


def _root(trailer: torch.Tensor) -> int:
    digest = hashlib.blake2b(trailer.numpy().data, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
