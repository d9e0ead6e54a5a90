"""Bytes of files that others wrote lie in ranges: where each comes in a buffer.

Direct I/O reads whole pages, so each range comes with what lies around it, into a buffer that is some pages longer. A
tensor begins in the buffer at a multiple of 64 bytes, as everything does that is computed with: one that does not lie
so in its file is moved there when it has come.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from ..units import round_up

PAGE = 4096
"""Direct reads begin and end at multiples of this."""

ALIGNMENT = 64
"""Addresses of what is computed with are multiples of this, a cache line: others change bits of torch's results."""


class FileIdentity(NamedTuple):
    """An identity tells one state of a file from another, without a look at its bytes."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Self:
        """Return that of an open file."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def differences(self, now: Sequence[int]) -> str:
        """Say in words what has changed."""
        pairs = zip(self._fields, self, now, strict=True)
        return ", ".join(f"its {name} was {before} and is {after}" for name, before, after in pairs if before != after)


class FileRange(NamedTuple):
    """Contiguous bytes of a file, which is known as it was when somebody looked at it first."""

    path: Path
    identity: FileIdentity
    offset: int
    size_bytes: int


@dataclass
class _Run:
    """Bytes of a file that come in one read: they lie one after the other there, and in the buffer."""

    path: Path
    identity: FileIdentity
    page: int
    """The read begins here in the file."""
    place: int
    """It goes here in the buffer."""
    source: int
    """The first byte that counts comes here in the buffer, before it is moved."""
    target: int
    size_bytes: int = 0

    @property
    def end(self) -> int:
        """Return where it ends in the file."""
        return self.page + self.source - self.place + self.size_bytes

    def take(self, part: FileRange) -> int:
        """Read a range with it, and return where that ends in the buffer."""
        self.size_bytes += part.size_bytes
        return self.target + self.size_bytes

    def goes_on(self, part: FileRange, target: int | None) -> bool:
        """Return whether a range can be read with it: at that place in the buffer, or at any that is aligned."""
        lies = self.target + self.size_bytes
        fits = lies % ALIGNMENT == 0 if target is None else lies == target
        return fits and part.path == self.path and part.offset == self.end


@dataclass
class RangeLayout:
    """Tensors that are ranges of files come here in a buffer."""

    runs: list[_Run] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Each tensor begins here, in bytes."""
    size_bytes: int = 0
    """The buffer has so many."""

    @classmethod
    def of(cls, tensors: Sequence[tuple[Sequence[FileRange], int]]) -> Self:
        """Lay out tensors, each the ranges whose bytes are its own, one after the other, and its bytes with padding."""
        layout = cls(size_bytes=PAGE if not any(ranges for ranges, _ in tensors) else 0)
        in_order = sorted(range(len(tensors)), key=lambda number: tuple(tensors[number][0][:1]))
        found = {number: layout._add(*tensors[number]) for number in in_order}
        layout.offsets.extend(found[number] for number in range(len(tensors)))
        return layout

    def _add(self, ranges: Sequence[FileRange], padded_bytes: int) -> int:
        first: int | None = None
        target: int | None = None
        for part in ranges:
            if not (self.runs and self.runs[-1].goes_on(part, target)):
                place, page = self.size_bytes, part.offset // PAGE * PAGE
                source = place + part.offset - page
                aligned = source // ALIGNMENT * ALIGNMENT
                target = aligned if target is None else target
                self.runs.append(_Run(part.path, part.identity, page, place, source, target))
            run = self.runs[-1]
            first = run.target + run.size_bytes if first is None else first
            target = run.take(part)
            self.size_bytes = round_up(max(self.size_bytes, run.source + run.size_bytes), PAGE)
        first = self.size_bytes if first is None else first
        self.size_bytes = round_up(max(self.size_bytes, first + padded_bytes), PAGE)
        return first
