"""The ring of bases and entries: what a committed manifest refers to stays; and the space that takes."""

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvme_offload import CorruptionError, ResumeError, StateError, SwapIOError
from nvme_offload.offload.durable.chain import Chain, SlotLayout, Written, num_needed
from nvme_offload.offload.durable.committed import PinnedReader
from nvme_offload.offload.durable.ring import ExtentRing
from nvme_offload.offload.durable.seal import ExtentLayout, SealedAs, Sums
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.storage.extent import Stripe
from nvme_offload.offload.storage.swap_space import SwapSpace

NUMBERS = itertools.count()
PAGE = 4096
BASE = ExtentLayout(10 * PAGE, 2 * PAGE, PAGE)
ENTRY_BYTES = 3 * PAGE
CONTENT = ExtentLayout(2 * PAGE, 0, PAGE)


def layouts(count: int, period: int) -> list[SlotLayout]:
    return [SlotLayout(BASE, ENTRY_BYTES if period > 1 else 0, period)] * count


@pytest.fixture
def space(tmp_path: Path) -> Iterator[SwapSpace]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    space = SwapSpace([tmp_path / "a", tmp_path / "b"], direct="optional")
    yield space
    space.close()


MEMORY, NO_SUMS = HostRegion(32 * PAGE), torch.zeros(0, dtype=torch.int64)


def rewrite(ring: ExtentRing, slot: int) -> None:
    ring.seal_base(slot, MEMORY, Sums(torch.full((1,), next(NUMBERS)), torch.zeros(1, dtype=torch.int64)))


def append(ring: ExtentRing, slot: int) -> None:
    sums = Sums(torch.full((1,), next(NUMBERS)), NO_SUMS)
    assert ring.seal_entry(slot, MEMORY, CONTENT.state_bytes, sums) == CONTENT.size_bytes


class Drive:
    """What was written where, and what the manifests say: a crash leaves this, and nothing else."""

    def __init__(self, space: SwapSpace, slots: list[SlotLayout]) -> None:
        self.space, self.layouts = space, slots
        self.content: dict[tuple[Stripe, ...], str] = {}
        self.manifests: list[tuple[dict, list[list[str]]]] = []
        """Tables, and what is to be found by them; the newest last."""
        self.pins: dict[str, tuple[dict, list[list[str]]]] = {}
        self.ring = ExtentRing(space, incarnation=1, sequence=1)
        self.ring.add(slots)
        self.state: list[list[str]] = [[] for _ in slots]
        self.written_bytes = 0
        self.number = 0

    def step(self, writers: list[int], rewritten: tuple[int, ...] = (), *, commits: bool = True) -> None:
        self.ring.begin_turn()
        for slot in writers:
            if slot in rewritten or self.ring.is_due(slot):
                self.rewrite(slot)
            else:
                self._write(slot, self.ring.to_append(slot), CONTENT.size_bytes)
                append(self.ring, slot)
                self.state[slot] = [*self.state[slot], self._tag]
        if commits:
            self.commit()

    def rewrite(self, slot: int) -> None:
        self._write(slot, self.ring.to_rewrite(slot), BASE.size_bytes)
        rewrite(self.ring, slot)
        self.state[slot] = [self._tag]

    def commit(self) -> None:
        self.manifests = [*self.manifests[-1:], (self.ring.tables, [list(parts) for parts in self.state])]
        self.ring.note_commit()

    @property
    def _tag(self) -> str:
        return f"write {self.number}"

    def _write(self, slot: int, extent, size_bytes: int) -> None:
        self.number += 1
        own = {written.extent.stripes for written in self.ring.slots[slot].current}
        kept = [self.manifests[-1]] if self.manifests else []
        for tables, _ in [*kept, *self.pins.values()]:
            for _, stripes, _ in self.ring._rows.writes_of(tables):
                assert not overlap(stripes, extent.stripes), "a committed manifest refers to this"
        for stripes in list(self.content):
            if overlap(stripes, extent.stripes):
                assert stripes in own or stripes == extent.stripes or stripes not in self.live()
                del self.content[stripes]
        self.content[extent.stripes] = self._tag
        self.written_bytes += size_bytes

    def live(self) -> set:
        return {written.extent.stripes for record in self.ring.slots for written in record.current}

    def act(self, rng: random.Random, pin: str) -> None:
        """One thing that can happen to a run."""
        writers = [slot for slot in range(len(self.layouts)) if rng.random() < 0.8]
        match rng.choice(["step"] * 6 + ["by hand", "failed", "rewind", "crash", "pin", "unpin"]):
            case "step":
                self.step(writers, tuple(slot for slot in writers if rng.random() < 0.1))
            case "by hand":
                for slot in writers:
                    self.rewrite(slot)
            case "failed":
                self.step(writers, commits=False)
            case "rewind" if len(self.manifests) == 2 and self.ring.uncommitted == []:
                self.go_to(self.manifests[0])
            case "crash":
                self.crash(self.manifests[-1])
            case "pin":
                self.ring.pin(pin, self.manifests[-1][0])
                self.pins[pin] = self.manifests[-1]
            case "unpin" if self.pins:
                name = rng.choice(list(self.pins))
                self.ring.unpin(name)
                del self.pins[name]

    def check(self, manifest: tuple[dict, list[list[str]]], ring: ExtentRing) -> None:
        tables, wanted = manifest
        found = {stripes: self.content.get(stripes) for _, stripes, _ in ring._rows.writes_of(tables)}
        assert sorted(filter(None, found.values())) == sorted(tag for parts in wanted for tag in parts)

    def go_to(self, manifest: tuple[dict, list[list[str]]]) -> None:
        """Rewind, or resume in the same process."""
        self.ring.adopt(manifest[0], self.layouts, where="there")
        self.manifests = [manifest]
        self.state = [list(parts) for parts in manifest[1]]
        assert [[self.content[w.extent.stripes] for w in record.current] for record in self.ring.slots] == self.state

    def crash(self, manifest: tuple[dict, list[list[str]]]) -> None:
        """Another process opens the files, with all of their space free at first."""
        for file in self.space._files:
            file.ranges = type(file.ranges)()
        self.space._owned.clear()
        self.ring = ExtentRing(self.space, incarnation=self.ring.incarnation + 1, sequence=self.ring.sequence + 1)
        for tables, _ in self.manifests:
            self.ring.claim(tables)
        for name, (tables, _) in self.pins.items():
            self.ring.pin(name, tables)
        self.go_to(manifest)


