"""What a slot can be made of again, a base and a log, and how manifests write that down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nvme_offload.offload.durable.seal import ExtentLayout, SealedAs
from nvme_offload.offload.errors import ResumeError
from nvme_offload.offload.storage.extent import Extent, Stripe
from nvme_offload.offload.storage.swap_space import Size

Stripes = tuple[Stripe, ...]
WriteId = tuple[int, int, int]
"""Sequence, incarnation and root: no two writes have the same."""

BASES, ENTRIES = "slots", "log"
"""Names of the two tables of a manifest."""

_SEQUENCE, _INCARNATION, _ROOT, _STRIPES = range(4)  # of a row of bases
_PER_STRIPE = 3  # path, offset, size
_PARTS = 2  # of a base, see `ExtentLayout.parts`
_SLOT, _CONTENT_BYTES, _ROW = range(3)  # of a row of entries


@dataclass(frozen=True)
class SlotLayout:
    """What a slot takes on the drive."""

    base: ExtentLayout
    """Of the base: all of the slot."""
    entry_bytes: int = 0
    """The most that an entry takes, its trailer included: a multiple of the alignment. 0 with a period of 1."""
    period: int = 1
    """Every how many steps it is rewritten at the latest: its log has room for as many less one; at least 1."""


@dataclass(frozen=True, eq=False)
class Written:
    """One write: of a base, or of an entry."""

    extent: Extent
    content: ExtentLayout
    """What is in it. An entry takes what it needs of its extent."""
    sealed_as: SealedAs
    root: int
    """Of its trailer, see `seal`."""

    @property
    def id(self) -> WriteId:
        """Which write it is, of all."""
        return self.sealed_as.sequence, self.sealed_as.incarnation, self.root


@dataclass(frozen=True, eq=False)
class Chain:
    """What a slot can be made of again: a base, and what steps did to it since, the oldest first."""

    base: Written | None = None
    """None: it was never written."""
    log: tuple[Written, ...] = ()

    def __iter__(self) -> Iterator[Written]:
        if self.base is not None:
            yield self.base
        yield from self.log

    def where_equal(self, other: Chain) -> Chain:
        """Another chain, with the writes of this one where they are the same; this one, where all are."""
        own = {(written.extent.stripes, written.id): written for written in self}
        parts = [own.get((written.extent.stripes, written.id), written) for written in other]
        return self if parts == list(self) else Chain(parts[0], tuple(parts[1:])) if parts else Chain()

    def reading(self, *, base_bytes: int) -> Extent:
        """All of it as one extent, to be read with one transfer: the beginning of the base, then each entry.

        Args:
            base_bytes: how much of the base; a multiple of the alignment.
        """
        assert self.base is not None
        sizes = [base_bytes, *(entry.content.size_bytes for entry in self.log)]
        stripes = [stripe for part, size in zip(self, sizes, strict=True) for stripe in _beginning(part.extent, size)]
        return Extent(sum(sizes), tuple(stripes))


@dataclass(eq=False)
class RingSlot:
    """One slot of the ring."""

    layout: SlotLayout
    phase: int
    """It is rewritten in every turn that leaves nothing when this is added and it is divided by the ring's period."""
    current: Chain = field(default_factory=Chain)
    """As of the newest write."""
    committed: Chain = field(default_factory=Chain)
    """What the newest committed manifest refers to; an empty one where it knows nothing of this slot."""
    target: tuple[Size, Extent] | None = None
    """Where its next write goes, with the size, until that is noted."""

    def extents(self, chain: Chain) -> Iterator[tuple[Size, Extent]]:
        """What a chain of this slot lies in, with the sizes."""
        for written in chain:
            yield (self.layout.base.parts if written is chain.base else self.layout.entry_bytes), written.extent


