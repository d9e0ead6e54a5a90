"""What a run commits is there until it commits again, whatever it does in between; and no byte of it is trusted."""

import errno
import os
import random
import shutil
from types import SimpleNamespace

import pytest

from nvme_offload import CorruptionError, OutOfSpaceError, ResumeError, StateError, SwapIOError
from nvme_offload.offload.durable import identity
from nvme_offload.offload.durable.chain import SlotLayout
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.durable.seal import ExtentLayout
from nvme_offload.offload.storage import swap_space as spaces
from tests.support.durable_run import LAYOUTS, SmallRun, base_of, name_of, read_past_the_tier
from tests.support.failing_drive import flip_bit

EXTENT_BYTES = sum(layout.base.size_bytes for layout in LAYOUTS)


@pytest.fixture
def small(in_memory):
    run = SmallRun([in_memory])
    run.begin()
    yield run
    run.close()


def full_disk(monkeypatch):
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=1))


def used_bytes(small):
    """Of the swap file, what is not free."""
    small.run.extents.begin_turn()
    return sum(extent.size_bytes for _, extent in small.run.extents._known().values())


class Walk:
    """Does whatever a run may do, in any order, and knows what must be found after a kill."""

    def __init__(self, folder, seed, steps_back):
        self.steps_back = steps_back
        self.path = folder / "drive"
        self.path.mkdir()
        self.copy = folder / "copy"
        self.chance = random.Random(seed)
        self.small = SmallRun([self.path], steps_back=steps_back)
        self.small.begin()
        self.number = 0
        self.unsure = 0  # commits until nothing is left that an earlier process may have written over
        self.commit()

    def some_slots(self):
        return [slot for slot in range(len(LAYOUTS)) if self.chance.random() < 0.6]

    def commit(self):
        self.number += 1
        slots = None if self.number == 1 else self.some_slots()
        self.small.commit(str(self.number), self.chance.randrange(100), slots)
        self.unsure = max(0, self.unsure - 1)

    def write_without_commit(self):
        self.small.write({slot: self.chance.getrandbits(31) for slot in self.some_slots()})

    def commit_in_vain(self):
        before = spaces.sync_data
        spaces.sync_data = self.refuse
        try:
            with pytest.raises(SwapIOError, match="a sync of it failed"):
                self.commit()
        finally:
            spaces.sync_data = before
        self.small.write({slot: self.small.values[slot] for slot in sorted(self.small.run.extents.suspects)})

    def refuse(self, fd):
        raise OSError(errno.EIO, "no")

    def rewind(self):
        newest, *before = self.small.run.committed
        if not before or self.unsure:
            self.small.adopt(newest)
            return
        try:
            self.small.adopt(self.chance.choice(before))
        except ResumeError:  # it was written over
            assert self.small.run.extents.uncommitted
            self.small.adopt(newest)

    def take_back(self):
        """Another rank could not commit: what was written stays, and the next commit has it."""
        if len(self.small.run.committed) > 1 and not (self.small.run.extents.uncommitted or self.unsure):
            self.small.run.take_back()

    def pin(self):
        name = f"at-{self.number}"
        if name not in self.small.run.snapshots:
            self.small.snapshot(name)

    def unpin(self):
        if self.small.run.snapshots:
            self.small.remove_snapshot(self.chance.choice(sorted(self.small.run.snapshots)))

    def go_to_snapshot(self):
        if self.small.run.snapshots:
            self.small.adopt(self.chance.choice(list(self.small.run.snapshots.values())))

    def begin_elsewhere(self):
        self.small.run.forget_commits()
        self.commit()

    def open_again(self):
        # What the writes of an earlier process left of the steps before the newest, their sums tell.
        if self.small.run.extents.uncommitted:
            self.unsure = self.steps_back
        truth = self.small.truth
        self.small.close()
        self.small = SmallRun([self.path], steps_back=self.steps_back)
        self.small.truth = truth
        self.small.adopt(self.small.run.found[0])

    def check(self):
        """Kill it now, and look at what the next process finds."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.path, self.copy)
        # Between two steps what was reserved is whole.
        whole = None if not (self.small.run.extents.uncommitted or self.unsure) else 1
        expected = [name_of(manifest) for manifest in self.small.run.committed[:whole]]
        truth, snapshots = self.small.truth, {key: name_of(m) for key, m in self.small.run.snapshots.items()}
        run = DurableRun([self.copy], name="small", rank=0, direct="optional", steps_back=self.steps_back)
        assert [name_of(manifest) for manifest in run.found[:whole]] == expected
        assert {key: name_of(manifest) for key, manifest in run.snapshots.items()} == snapshots
        for manifest in [*run.found[:whole], *list(run.snapshots.values())]:
            run.adopt(manifest, LAYOUTS)
            assert read_past_the_tier(run) == truth[name_of(manifest)]
        run.close()


OPERATIONS = [
    *[Walk.commit] * 4, Walk.write_without_commit, Walk.commit_in_vain, Walk.rewind, Walk.take_back, Walk.pin, Walk.pin,
    Walk.unpin, Walk.go_to_snapshot, Walk.begin_elsewhere, Walk.open_again,
]  # fmt: skip


def walk(folder, seed, num_operations, steps_back):
    walk, done = Walk(folder, seed, steps_back), []
    for _ in range(num_operations):
        operation = walk.chance.choice(OPERATIONS)
        done.append(operation.__name__)
        operation(walk)
        try:
            walk.check()
        except (AssertionError, CorruptionError) as error:
            error.add_note(f"seed {seed}: {', '.join(done)}")
            raise
    assert used_bytes(walk.small) <= EXTENT_BYTES * (1 + steps_back + len(walk.small.run.snapshots))
    walk.small.close()
    return walk


WALKS = [(0, 30, 1), (1, 30, 1), (2, 30, 1), (3, 30, 3)]
WALKS += [pytest.param(seed, 200, back, marks=pytest.mark.slow) for seed in range(100, 130) for back in (1, 2, 4)]


@pytest.mark.parametrize(("seed", "num_operations", "steps_back"), WALKS)
def test_whatever_it_does_the_latest_commit_and_all_that_it_keeps_is_there(in_memory, seed, num_operations, steps_back):
    """Every snapshot, and every step that it can go back to."""
    walk(in_memory, seed, num_operations, steps_back)


@pytest.mark.parametrize("part", ["state", "tail", "trailer"])
def test_a_flipped_bit_is_found_and_the_step_before_is_whole(small, part):
    small.commit("0", 0)
    small.commit("1", 1, [1])
    layout, extent = LAYOUTS[1].base, base_of(small.run, 1).extent
    place = {"state": layout.state_bytes - 1, "tail": layout.tail_at, "trailer": layout.trailer_at + 40}[part]
    flip_bit(small.run.folder / "swap", extent.stripes[0].offset + place)
    with pytest.raises(CorruptionError, match=f"{part}.*slot 1|slot 1.*{part}"):
        small.read()
    newest, before = small.run.committed
    changed = (newest.tables["slots"] != before.tables["slots"]).any(1)
    assert changed.tolist() == [False, True, False]  # only what the last step wrote is damaged: one step back it is not
    small.adopt(before)
    assert small.read() == small.truth["0"]


def test_the_trailer_of_another_write_is_not_taken(small):
    small.commit("0", 0)
    small.commit("1", 1)
    swap = (small.run.folder / "swap").read_bytes()
    small.commit("2", 2, [0])
    offset = base_of(small.run, 0).extent.stripes[0].offset
    with (small.run.folder / "swap").open("r+b") as file:  # a write that was lost: the drive has what was there before
        file.seek(offset)
        file.write(swap[offset : offset + LAYOUTS[0].base.size_bytes])
    with pytest.raises(CorruptionError, match="slot 0, its trailer"):
        small.read()


def test_after_a_failed_sync_everything_must_be_written_again(small, monkeypatch):
    """What a drive did not keep then, a later sync does not say again."""
    small.commit("0", 0)
    monkeypatch.setattr(spaces, "sync_data", Walk.refuse.__get__(small))
    with pytest.raises(SwapIOError):
        small.commit("1", 1, [0, 2])
    monkeypatch.undo()
    with pytest.raises(StateError, match="2 are not"):
        small.commit("2", 2, [1])
    with pytest.raises(StateError, match="1 are not"):
        small.commit("3", 3, [0])
    small.commit("4", 4, [2])
    assert small.read() == small.truth["4"]
    assert [manifest.step for manifest in small.run.committed] == [4, 0]


def test_a_snapshot_moves_nothing_and_later_steps_need_no_more(small, monkeypatch):
    small.commit("0", 0)
    small.commit("1", 1)
    before = small.tier.stats().requests
    small.snapshot("kept")
    assert small.tier.stats().requests == before
    full_disk(monkeypatch)
    for step in range(2, 6):
        small.commit(str(step), step)
    small.adopt(small.run.snapshots["kept"])
    assert small.read() == small.truth["1"]
    for step in range(2, 6):
        small.commit(f"{step} again", step)
    assert small.read() == small.truth["5 again"]


def test_a_snapshot_without_room_is_refused_and_changes_nothing(small, monkeypatch):
    small.commit("0", 0)
    small.commit("1", 1)
    files, used = sorted(small.run.folder.iterdir()), used_bytes(small)
    full_disk(monkeypatch)
    with pytest.raises(OutOfSpaceError, match=f"needed .*{EXTENT_BYTES} and 0 bytes"):
        small.snapshot("kept")
    assert (sorted(small.run.folder.iterdir()), used_bytes(small), small.run.snapshots) == (files, used, {})
    small.commit("2", 2)
    assert small.read() == small.truth["2"]


def test_a_second_snapshot_of_a_step_reserves_only_what_changed(small):
    small.commit("0", 0)
    small.snapshot("first")
    size_bytes = os.stat(small.run.folder / "swap").st_size
    small.snapshot("second")
    assert os.stat(small.run.folder / "swap").st_size == size_bytes
    small.commit("1", 1, [0])
    small.snapshot("third")
    assert os.stat(small.run.folder / "swap").st_size == size_bytes + LAYOUTS[0].base.size_bytes


def test_a_snapshot_of_nothing(small):
    with pytest.raises(StateError, match="a committed step"):
        small.snapshot("early")


def test_other_slots_are_refused_and_nothing_changes(small):
    small.commit("0", 0)
    small.commit("1", 1)
    for layouts in (LAYOUTS[:2], [*LAYOUTS, LAYOUTS[0]], [LAYOUTS[1], LAYOUTS[0], LAYOUTS[2]]):
        with pytest.raises(ResumeError, match=r"slots|bytes for slot 0"):
            small.run.adopt(small.run.committed[1], layouts)
    assert [manifest.step for manifest in small.run.committed] == [1, 0]
    assert small.read() == small.truth["1"]


def test_slots_may_come_later(small):
    small.commit("0", 0)
    small.layouts.append(SlotLayout(ExtentLayout(4096, 0, 4096)))
    small.run.extents.add(small.layouts[3:])
    small.values.append(0)
    small.commit("1", 1)
    small.commit("2", 2, [3])
    assert small.read() == small.truth["2"]


def test_differences_name_the_place():
    before = {"params": [{"name": "w", "shape": [3, 4]}, {"name": "b", "shape": [4]}], "long": list(range(9))}
    now = {"params": [{"name": "w", "shape": [3, 5]}, {"name": "b", "shape": [4]}], "long": [1, 2]}
    assert identity.differences(before, now) == [
        "params[0].shape[1]: 4 was committed, 5 is here",
        "long: 9 of [0, 1, 2] ... was committed, [1, 2] is here",
    ]