def overlap(left: tuple[Stripe, ...], right: tuple[Stripe, ...]) -> bool:
    return any(
        a.fd == b.fd and a.offset < b.offset + b.size_bytes and b.offset < a.offset + a.size_bytes
        for a in left
        for b in right
    )


def total_bytes(space: SwapSpace) -> int:
    return sum(file.end for file in space._files)


@pytest.mark.parametrize("period", [1, 2, 3, 4])
def test_how_long_a_log_will_be_is_known_a_turn_before(space, period):
    drive = Drive(space, layouts(5, period))
    for _ in range(3 * period + 2):
        foreseen = [drive.ring.num_logged_next(slot) for slot in range(5)]
        drive.step(list(range(5)))
        assert [len(record.current.log) for record in drive.ring.slots] == foreseen


@pytest.mark.parametrize("period", [1, 2, 3, 4, pytest.param(16, marks=pytest.mark.slow)])
def test_a_period_writes_each_base_once_into_space_that_was_there_from_the_start(space, period):
    count = 2 * period + 1
    drive = Drive(space, layouts(count, period))
    bases, entries = num_needed(count, period)
    assert total_bytes(space) == bases * BASE.size_bytes + entries * ENTRY_BYTES
    everybody = list(range(count))
    drive.step(everybody)  # births
    for _ in range(2):
        before, rewrites = drive.written_bytes, 0
        for _ in range(period):
            drive.step(everybody)
            rewritten = [record for record in drive.ring.slots if not record.current.log]
            assert count // period <= len(rewritten) <= -(-count // period), "slots take turns"
            rewrites += len(rewritten)
            drive.check(drive.manifests[-1], drive.ring)
            drive.check(drive.manifests[-2], drive.ring)
        assert rewrites == count
        appended = (period - 1) * count * CONTENT.size_bytes
        assert drive.written_bytes - before == count * BASE.size_bytes + appended
    assert total_bytes(space) == bases * BASE.size_bytes + entries * ENTRY_BYTES


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_manifest_stays_whole(space, seed):
    rng = random.Random(seed)
    period, count = rng.choice([1, 2, 3, 5]), rng.randint(1, 7)
    slots = layouts(count, period)
    if count > 2:
        slots[0] = SlotLayout(ExtentLayout(3 * PAGE, PAGE, PAGE), ENTRY_BYTES if period > 1 else 0, period)
    drive = Drive(space, slots)
    drive.step(list(range(count)))
    for number in range(60):
        drive.act(rng, f"pin {number}")
        for manifest in [drive.manifests[-1], *drive.pins.values()]:
            drive.check(manifest, drive.ring)
    for name in list(drive.pins):
        drive.ring.unpin(name)
    drive.commit()
    drive.step([], commits=True)
    held = drive.ring._pool
    assert {size: held.num_held(size) for size in held._wanted} == dict(held._wanted), "no extent is lost or kept"


