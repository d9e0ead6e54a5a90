"""A slot can be made again of a base and a log, and manifests write that down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

import numpy as np

from ..errors import ResumeError
from ..storage.extent import Extent, Stripe
from ..storage.swap_file import MIN_ALIGNMENT
from ..storage.swap_space import Size
from .manifest import Manifest
from .seal import ExtentLayout, SealedAs

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
    """The bytes that a slot takes on the drive."""

    base: ExtentLayout
    entry_bytes: int = 0
    """The most that an entry takes, its trailer included: a multiple of the alignment. 0 with a period of 1."""
    period: int = 1
    """It is rewritten every so many steps at the latest: its log has room for one entry less; at least 1."""


@dataclass(frozen=True, eq=False)
class Written:
    """One write: of a base, or of an entry."""

    extent: Extent
    content: ExtentLayout
    """The layout of what is in it. An entry takes what it needs of its extent."""
    sealed_as: SealedAs
    root: int

    @property
    def id(self) -> WriteId:
        """Tell this write from all others."""
        return self.sealed_as.sequence, self.sealed_as.incarnation, self.root


@dataclass(frozen=True, eq=False)
class Chain:
    """A slot can be made of this again: a base, and what steps did to it since, the oldest first."""

    base: Written | None = None
    """None: it was never written."""
    log: tuple[Written, ...] = ()

    def __iter__(self) -> Iterator[Written]:
        if self.base is not None:
            yield self.base
        yield from self.log

    def where_equal(self, other: Chain) -> Chain:
        """Return `other` with the writes of this chain where they are the same; this chain, where all are."""
        own = {(written.extent.stripes, written.id): written for written in self}
        parts = [own.get((written.extent.stripes, written.id), written) for written in other]
        return self if parts == list(self) else Chain(parts[0], tuple(parts[1:])) if parts else Chain()

    def reading(self, *, base_bytes: int) -> Extent:
        """Return one extent to read at once: the base's beginning, a multiple of the alignment, and the log."""
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
    committed: Chain = field(default_factory=Chain)
    """The newest committed manifest refers to this; an empty one where it knows nothing of this slot."""
    target: tuple[Size, Extent] | None = None
    """The place of its next write, with the size, until that is noted."""

    def aim(self, size: Size, extent: Extent) -> Extent:
        """Have the next write go to an extent of this size."""
        self.target = size, extent
        return extent

    def drop_target(self) -> tuple[Size, Extent] | None:
        """Have no place for the next write; returns the one there was."""
        target, self.target = self.target, None
        return target

    def become(self, chain: Chain) -> Chain:
        """Have another chain as of the newest write, which was made, or will count no more; returns the one before."""
        before = self.current
        # No call in between: a signal handler sees the extent with one owner.
        self.target = None
        self.current = chain
        return before

    def commit(self, chain: Chain) -> Chain:
        """Note that the newest committed manifest refers to this chain; returns what the one before referred to."""
        before, self.committed = self.committed, chain
        return before

    def extents(self, chain: Chain) -> Iterator[tuple[Size, Extent]]:
        """Return what a chain of this slot lies in, with the sizes."""
        for written in chain:
            yield (self.layout.base.parts if written is chain.base else self.layout.entry_bytes), written.extent


