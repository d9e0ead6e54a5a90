"""Extents that take turns: what the newest committed manifest refers to is never written over.

A slot reads one extent, its `current` one, and writes another: the first write after a commit takes a spare one, those
that follow before the next commit go to the same. When that commit lasts, what the one before it referred to is the
spare. So there are two extents for each slot, one more for each step that can be gone back to beside the one before the
newest, and one more while a snapshot refers to one of them. The spare that is taken is the one that waits longest.

::

    committed t   |   write, write   |   commit t + 1
    current: A    |   current: B     |   current: B
    spare:   B    |   spare:   -     |   spare:   A     manifest t is whole until A is written
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from nvme_offload.offload.durable.seal import ExtentLayout, SealedAs, Sums, open_sealed, seal
from nvme_offload.offload.errors import ResumeError, StateError
from nvme_offload.offload.storage.extent import Extent, Stripe
from nvme_offload.offload.storage.swap_space import SwapSpace
from nvme_offload.offload.storage.tier import Memory

TABLE = "slots"
"""Name of this table in a manifest."""

_SEQUENCE, _INCARNATION, _ROOT, _STRIPES = range(4)
_PER_STRIPE = 3  # path, offset, size
_PARTS = 2  # of a layout, see `ExtentLayout.parts`

Stripes = tuple[Stripe, ...]


@dataclass(eq=False)
class SlotExtents:
    """The extents of one slot."""

    layout: ExtentLayout
    current: Extent | None = None
    """What the newest write went to; None: it was never written."""
    committed: Extent | None = None
    """What the newest committed manifest refers to; None: it knows nothing of this slot."""
    spares: list[Extent] = field(default_factory=list)
    """What may be written over, in this order. The last one is what the manifest before refers to."""


class ShadowExtents:
    """The extents of all slots of a run, and the table of them that a manifest has.

    Used by one thread at a time: by the one that writes, and by the committer while nobody writes.

    Args:
        space: where they are.
        incarnation: of this life of the run.
        sequence: of the manifest that comes next.
        steps_back: how many manifests before the newest stay whole between two steps; at least 1.
    """

    def __init__(self, space: SwapSpace, incarnation: int, sequence: int, *, steps_back: int = 1) -> None:
        self._space = space
        self._num_further = steps_back - 1
        self.incarnation = incarnation
        self.sequence = sequence
        """Of the manifest that the next writes are for."""
        self.slots: list[SlotExtents] = []
        self.suspects: set[int] = set()
        """Slots whose bytes a failed sync may have lost, and that were not written again since."""
        self._table = np.zeros((0, self._num_columns), np.int64)
        self._claimed: dict[Stripes, tuple[int, Extent]] = {}
        """What found manifests refer to, with the slot, until one of them is adopted."""
        self._pins: dict[str, list[Extent]] = {}
        self._times_pinned: Counter[Stripes] = Counter()

    @property
    def table(self) -> np.ndarray:
        """Where the newest write of every slot is, for a manifest: 2D int64 [slots, columns], a copy."""
        return self._table.copy()

    def add(self, layouts: Sequence[ExtentLayout]) -> None:
        """Take slots on behind those there are, with the extents that each needs.

        Raises:
            OutOfSpaceError: there is no room for all of them; nothing is kept.
        """
        count = 2 + self._num_further
        extents = iter(self._space.allocate_all([layout.parts for layout in layouts for _ in range(count)]))
        slots = [SlotExtents(layout, spares=list(islice(extents, count))) for layout in layouts]
        table = np.concatenate([self._table, np.zeros((len(slots), self._num_columns), np.int64)])
        # No call in between: a signal handler sees both or neither.
        self._table = table
        self.slots = [*self.slots, *slots]

    def drop(self, first: int) -> None:
        """Forget the slots from `first` on, as far as `add` took them on; nothing may have been committed of them."""
        self.slots = self.slots[:first]
        self._table = self._table[:first]

    def to_read(self, slot: int) -> Extent | None:
        """Where the newest write of a slot went; None if there was none."""
        return self.slots[slot].current

    def to_write(self, slot: int) -> Extent:
        """Where the next write of a slot goes; from now on `to_read` gives that, and what was there counts no more.

        What could not be written is written there again: the answer is the same until the next commit.
        """
        record = self.slots[slot]
        if self._must_spare_current(record):
            first, *rest = record.spares
            # No call in between, as above.
            record.current = first
            record.spares = rest
        assert record.current is not None
        return record.current

    def seal(self, slot: int, memory: Memory, sums: Sums) -> None:
        """Write the trailer of a slot into a buffer that holds its state and tail, and note it in the table.

        Args:
            slot: which one; `to_write` was called for this write.
            memory: the buffer that is about to be written.
            sums: of state and tail, as they are in the buffer.
        """
        record = self.slots[slot]
        if record.current is None or self._must_spare_current(record):
            raise StateError(f"slot {slot}", "an extent from to_write", "one that a manifest refers to")
        root = seal(memory, record.layout, SealedAs(slot, self.sequence, self.incarnation), sums)
        self._table[slot] = self._row(self.sequence, root, record.current)
        self.suspects.discard(slot)

    def open_sealed(self, slot: int, memory: Memory) -> Sums:
        """Check that a buffer holds what the table says of a slot; returns the sums that state and tail must have.

        Raises:
            CorruptionError: it does not.
        """
        row, record = self._table[slot], self.slots[slot]
        assert record.current is not None
        sealed_as = SealedAs(slot, int(row[_SEQUENCE]), int(row[_INCARNATION]))
        path = str(self._space.path_of(record.current.stripes[-1].fd))
        return open_sealed(memory, record.layout, sealed_as, int(row[_ROOT]), path=path, what=f"slot {slot}")

    @property
    def uncommitted(self) -> list[int]:
        """Slots whose newest write no committed manifest refers to."""
        return [index for index, record in enumerate(self.slots) if record.current is not record.committed]

    def written_over(self, table: np.ndarray) -> list[int]:
        """Slots for which this life of the run has not kept what an older table refers to."""
        known, uncommitted = self._known(), set(self.uncommitted)
        found = []
        for slot, row in enumerate(table):
            stripes = self._stripes(row)
            kept = not stripes or stripes in known
            if slot in uncommitted and (current := self.slots[slot].current) is not None:
                kept = kept and (current.stripes != stripes or np.array_equal(row, self._table[slot]))
            found += [] if kept else [slot]
        return found

    def note_commit(self) -> None:
        """The table of this moment is committed: what it refers to stays, and what the one before did is spare."""
        for record in self.slots:
            if record.current is record.committed:
                continue
            before, record.committed = record.committed, record.current
            if before is not None and not self._times_pinned[before.stripes]:
                record.spares = [*record.spares, before]
            self._trim(record)
        self.sequence += 1

    def take_back_commit(self, table: np.ndarray) -> None:
        """Go back to the manifest before: what it refers to is spared, and writes go where those of the newest went.

        Args:
            table: of the manifest before. Nothing was written since the newest.
        """
        known = self._known()
        for record, row in zip(self.slots, table, strict=False):
            stripes = self._stripes(row)
            if record.committed is None or record.committed.stripes == stripes:
                continue
            record.committed = known[stripes][1] if stripes else None
            record.spares = [spare for spare in record.spares if spare is not record.committed]
        for record in self.slots[len(table) :]:
            record.committed = None

    def forget_commits(self) -> None:
        """No manifest but those of snapshots refers to anything any more: writes go where they are."""
        self._claimed = {}
        for record in self.slots:
            before, now = record.committed, record.current
            if before is not None and before is not now and not self._times_pinned[before.stripes]:
                record.spares = [*record.spares, before]
            record.committed = now if now is not None and self._times_pinned[now.stripes] else None

    def claim(self, table: np.ndarray) -> None:
        """Keep what a found manifest refers to, until `adopt` or `forget_commits`."""
        for slot, row in enumerate(table):
            stripes = self._stripes(row)
            if stripes and stripes not in self._claimed:
                self._claimed[stripes] = slot, self._space.claim(stripes)

    def adopt(
        self, table: np.ndarray, layouts: Sequence[ExtentLayout], *, where: str, older: Sequence[np.ndarray] = ()
    ) -> None:
        """Have the slots that a manifest refers to, in place of those there are.

        Args:
            table: of the manifest, which was claimed, or refers to extents that these slots have.
            layouts: of the slots.
            where: the manifest's place, for messages.
            older: tables of manifests that stay, the newest first: what they refer to is written over last.

        Raises:
            ResumeError: the table is not of such slots, or they were written since in the place of what it refers to.
            OutOfSpaceError: there is no room for an extent that is missing. Either way nothing has changed.
        """
        if table.shape != (len(layouts), self._num_columns):
            raise ResumeError(where, f"has a table of shape {list(table.shape)} and not of {len(layouts)} slots")
        if over := self.written_over(table):
            raise ResumeError(
                where, f"has a step of which {len(over)} slots were written over since, slot {over[0]} first"
            )
        known = self._known()
        kept = {stripes: age for age, other in reversed([*enumerate(older)]) for stripes in map(self._stripes, other)}
        slots = [self._slot_of(index, row, layouts[index], known, where) for index, row in enumerate(table)]
        for record in slots:
            record.spares.sort(key=lambda extent: kept.get(extent.stripes, len(older)), reverse=True)
            self._trim(record)
        missing = [record for record in slots for _ in range(self._num_missing(record))]
        for record, extent in zip(missing, self._space.allocate_all([r.layout.parts for r in missing]), strict=True):
            record.spares.insert(0, extent)
        table = table.copy()
        # No call in between, as above.
        self.slots = slots
        self._table = table
        self._claimed = {}

    def pin(self, name: str, table: np.ndarray) -> None:
        """Keep what a committed table refers to, also when later manifests do not, until `unpin`.

        What later writes need in its place is reserved here.

        Raises:
            OutOfSpaceError: there is no room for that; nothing is kept.
        """
        known = {stripes: extent for stripes, (_, extent) in self._known().items()}
        wanted = [stripes for row in table if (stripes := self._stripes(row))]
        pinned = [known[stripes] if stripes in known else self._space.claim(stripes) for stripes in wanted]
        new = {extent.stripes for extent in pinned if not self._times_pinned[extent.stripes]}
        short = [record for record in self.slots if record.committed is not None and record.committed.stripes in new]
        reserved = self._space.allocate_all([record.layout.parts for record in short])
        for record, extent in zip(short, reserved, strict=True):
            record.spares = [extent, *record.spares]
        self._pins[name] = pinned
        self._times_pinned.update(extent.stripes for extent in pinned)

    def unpin(self, name: str) -> None:
        """Give up what `pin` kept, as far as nothing else refers to it, and what it reserved."""
        for extent in self._pins.pop(name):
            self._times_pinned[extent.stripes] -= 1
        self._times_pinned = +self._times_pinned
        for record in self.slots:
            self._trim(record)

    # Rows of the table.

    def written(self, table: np.ndarray, slot: int) -> tuple[Extent, SealedAs, int] | None:
        """Where a table says that a slot is, as what it is sealed, and the root of its trailer; None: nowhere.

        For reading alone: whose extent it is does not change.
        """
        row = table[slot]
        stripes = self._stripes(row)
        extent = Extent(sum(stripe.size_bytes for stripe in stripes), stripes)
        sealed_as = SealedAs(slot, int(row[_SEQUENCE]), int(row[_INCARNATION]))
        return (extent, sealed_as, int(row[_ROOT])) if stripes else None

    @property
    def _num_columns(self) -> int:
        return _STRIPES + _PER_STRIPE * _PARTS * len(self._space.fds)

    def _row(self, sequence: int, root: int, extent: Extent) -> np.ndarray:
        row = np.zeros(self._num_columns, np.int64)
        row[:_STRIPES] = sequence, self.incarnation, root
        fds = self._space.fds
        places = [(fds.index(stripe.fd), stripe.offset, stripe.size_bytes) for stripe in extent.stripes]
        row[_STRIPES : _STRIPES + _PER_STRIPE * len(places)] = np.ravel(places)
        return row

    def _stripes(self, row: np.ndarray) -> Stripes:
        """Empty for a slot that was never written."""
        fds, places = self._space.fds, row[_STRIPES:].reshape(-1, _PER_STRIPE).tolist()
        return tuple(Stripe(fds[path], offset, size) for path, offset, size in places if size)

    # Who has which extent.

    def _known(self) -> dict[Stripes, tuple[int, Extent]]:
        """Every extent that a slot has or had, with the slot; what manifests refer to comes last."""
        known: dict[Stripes, tuple[int, Extent]] = {}
        for index, record in enumerate(self.slots):
            for extent in (record.current, record.committed, *record.spares):
                if extent is not None:
                    known[extent.stripes] = index, extent
        known |= self._claimed
        for extents in self._pins.values():
            known |= {extent.stripes: (-1, extent) for extent in extents if extent.stripes not in known}
        return known

    def _slot_of(
        self, index: int, row: np.ndarray, layout: ExtentLayout, known: Mapping[Stripes, tuple[int, Extent]], where: str
    ) -> SlotExtents:
        stripes = self._stripes(row)
        spares = [extent for slot, extent in known.values() if slot == index and extent.stripes != stripes]
        spares = [e for e in spares if e.size_bytes == layout.size_bytes and not self._times_pinned[e.stripes]]
        if not stripes:
            return SlotExtents(layout, spares=spares)
        current = known[stripes][1]
        if current.size_bytes != layout.size_bytes:
            raise ResumeError(
                where, f"has {current.size_bytes} bytes for slot {index}, and it needs {layout.size_bytes}"
            )
        return SlotExtents(layout, current, current, spares)

    def _num_missing(self, record: SlotExtents) -> int:
        return max(0, self._num_spares(record) - len(record.spares))

    def _num_spares(self, record: SlotExtents) -> int:
        """How many a slot needs, and may keep: to write in, and in place of what the next commit does not set free."""
        is_kept = record.committed is None or bool(self._times_pinned[record.committed.stripes])
        return int(self._must_spare_current(record)) + int(is_kept) + self._num_further

    def _must_spare_current(self, record: SlotExtents) -> bool:
        """Whether the next write needs another extent than the newest one went to."""
        if record.current is None or record.current is record.committed:
            return True
        return bool(self._times_pinned[record.current.stripes])

    def _trim(self, record: SlotExtents) -> None:
        """Let go of spares that are not needed, those first that wait longest: what nobody has is free."""
        surplus = len(record.spares) - self._num_spares(record)
        if surplus > 0:
            record.spares = record.spares[surplus:]