def test_a_slot_without_gradients_keeps_its_chain_and_is_rewritten_when_its_log_is_full(space):
    drive = Drive(space, layouts(3, 3))
    drive.step([0, 1, 2])
    chain = drive.ring.slots[0].current
    for _ in range(4):
        drive.step([1, 2])
    assert drive.ring.slots[0].current is chain
    lengths = []
    for _ in range(6):
        drive.step([0, 1, 2])
        lengths.append(len(drive.ring.slots[0].current.log))
    assert max(lengths) <= 2
    assert lengths.count(0) == 2, "it has its turn back"


def test_slots_of_many_layouts_take_turns_too(space):
    drive = Drive(space, [SlotLayout(ExtentLayout(n * PAGE, 0, PAGE), ENTRY_BYTES, 3) for n in range(1, 7)])
    for _ in range(4):
        drive.step(list(range(6)))
        if drive.number > 6:
            assert [len(record.current.log) for record in drive.ring.slots].count(0) == 2


@pytest.mark.parametrize("period", [1, 2, 3])
def test_who_goes_on_from_a_run_that_was_killed_needs_no_more_space_than_that_had(space, period):
    """Also where extents of different slots are equally large: those of bf16, fp16 and fp32 parameters are."""
    bases = [BASE, ExtentLayout(8 * PAGE, 4 * PAGE, PAGE), ExtentLayout(5 * PAGE, 2 * PAGE, PAGE)]
    slots = [SlotLayout(base, ENTRY_BYTES if period > 1 else 0, period) for base in bases * 4]
    drive = Drive(space, slots)
    taken = total_bytes(space)
    for _ in range(8):
        for _ in range(3):
            drive.step(list(range(len(slots))))
        drive.crash(drive.manifests[-1])
        assert total_bytes(space) == taken


def test_where_a_write_goes_is_the_same_until_it_is_sealed_or_committed(space):
    ring = ExtentRing(space, incarnation=1, sequence=1)
    ring.add(layouts(2, 4))
    first = ring.to_rewrite(0)
    assert ring.to_rewrite(0) is first
    rewrite(ring, 0)
    assert ring.to_rewrite(0) is first, "nothing refers to it before a commit"
    ring.note_commit()
    assert ring.to_rewrite(0) is not first
    ring.begin_turn()
    place = ring.to_append(0)
    append(ring, 0)
    assert ring.to_append(0) is not place, "another entry"


def test_nothing_is_added_to_a_slot_without_a_base_or_with_a_full_log(space):
    ring = ExtentRing(space, incarnation=1, sequence=1)
    ring.add(layouts(1, 2))
    assert ring.is_due(0)
    with pytest.raises(StateError, match="a base, and room in its log"):
        ring.to_append(0)
    rewrite(ring, 0)
    ring.begin_turn()
    append(ring, 0)
    ring.begin_turn()
    assert ring.is_due(0)
    with pytest.raises(StateError, match="1 entries"):
        ring.to_append(0)


def test_an_entry_that_is_sealed_again_takes_the_place_that_it_had(space):
    """As where an exception came before anybody knew of it. Twice in the log, its step would be done twice."""
    drive = Drive(space, layouts(1, 4))
    for _ in range(2):
        drive.step([0])
    ring, place = drive.ring, len(drive.ring.slots[0].current.log)
    ring.begin_turn()
    extents = []
    for number in (3, 4):
        extents.append(ring.to_append(0, place))
        ring.seal_entry(0, MEMORY, CONTENT.state_bytes, Sums(torch.full((1,), number), NO_SUMS), place=place)
    log = ring.slots[0].current.log
    assert [entry.extent for entry in log[place:]] == extents[:1] == extents[1:]
    assert len(ring.tables["log"]) == place + 1
    assert log[-1].root in ring.tables["log"][-1], "the latter's trailer"


def test_slots_of_a_failed_sync_are_due_until_they_are_rewritten(space):
    drive = Drive(space, layouts(4, 4))
    drive.step([0, 1, 2, 3])
    drive.ring.suspects = {0, 1, 2, 3}
    drive.step([0, 1, 2])
    assert drive.ring.suspects == {3}
    assert [len(record.current.log) for record in drive.ring.slots[:3]] == [0, 0, 0]


def test_a_chain_is_read_as_one_extent(space):
    extents = space.allocate_all([BASE.parts, ENTRY_BYTES])
    base, entry = (Written(extent, BASE, None, 0) for extent in extents)
    reading = Chain(base, (Written(entry.extent, CONTENT, None, 0),)).reading(base_bytes=BASE.trailer_at)
    assert reading.size_bytes == BASE.trailer_at + CONTENT.size_bytes
    assert sum(stripe.size_bytes for stripe in reading.stripes) == reading.size_bytes
    segments = reading.segments(0)
    assert [s.address for s in segments] == [sum(x.size_bytes for x in segments[:i]) for i in range(len(segments))]
    inside = [(s.fd, s.offset, s.size_bytes) for extent in extents for s in extent.stripes]
    for fd, start, size in reading.stripes:
        assert any(fd == f and o <= start and start + size <= o + n for f, o, n in inside)