class ChainRows:
    """The tables of a manifest: one row for each base, one for each entry. They are kept as slots are written.

    Args:
        fds: descriptors of the swap files, in the order of the paths.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = list(fds)
        self._bases = np.zeros((0, self._num_columns), np.int64)
        self._entries = np.zeros((0, 0, _ROW + self._num_columns), np.int64)
        """By slot and place in its log; what is not there has no content."""

    @property
    def _num_columns(self) -> int:
        return _STRIPES + _PER_STRIPE * _PARTS * len(self._fds)

    def tables(self) -> dict[str, np.ndarray]:
        """Both, as copies: ``slots``, 2D int64 [slots, columns], and ``log``, 2D int64 [entries, columns]."""
        return {BASES: self._bases.copy(), ENTRIES: self._entries[self._entries[:, :, _CONTENT_BYTES] > 0]}

    def grow(self, num_slots: int, longest_log: int) -> None:
        """Have so many rows."""
        bases = np.zeros((num_slots, self._num_columns), np.int64)
        entries = np.zeros((num_slots, longest_log, _ROW + self._num_columns), np.int64)
        slots, logs = self._entries.shape[:2]
        bases[:slots], entries[:slots, :logs] = self._bases, self._entries
        self._bases, self._entries = bases, entries

    def shrink(self, num_slots: int) -> None:
        """Have no rows but those of the first slots."""
        self._bases, self._entries = self._bases[:num_slots], self._entries[:num_slots]

    def set_base(self, slot: int, base: Written) -> None:
        """The chain of a slot is this base alone."""
        self._entries[slot] = 0
        self._bases[slot] = self._row(base)

    def set_entry(self, slot: int, place: int, entry: Written) -> None:
        """The chain of a slot ends with this entry, at this place in its log."""
        self._entries[slot, place] = [slot, entry.content.state_bytes, *self._row(entry)]

    def set_chain(self, slot: int, chain: Chain) -> None:
        """The chain of a slot is this one, which has a base."""
        assert chain.base is not None
        self.set_base(slot, chain.base)
        for place, entry in enumerate(chain.log):
            self.set_entry(slot, place, entry)

    def take(self, tables: Mapping[str, np.ndarray], num_slots: int, longest_log: int) -> None:
        """Have the rows of a manifest that `read` understands."""
        self._bases, self._entries = self._bases[:0], self._entries[:0]
        self.grow(num_slots, longest_log)
        self._bases[:] = tables[BASES]
        entries = self._entries_of(tables)
        for slot, of_slot in _by_slot(entries).items():
            self._entries[slot, : len(of_slot)] = of_slot

    def writes_of(self, tables: Mapping[str, np.ndarray]) -> list[tuple[int, Stripes, WriteId]]:
        """Everything that a manifest refers to: whose it is, where, and which write."""
        rows = [*enumerate(tables[BASES]), *((int(row[_SLOT]), row[_ROW:]) for row in self._entries_of(tables))]
        return [
            (slot, stripes, (int(row[_SEQUENCE]), int(row[_INCARNATION]), int(row[_ROOT])))
            for slot, row in rows
            if (stripes := self._stripes(row))
        ]

    def read(
        self,
        tables: Mapping[str, np.ndarray],
        layouts: Sequence[SlotLayout],
        extents: Mapping[Stripes, Extent],
        *,
        where: str,
    ) -> list[Chain]:
        """The chains of a manifest.

        Args:
            tables: of the manifest.
            layouts: of the slots.
            extents: what its stripes are.
            where: the manifest's place, for messages.

        Raises:
            ResumeError: it is not of such slots.
        """
        bases, entries = tables[BASES], self._entries_of(tables)
        if bases.shape != (len(layouts), self._num_columns):
            raise ResumeError(where, f"has a table of shape {list(bases.shape)} and not of {len(layouts)} slots")
        logs = _by_slot(entries)
        chains = []
        for slot, (layout, row) in enumerate(zip(layouts, bases, strict=True)):
            log = tuple(self._entry(entry, layout, extents) for entry in logs.get(slot, ()))
            base = self._written(slot, row, layout.base, extents)
            if base is not None and base.extent.size_bytes != layout.base.size_bytes:
                have, need = base.extent.size_bytes, layout.base.size_bytes
                raise ResumeError(where, f"has {have} bytes for slot {slot}, and it needs {need}")
            if len(log) >= layout.period or any(entry.extent.size_bytes != layout.entry_bytes for entry in log):
                raise ResumeError(where, f"has a log of {len(log)} entries for slot {slot} that it cannot go on with")
            chains.append(Chain(base, log))
        return chains

    def _entries_of(self, tables: Mapping[str, np.ndarray]) -> np.ndarray:
        """A manifest of slots without logs may have no such table."""
        return tables.get(ENTRIES, np.zeros((0, _ROW + self._num_columns), np.int64))

    def _row(self, written: Written) -> list[int]:
        places = [
            number
            for stripe in written.extent.stripes
            for number in (self._fds.index(stripe.fd), stripe.offset, stripe.size_bytes)
        ]
        sealed_as = written.sealed_as
        row = [sealed_as.sequence, sealed_as.incarnation, written.root, *places]
        return row + [0] * (self._num_columns - len(row))

    def _stripes(self, row: np.ndarray) -> Stripes:
        """Empty for a slot that was never written."""
        places = row[_STRIPES:].reshape(-1, _PER_STRIPE).tolist()
        return tuple(Stripe(self._fds[path], offset, size) for path, offset, size in places if size)

    def _written(
        self, slot: int, row: np.ndarray, content: ExtentLayout, extents: Mapping[Stripes, Extent]
    ) -> Written | None:
        stripes = self._stripes(row)
        sealed_as = SealedAs(slot, int(row[_SEQUENCE]), int(row[_INCARNATION]))
        return Written(extents[stripes], content, sealed_as, int(row[_ROOT])) if stripes else None

    def _entry(self, row: np.ndarray, layout: SlotLayout, extents: Mapping[Stripes, Extent]) -> Written:
        content = ExtentLayout(int(row[_CONTENT_BYTES]), 0, layout.base.alignment)
        written = self._written(int(row[_SLOT]), row[_ROW:], content, extents)
        assert written is not None
        return written


def _by_slot(entries: np.ndarray) -> dict[int, list[np.ndarray]]:
    """Rows of entries by slot, in the order of its log."""
    found: dict[int, list[np.ndarray]] = {}
    for row in entries:
        found.setdefault(int(row[_SLOT]), []).append(row)
    return found


def _beginning(extent: Extent, size_bytes: int) -> Iterator[Stripe]:
    """Where the first bytes of an extent are."""
    for stripe in extent.stripes:
        if size_bytes > 0:
            yield Stripe(stripe.fd, stripe.offset, min(size_bytes, stripe.size_bytes))
        size_bytes -= stripe.size_bytes
