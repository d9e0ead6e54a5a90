"""Extents that many slots share: bases that are rewritten now and then, and entries of a log in between.

A slot of a run with a log is a chain: its base, which holds all of it as of one step, and an entry for each step since.
Every `period` steps the slot is rewritten: it gets a new base, and its chain is that alone. Slots take turns at that,
so each step rewrites about one in `period` of them. No write goes where a committed manifest refers to::

    slot 0   base of 6   + 7 + 8            rewritten in step 9
    slot 1   base of 7   + 8                appended to
    slot 2   base of 8                      appended to

So what is needed is a base for each slot and one for each that a step rewrites, and as many entries as chains have
together at their longest, with those that a step adds: S (1 + 1/k) bases and S (k - 1) (1/2 + 1/k) entries for S equal
slots with a period of k. A slot that is rewritten out of turn takes what is there, and more is allocated where nothing
is; a later turn lets go of the surplus. With a period of 1 there are two bases for each slot, in turns. For each
further step that can be gone back to there is besides what one step sets free.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..errors import ResumeError, StateError
from ..storage.extent import Extent
from ..storage.swap_space import Size, SwapSpace
from ..storage.tier import Memory
from .chain import (
    BASES,
    Chain,
    ChainRows,
    RingSlot,
    SlotLayout,
    Stripes,
    WriteId,
    Written,
    num_bytes,
    phases,
    turns_behind,
    wanted,
)
from .extent_pool import ExtentPool
from .seal import ExtentLayout, SealedAs, Sums, open_sealed, seal


class ExtentRing:
    """Decides where each write of a slot goes, so that nothing is written over what committed manifests refer to.

    The order of things in a step::

        ring.begin_turn()
        if ring.is_due(slot):
            extent = ring.to_rewrite(slot)
            ring.seal_base(slot, memory, sums)             # then write the memory there
        else:
            extent = ring.to_append(slot)
            ring.seal_entry(slot, memory, size_bytes, sums)
        ...                                                # when all writes are done, and a manifest has `tables`
        ring.note_commit()

    Used by one thread at a time: by the one that writes, and by the committer while nobody writes.

    Args:
        space: where the extents are.
        incarnation: of this life of the run.
        sequence: of the manifest that comes next.
        steps_back: how many manifests before the newest stay whole between two steps; at least 1.
        alignment: of slots that were laid out elsewhere, and are read alone; None: that of the space.
    """

    def __init__(
        self, space: SwapSpace, incarnation: int, sequence: int, *, steps_back: int = 1, alignment: int | None = None
    ) -> None:
        self.steps_back = steps_back
        self.alignment = alignment or space.alignment
        self.incarnation = incarnation
        self.sequence = sequence
        self.turn = sequence
        """Counts the steps that write: it says which slots are rewritten."""
        self.slots: list[RingSlot] = []
        self.suspects: set[int] = set()
        """Slots whose bytes a failed sync may have lost: they are due until they have a new base."""
        self._space = space
        self._pool = ExtentPool(space)
        self._rows = ChainRows(space.fds)
        self._waiting: deque[list[tuple[Size, Extent]]] = deque()
        """Extents to which only older manifests refer that are to stay whole, by the commit that set them free."""
        self._given_up: list[list[tuple[Size, Extent]]] = []
        """Extents that do not wait any more since the newest commit, by the commit that set them free."""
        self._claimed: dict[Stripes, Extent] = {}
        """Extents to which found manifests refer, until one of them is adopted."""
        self._latest: dict[Stripes, WriteId] = {}
        """The write that is there, or about to be."""
        self._pins: dict[str, list[tuple[Size | None, Extent]]] = {}
        """By name, with the size of those that slots had when they were pinned."""
        self._times_pinned: Counter[Stripes] = Counter()

    @property
    def tables(self) -> dict[str, np.ndarray]:
        """Copy, for a manifest, where the newest writes of all slots are."""
        return self._rows.tables()

    # The writes of a step.

    def add(self, layouts: Sequence[SlotLayout]) -> None:
        """Take slots on behind those there are, with the space of their turns. OutOfSpaceError leaves all as it was."""
        slots = [*self.slots, *(RingSlot(layout, 0) for layout in layouts)]
        self._pool.want(_wanted_by(slots, self.steps_back))  # first: there may be no room, and nothing has changed yet
        self._rows.grow(len(slots), max(slot.layout.period for slot in slots) - 1)
        _take_turns(slots)
        self.slots = slots

    def lay_out(self, layouts: Iterable[SlotLayout]) -> None:
        """Know how slots are laid out, for reading alone: they have no space."""
        self.slots = [RingSlot(layout, 0) for layout in layouts]

    def drop(self, first: int) -> None:
        """Forget the slots from `first` on, as far as `add` took them on; nothing may have been committed of them."""
        for slot in range(first, len(self.slots)):
            self.drop_target(slot)
            self._pool.give_back(self.slots[slot].extents(self.slots[slot].current))
        self.slots = self.slots[:first]
        self._rows.shrink(first)
        self._pool.want(_wanted_by(self.slots, self.steps_back))
        self._pool.trim()

    def begin_turn(self) -> None:
        """Begin a step that will write: other slots are due."""
        self.turn += 1
        for slot in range(len(self.slots)):
            self.drop_target(slot)  # it may be of an entry, and a base is due now
        self._pool.trim()  # not earlier: until something is written, the manifest before can be gone back to

    def is_due(self, slot: int, *, turns_ahead: int = 0) -> bool:
        """Whether what this slot writes in this turn is a base: its turn has come, or there is nothing to add to."""
        record = self.slots[slot]
        # Behind bytes that may be lost an entry is of no use.
        if record.current.base is None or len(record.current.log) >= record.layout.period - 1 or slot in self.suspects:
            return True
        return (self.turn + turns_ahead + record.phase) % record.layout.period == 0

    def num_logged_next(self, slot: int) -> int:
        """Return how many entries the log of this slot will have when the next turn has written it."""
        return 0 if self.is_due(slot, turns_ahead=1) else len(self.slots[slot].current.log) + 1

    def to_rewrite(self, slot: int) -> Extent:
        """Return where a new base of this slot goes, the same until it is committed; out of turn there may be none."""
        record = self.slots[slot]
        base = record.current.base
        if base is not None and not self._is_kept(record, base.extent):
            self.drop_target(slot)
            return base.extent  # nobody refers to it yet
        return self._target(slot, record.layout.base.parts)

    def to_append(self, slot: int, place: int | None = None) -> Extent:
        """Return where the next entry goes: the same until it is sealed, or the next turn begins.

        `place` is its place in the log, None the end.

        Raises:
            StateError: there is nothing to add to.
            OutOfSpaceError: chains are longer than turns make them, and there is no room for more.
        """
        record = self.slots[slot]
        if place is not None and place < len(record.current.log):  # sealed, not written: its step would be done twice
            return record.current.log[place].extent
        if record.current.base is None or len(record.current.log) >= record.layout.period - 1:
            raise StateError(f"slot {slot}", "a base, and room in its log", f"{len(record.current.log)} entries")
        return self._target(slot, record.layout.entry_bytes)

    def drop_target(self, slot: int) -> None:
        """Write nothing where `to_rewrite` or `to_append` said, unless it was sealed."""
        if (target := self.slots[slot].drop_target()) is not None:
            self._pool.give_back([target])

    def seal_base(self, slot: int, memory: Memory, sums: Sums) -> None:
        """Write the trailer of a base; the chain of the slot is from now on what is about to go to `to_rewrite`."""
        base = self._sealed(slot, self.to_rewrite(slot), memory, self.slots[slot].layout.base, sums)
        self._become(slot, Chain(base))
        self._rows.set_base(slot, base)
        self.suspects.discard(slot)  # last: what is cut short before leaves the slot due

    def seal_entry(self, slot: int, memory: Memory, size_bytes: int, sums: Sums, *, place: int | None = None) -> int:
        """Write the trailer of an entry, with which the chain goes on; returns the bytes to write, trailer included.

        `size_bytes` is the entry without its trailer, and `sums` has no tail. `place` is as in `to_append`.
        """
        record = self.slots[slot]
        content = ExtentLayout(size_bytes, 0, record.layout.base.alignment)
        log = record.current.log[:place]  # an exception may have kept from the caller that it is sealed already
        entry = self._sealed(slot, self.to_append(slot, place), memory, content, sums)
        self._become(slot, Chain(record.current.base, (*log, entry)))
        self._rows.set_entry(slot, len(log), entry)
        return content.size_bytes

    def open_sealed(self, slot: int, written: Written, memory: Memory) -> Sums:
        """Check the trailer of a part of a chain that was read, or raise CorruptionError; returns its bytes' sums."""
        what = f"the {'base' if written.content == self.slots[slot].layout.base else 'log'} of slot {slot}"
        path = self.path_of(written)
        return open_sealed(memory, written.content, written.sealed_as, written.root, path=path, what=what)

    def path_of(self, written: Written) -> str:
        """Return the file in which a write begins."""
        return str(self._space.path_of(self._space.copies.read_at(written.extent.stripes[0].fd)))

    def _sealed(self, slot: int, extent: Extent, memory: Memory, content: ExtentLayout, sums: Sums) -> Written:
        sealed_as = SealedAs(slot, self.sequence, self.incarnation)
        written = Written(extent, content, sealed_as, seal(memory, content, sealed_as, sums))
        self._latest[extent.stripes] = written.id  # before it is written: from then on an older manifest is not whole
        return written

    # Commits.

    @property
    def uncommitted(self) -> list[int]:
        """Slots whose newest write no committed manifest refers to."""
        return [index for index, record in enumerate(self.slots) if record.current is not record.committed]

    def chains_of(self, tables: Mapping[str, np.ndarray], layouts: Sequence[SlotLayout]) -> list[Chain]:
        """Read what a manifest refers to, and own nothing of it. Raises ResumeError if it is not of such slots."""
        stripes_of = [stripes for _, stripes, _ in self._rows.writes_of(tables)]
        sizes = {stripes: sum(stripe.size_bytes for stripe in stripes) for stripes in stripes_of}
        extents = {stripes: Extent(size_bytes, stripes) for stripes, size_bytes in sizes.items()}
        return self._rows.read(tables, layouts, extents, where="a manifest")

    def written_over(self, tables: Mapping[str, np.ndarray]) -> list[int]:
        """Return the slots for which this life of the run has not kept what an older manifest refers to."""
        known, over = self._known(), set()
        for slot, stripes, identity in self._rows.writes_of(tables):
            if stripes not in known or self._latest.get(stripes) != identity:
                over.add(slot)
        return sorted(over)

    def is_committed(self, slot: int) -> bool:
        """Whether the newest committed manifest refers to the newest write of a slot."""
        record = self.slots[slot]
        return record.current.base is not None and record.current is record.committed

    def take_back_write(self, slot: int) -> None:
        """Go back to what the newest committed manifest refers to, which has this slot. Idempotent.

        A write of it that counts no more may still be under way: wait for that before others write.
        """
        record = self.slots[slot]
        self.drop_target(slot)
        if record.current is not record.committed:
            self._become(slot, record.committed)
        self._rows.set_chain(slot, record.committed)  # always: an exception may have come between chain and rows
        self.suspects.discard(slot)  # what a manifest refers to was synced before it

    def note_commit(self) -> None:
        """Note that the chains of this moment are committed: what only those before had is for other slots now."""
        free: list[tuple[Size, Extent]] = []
        for record in self.slots:
            if record.current is not record.committed:
                free += self._set_free(record, record.commit(record.current))
        self._waiting.append(free)  # only manifests before this one refer to it
        num_older = max(0, len(self._waiting) + 1 - self.steps_back)
        self._given_up = [self._waiting.popleft() for _ in range(num_older)]  # `take_back_commit` may need it
        self._pool.give_back(pair for pairs in self._given_up for pair in pairs)
        self.count_manifest()

    def count_manifest(self) -> None:
        """Note that a manifest was written: what is written from here on is for the next one."""
        self.sequence += 1

    def suspect_uncommitted(self) -> None:
        """Note that a sync has failed: what no committed manifest refers to may be lost."""
        self.suspects = set(self.uncommitted)

    def take_back_commit(self, tables: Mapping[str, np.ndarray]) -> None:
        """Go back to the manifest before, which has `tables`; nothing may have been written since the newest."""
        # Before chains change: what the newest set free is found there, idle or waiting.
        known = {stripes: extent for stripes, (_, extent) in self._known().items()}
        layouts = [record.layout for record in self.slots[: len(tables[BASES])]]
        chains = self._rows.read(tables, layouts, known, where="the manifest before")
        chains += [Chain()] * (len(self.slots) - len(chains))  # slots that came since
        for record, chain in zip(self.slots, chains, strict=True):
            # The same objects: whether a slot is committed is asked with `is`.
            self._release(record, record.commit(record.current.where_equal(chain)))
        again = {extent.stripes for record in self.slots for _, extent in record.extents(record.committed)}
        if self._waiting:
            self._pool.give_back(pair for pair in self._waiting.pop() if pair[1].stripes not in again)
            self._waiting.extendleft(reversed(self._given_up))  # nothing was written there since
            again |= {extent.stripes for pairs in self._given_up for _, extent in pairs}
        self._pool.take_out(again)  # or the next write goes over what is the newest commit again
        self._given_up = []  # one commit can be taken back

    def forget_commits(self) -> None:
        """Forget all manifests but those of snapshots: no other one refers to anything any more."""
        self._claimed, self._given_up = {}, []
        while self._waiting:
            self._pool.give_back(self._waiting.popleft())
        for record in self.slots:
            self._release(record, record.commit(Chain()))

    def claim(self, tables: Mapping[str, np.ndarray]) -> None:
        """Keep what a found manifest refers to, until `adopt` or `forget_commits`."""
        for _, stripes, identity in self._rows.writes_of(tables):
            if stripes not in self._claimed:  # else a newer manifest, which comes first, says what is there
                self._claimed[stripes] = self._space.claim(stripes)
                self._latest[stripes] = identity

    def adopt(
        self,
        tables: Mapping[str, np.ndarray],
        layouts: Sequence[SlotLayout],
        *,
        where: str,
        older: Sequence[Mapping[str, np.ndarray]] = (),
    ) -> None:
        """Have the chains that a manifest refers to, in place of the slots there are.

        The manifest was claimed, or is that of a commit that was kept. `older` has the tables of manifests that stay,
        the newest first.

        Raises:
            ResumeError: the tables are not of such slots, or what they refer to was written over; nothing has changed.
            OutOfSpaceError: there is no room for what turns need besides. The ring cannot be used then.
        """
        known = {stripes: extent for stripes, (_, extent) in self._known().items()}  # before slots go: theirs, too
        if over := self.written_over(tables):
            what = f"has a step of which {len(over)} slots were written over since, slot {over[0]} first"
            raise ResumeError(where, what)
        chains = self._rows.read(tables, layouts, known, where=where)
        self.slots = [RingSlot(layout, 0, chain, chain) for layout, chain in zip(layouts, chains, strict=True)]
        _take_turns(self.slots)
        # Not at `sequence`, which failed commits put out of step: slots out of turn would need space of others.
        turns = [(slot.layout.period, slot.phase, len(slot.current.log)) for slot in self.slots]
        self.turn = self.sequence + turns_behind(self.sequence, turns)
        longest_log = max((layout.period for layout in layouts), default=1) - 1
        self._rows.take(tables, len(layouts), longest_log)
        stripes_of = [{stripes for _, stripes, _ in self._rows.writes_of(other)} for other in older]
        self._refill(known, stripes_of)

    def _refill(self, known: Mapping[Stripes, Extent], older: Sequence[set[Stripes]]) -> None:
        """Begin with another pool: what is there and no slot has waits there, as far as slots can use it."""
        self._claimed, self._pool = {}, ExtentPool(self._space)
        sizes = {extent.stripes: size for size, extent in self._in_chains()}
        self._pool.admit(size for stripes, size in sizes.items() if not self._times_pinned[stripes])
        for name, pins in self._pins.items():  # of a found snapshot nobody knew the sizes: `unpin` gives back by them
            self._pins[name] = [(sizes.get(extent.stripes, size), extent) for size, extent in pins]
        wanted = _wanted_by(self.slots, self.steps_back)
        lacking = wanted - Counter({size: self._pool.num_held(size) for size in wanted})
        ages: list[list[tuple[Size, Extent]]] = [[] for _ in range(len(older) + 1)]
        for stripes, extent in known.items():
            fitting = [size for size in wanted if num_bytes(size) == extent.size_bytes]
            if stripes not in sizes and not self._times_pinned[stripes] and fitting:  # else the space takes it back
                age = next((age for age, of_older in enumerate(older) if stripes in of_older), len(older))
                size = max(fitting, key=lacking.__getitem__)  # all for one size, others would be allocated anew
                lacking[size] -= 1
                ages[age].append((size, extent))
        num_waiting = min(self.steps_back - 1, len(older))
        self._waiting = deque(reversed(ages[:num_waiting]))
        self._given_up = ages[num_waiting : len(older)]
        self._pool.admit(size for waiting in self._waiting for size, _ in waiting)
        for pairs in reversed(ages[num_waiting:]):  # those of the oldest manifest are written over first
            self._pool.keep(pairs)
        self._pool.want(wanted)

    def pin(self, name: str, tables: Mapping[str, np.ndarray]) -> None:
        """Keep what a committed manifest refers to until `unpin`, and reserve what later writes need, or raise."""
        known, stripes_of = self._known(), []
        for _, stripes, identity in self._rows.writes_of(tables):
            stripes_of.append(stripes)
            self._latest.setdefault(stripes, identity)  # who wrote or claimed it knows better what is there
        self._pins[name] = [known[s] if s in known else (None, self._space.claim(s)) for s in stripes_of]
        new = {stripes for stripes in stripes_of if not self._times_pinned[stripes]}
        self._times_pinned.update(stripes_of)
        # Neither counts as the pool's, so that `want` reserves one more for each.
        self._pool.let_go(size for size, extent in self._in_chains() if extent.stripes in new)
        self._pool.drop(new)
        try:
            self._pool.want(_wanted_by(self.slots, self.steps_back))
        except BaseException:  # a Ctrl-C, too: nobody would unpin what `pin` did not return from
            self.unpin(name)
            raise

    def unpin(self, name: str) -> None:
        """Give up what `pin` kept, as far as nothing else refers to it, and what it reserved."""
        kept = {extent.stripes: (size, extent) for size, extent in self._pins.pop(name)}
        self._times_pinned.subtract(kept.keys())
        self._times_pinned = +self._times_pinned  # without those at 0, or each snapshot would leave some
        in_chains = {extent.stripes for _, extent in self._in_chains()}
        for stripes, (size, extent) in kept.items():
            if self._times_pinned[stripes] or size is None:  # None: no slot can use it, and the space takes it back
                continue
            self._pool.admit([size])
            if stripes in in_chains:
                continue
            if self._waiting:  # an older manifest may refer to it
                self._waiting[-1].append((size, extent))
            else:
                self._pool.give_back([(size, extent)])

    def hold_below(self, name: str, ends: Sequence[int]) -> None:
        """Pin everything before these positions, one for each path, until `unpin`; slots are not there yet."""
        end_of = dict(zip(self._space.fds, ends, strict=True))
        known = [pair for pair in self._known().values() if any(s.offset < end_of[s.fd] for s in pair[1].stripes)]
        self._pins[name] = [*known, *((None, extent) for extent in self._space.claim_free(ends))]
        self._times_pinned.update(extent.stripes for _, extent in self._pins[name])

    # Who has which extent.

    def _target(self, slot: int, size: Size) -> Extent:
        record = self.slots[slot]
        if record.target is not None and record.target[0] != size:  # it is rewritten after all, or appended to
            self.drop_target(slot)
        return record.target[1] if record.target is not None else record.aim(size, self._pool.take(size))

    def _is_kept(self, record: RingSlot, extent: Extent) -> bool:
        """Whether a manifest refers to an extent that a slot has."""
        stripes = extent.stripes
        return bool(self._times_pinned[stripes]) or any(w.extent.stripes == stripes for w in record.committed)

    def _become(self, slot: int, chain: Chain) -> None:
        record = self.slots[slot]
        self._release(record, record.become(chain))

    def _release(self, record: RingSlot, chain: Chain) -> None:
        self._pool.give_back(self._set_free(record, chain))

    def _set_free(self, record: RingSlot, chain: Chain) -> list[tuple[Size, Extent]]:
        """Return what a chain had, but for what the slot's other chains and snapshots have."""
        kept = {written.extent.stripes for other in (record.current, record.committed) for written in other}
        gone = [pair for pair in record.extents(chain) if pair[1].stripes not in kept]
        return [pair for pair in gone if not self._times_pinned[pair[1].stripes]]

    def _in_chains(self) -> list[tuple[Size, Extent]]:
        """Every extent that a slot has, once."""
        found: dict[Stripes, tuple[Size, Extent]] = {}
        for record in self.slots:
            for chain in (record.committed, record.current):
                found |= {extent.stripes: (size, extent) for size, extent in record.extents(chain)}
        return list(found.values())

    def _known(self) -> dict[Stripes, tuple[Size | None, Extent]]:
        """Every extent that is there, with its size where slots use extents of that size."""
        pinned = [pair for pairs in self._pins.values() for pair in pairs]
        targets = [record.target for record in self.slots if record.target is not None]
        claimed = [(None, extent) for extent in self._claimed.values()]
        waiting = [pair for pairs in self._waiting for pair in pairs]
        pairs: list[tuple[Size | None, Extent]] = [*targets, *self._in_chains(), *self._pool.idle]
        pairs += [*waiting, *pinned, *claimed]
        known: dict[Stripes, tuple[Size | None, Extent]] = {}
        for size, extent in pairs:  # those with a size first: a pin or a claim of the same may have none
            known.setdefault(extent.stripes, (size, extent))
        return known


def _take_turns(slots: Sequence[RingSlot]) -> None:
    for slot, phase in zip(slots, phases(slot.layout for slot in slots), strict=True):
        slot.phase = phase


def _wanted_by(slots: Sequence[RingSlot], steps_back: int) -> Counter[Size]:
    return wanted((slot.layout for slot in slots), steps_back)