def test_a_manifest_of_bases_alone_may_have_no_table_of_entries(space):
    ring = ExtentRing(space, incarnation=5, sequence=3)
    ring.add(layouts(2, 1))
    rewrite(ring, 0)
    rewrite(ring, 1)
    tables, stripes = {"slots": ring.tables["slots"]}, [record.current.base.extent.stripes for record in ring.slots]
    last, number = MEMORY.view(torch.uint8, 0, BASE.size_bytes).clone(), next(NUMBERS)
    del ring
    ring = ExtentRing(space, incarnation=6, sequence=4)
    ring.claim(tables)
    ring.adopt(tables, layouts(2, 1), where="there")
    assert [record.current.base.extent.stripes for record in ring.slots] == stripes
    assert (ring.tables["slots"] == tables["slots"]).all()
    MEMORY.view(torch.uint8, 0, BASE.size_bytes).copy_(last)
    assert ring.open_sealed(1, ring.slots[1].current.base, MEMORY).state.tolist() == [number - 1]
    with pytest.raises(CorruptionError, match="the base of slot 0, its trailer"):
        ring.open_sealed(0, ring.slots[0].current.base, MEMORY)


def test_an_older_manifest_is_known_to_be_whole_until_something_is_written_there(space):
    drive = Drive(space, layouts(3, 2))
    for _ in range(3):
        drive.step([0, 1, 2])
    before = drive.manifests[-2]
    assert drive.ring.written_over(before[0]) == []
    drive.step([0], rewritten=(0,), commits=False)
    over = drive.ring.written_over(before[0])
    assert over
    with pytest.raises(ResumeError, match=f"has a step of which {len(over)} slots were written over since"):
        drive.ring.adopt(before[0], drive.layouts, where="there")


@pytest.mark.parametrize("period", [1, 3])
def test_a_commit_that_another_rank_could_not_take_is_taken_back(space, period):
    drive = Drive(space, layouts(4, period))
    for number in range(2 * period + 1):
        drive.step([0, 1, 2, 3] if number < 2 else [0, 2])
        if number:
            before = drive.manifests[-2]
            drive.ring.take_back_commit(before[0])
            drive.manifests = [before]
            assert len(drive.ring.uncommitted) == (4 if number < 2 else 2)
            drive.step([1], commits=False)
            drive.check(before, drive.ring)
            drive.commit()
            drive.check(drive.manifests[-1], drive.ring)


def test_tables_of_other_slots_are_refused(space):
    drive = Drive(space, layouts(3, 3))
    drive.step([0, 1, 2])
    drive.step([0, 1, 2])
    tables = drive.manifests[-1][0]
    larger = SlotLayout(ExtentLayout(20 * PAGE, 0, PAGE), ENTRY_BYTES, 3)
    for others, message in [
        (layouts(2, 3), "and not of 2 slots"),
        (layouts(3, 1), "a log of 1 entries for slot"),
        ([larger] * 3, r"has 53248 bytes for slot 0, and it needs 86016"),
    ]:
        with pytest.raises(ResumeError, match=message):
            drive.ring.adopt(tables, others, where="there")
    assert drive.ring.tables.keys() == {"slots", "log"}


SIZE = 3 << 16


@pytest.fixture
def one_path(tmp_path):
    space = SwapSpace([tmp_path], direct="optional")
    yield space
    space.close()


def chain_of(space):
    content = ExtentLayout(SIZE - 4096, 0, space.alignment)
    return Chain(Written(space.allocate(content.size_bytes), content, SealedAs(0, 1, 1), 0))


def test_all_of_a_chain_is_read(one_path):
    chain = chain_of(one_path)
    size_bytes = chain.base.content.size_bytes
    content = os.urandom(size_bytes)
    with open(one_path.path_of(one_path.fds[0]), "r+b") as file:
        file.seek(chain.base.extent.stripes[0].offset)
        file.write(content)
    assert PinnedReader(one_path).read(chain).view(torch.uint8, 0, size_bytes).numpy().tobytes() == content


@pytest.mark.parametrize("beyond", [0, 100], ids=["between two pages", "inside a page"])
def test_a_file_that_ends_too_soon_is_an_error_and_no_hang(one_path, beyond):
    chain = chain_of(one_path)
    os.truncate(one_path.path_of(one_path.fds[0]), chain.base.extent.stripes[0].offset + 8192 + beyond)
    with pytest.raises(SwapIOError, match="a pinned step"):
        PinnedReader(one_path).read(chain)