class ChainRows:
    """The tables of a manifest: one row for each base, one for each entry. They are kept as slots are written."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = list(fds)
        self._bases = np.zeros((0, self._num_columns), np.int64)
        self._entries = np.zeros((0, 0, _ROW + self._num_columns), np.int64)
        """By slot and place in its log; what is not there has no content."""

    @property
    def _num_columns(self) -> int:
        return _num_columns(len(self._fds))

    def tables(self) -> dict[str, np.ndarray]:
        """Copy both: ``slots``, 2D int64 [slots, columns], and ``log``, 2D int64 [entries, columns]."""
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
        for slot, of_slot in _by_slot(self._entries_of(tables)).items():
            self._entries[slot, : len(of_slot)] = of_slot

    def writes_of(self, tables: Mapping[str, np.ndarray]) -> list[tuple[int, Stripes, WriteId]]:
        """Return everything that a manifest refers to: whose it is, where, and which write."""
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
        """Read the chains of a manifest. Raises ResumeError, which names `where`, if it is not of such slots."""
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
        return tuple(Stripe(self._fds[path], offset, size) for path, offset, size in _places(row.tolist()))

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


def check_rows(manifest: Manifest, sizes: Sequence[int], *, where: str) -> None:
    """Check every row of a manifest, before anything is claimed or allocated; ResumeError names table and row."""
    taken: list[tuple[int, int, int, str]] = []
    bases = manifest.tables.get(BASES, np.zeros((0, 0), np.int64))
    for name, skipped in ((BASES, 0), (ENTRIES, _ROW)):
        rows, width = manifest.tables.get(name), skipped + _num_columns(len(sizes))
        if rows is None and name == ENTRIES:
            continue  # there may be no such table where slots have no logs
        if rows is None or rows.shape[1] != width:
            have = "no table" if rows is None else f"{rows.shape[1]} columns in its table"
            raise ResumeError(where, f"has {have} {name}, and one of {width} belongs to {len(sizes)} paths")
        for number, row in enumerate(rows.tolist()):
            places = _places(row[skipped:])
            wrong = _wrong_place(places, sizes) or _wrong_write(row, skipped, bases, manifest.sequence)
            if wrong:
                raise ResumeError(where, f"has in row {number} of its table {name} {wrong}")
            taken += [(*place, f"row {number} of {name}") for place in places]
    for (path, offset, size, first), (other, begin, _, second) in pairwise(sorted(taken)):
        if path == other and offset + size > begin:
            raise ResumeError(where, f"has {first} and {second} at the same bytes, from {begin} of path {path}")


def _wrong_place(places: Sequence[tuple[int, int, int]], sizes: Sequence[int]) -> str:
    for path, offset, size in places:
        if not 0 <= path < len(sizes):
            return f"path {path}, and there are {len(sizes)}"
        if offset < 0 or size < 0 or offset % MIN_ALIGNMENT or size % MIN_ALIGNMENT:
            return f"offset {offset} and size {size}, which are no multiples of {MIN_ALIGNMENT} from 0 on"
        if offset + size > sizes[path]:
            return f"offset {offset} and size {size}, beyond the {sizes[path]} bytes of the swap file on path {path}"
    return ""


def _wrong_write(row: Sequence[int], skipped: int, bases: np.ndarray, newest: int) -> str:
    """Say what is wrong with a row of which the places are right."""
    places, sequence = _places(row[skipped:]), row[skipped + _SEQUENCE]
    if places and not 1 <= sequence <= newest:
        return f"sequence {sequence}, and the manifest is number {newest}"
    if not skipped:
        return ""
    if not 0 <= row[_SLOT] < len(bases) or not _places(bases[row[_SLOT]].tolist()):
        return f"slot {row[_SLOT]}, which has no base"
    held = sum(size for _, _, size in places)
    return "" if 0 < row[_CONTENT_BYTES] <= held else f"{row[_CONTENT_BYTES]} bytes of content in {held} bytes"


def _num_columns(num_paths: int) -> int:
    return _STRIPES + _PER_STRIPE * _PARTS * num_paths


def _places(row: Sequence[int]) -> list[tuple[int, int, int]]:
    """Path, offset and size of each stripe of a row; none for a slot that was never written."""
    numbers = row[_STRIPES:]
    triples = zip(numbers[::_PER_STRIPE], numbers[1::_PER_STRIPE], numbers[2::_PER_STRIPE], strict=True)
    return [(path, offset, size) for path, offset, size in triples if size]


def _by_slot(entries: np.ndarray) -> dict[int, list[np.ndarray]]:
    found: dict[int, list[np.ndarray]] = {}
    for row in entries:
        found.setdefault(int(row[_SLOT]), []).append(row)
    return found


def _beginning(extent: Extent, size_bytes: int) -> Iterator[Stripe]:
    for stripe in extent.stripes:
        if size_bytes > 0:
            yield Stripe(stripe.fd, stripe.offset, min(size_bytes, stripe.size_bytes))
        size_bytes -= stripe.size_bytes


def phases(layouts: Iterable[SlotLayout]) -> Iterator[int]:
    """When each slot has its turn: slots of one layout spread evenly, beginning elsewhere for each layout."""
    turns: dict[SlotLayout, Iterator[int]] = {}
    for layout in layouts:
        yield next(turns.setdefault(layout, count(len(turns))))


def turns_behind(turn: int, slots: Iterable[tuple[int, int, int]]) -> int:
    """Return how many turns after this one it was when slots were written: what most of them say.

    Slots that would be rewritten earlier or later than they were about to be need space of others. `slots` has the
    period, the phase and the number of entries of each.
    """
    said = Counter((logged - phase - turn) % period for period, phase, logged in slots if period > 1)
    return said.most_common(1)[0][0] if said else 0


def wanted(layouts: Iterable[SlotLayout], steps_back: int) -> Counter[Size]:
    """Return how many extents of each size the turns of these slots need, with `steps_back` steps to go back to."""
    counts: Counter[Size] = Counter()
    for layout, number in Counter(layouts).items():
        period = layout.period
        bases, entries = num_needed(number, period)
        of_turn = -(-number // period) * (steps_back - 1)  # chains that a step sets free, for each further step
        counts[layout.base.parts] += bases + of_turn
        if entries:
            counts[layout.entry_bytes] += entries + of_turn * (period - 1)
    return counts


def bytes_needed(layouts: Iterable[SlotLayout], steps_back: int) -> list[int]:
    """Return the bytes of every extent that the turns of these slots need."""
    return [num_bytes(size) for size, count in wanted(layouts, steps_back).items() for _ in range(count)]


def num_bytes(size: Size) -> int:
    """Bytes of an extent of this size."""
    return sum(size) if isinstance(size, tuple) else size


def num_needed(num_slots: int, period: int) -> tuple[int, int]:
    """Return how many bases and entries equal slots need that take turns.

    There is a base for each slot, and one for each that a step rewrites; and there are the entries after a step, with
    those that the next one adds, where they are most.
    """
    in_phase = Counter(slot % period for slot in range(num_slots))

    def entries_in(turn: int) -> int:
        ages = [((phase + turn) % period, number) for phase, number in in_phase.items()]
        return sum(number * (age + (age < period - 1)) for age, number in ages)

    return num_slots + -(-num_slots // period), max(map(entries_in, range(period)))
