"""A snapshot comes and goes in two halves, whatever kills it in between; one that is damaged is named, and kept."""

import os
import signal
from contextlib import contextmanager

import pytest

from nvme_offload.offload.durable.inventory import find_runs
from tests.support.durable_run import LAYOUTS, SmallRun, as_an_earlier_version_wrote, name_of
from tests.support.killed_histories import DiesAtAChange
from tests.support.killed_steps import fork

EXTENT_BYTES = sum(layout.base.size_bytes for layout in LAYOUTS)


@contextmanager
def opened(folder, *, goes_on=True):
    run = SmallRun([folder])
    if goes_on:
        run.adopt(run.run.found[0])
    yield run
    run.close()


@pytest.fixture
def folder(in_memory):
    """With a run of two commits that nobody is in."""
    run = SmallRun([in_memory])
    run.begin()
    run.commit("0", 0)
    run.commit("1", 1)
    run.close()
    return in_memory


@pytest.mark.parametrize("half", ["prepared", "withdrawn"])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_what_is_half_done_becomes_what_another_rank_has(folder, half, elsewhere):
    with opened(folder) as run:
        run.run.prepare_snapshot("kept")
        if half == "withdrawn":
            run.run.snapshots.publish("kept")
            run.run.snapshots.withdraw("kept")
    assert find_runs([folder])[0].snapshots == []
    with opened(folder) as run:
        assert (dict(run.run.snapshots), list(run.run.snapshots.prepared)) == ({}, ["kept"])
        run.commit("2", 2)
        run.commit("3", 3)  # it has no less space for that
        run.run.agree_on_snapshots({"kept"} if elsewhere else set())
        assert list(run.run.snapshots) == (["kept"] if elsewhere else [])
        if elsewhere:
            run.adopt(run.run.snapshots["kept"])
            assert name_of(run.run.committed[0]) == "1"
    assert find_runs([folder])[0].snapshots == (["kept"] if elsewhere else [])


def test_a_prepared_one_that_somebody_put_beside_a_published_one_never_takes_its_place(folder):
    with opened(folder) as run:
        run.snapshot("kept")
        run.commit("2", 2)
        run.run.prepare_snapshot("other")
        where = run.run.folder
    (where / "prepared.other").rename(where / "prepared.kept")
    with opened(folder) as run:
        run.run.agree_on_snapshots({"kept"})
        assert name_of(run.run.snapshots["kept"]) == "1"


@pytest.mark.parametrize("call", ["snapshot", "remove_snapshot"])
def test_killed_at_any_change_to_the_drive_it_is_there_or_it_is_not(folder, call):
    for change in range(1, 40):
        for after in (False, True):

            def life(change=change, after=after):
                with opened(folder) as run:
                    if call == "remove_snapshot":
                        run.snapshot("kept")
                    dying = DiesAtAChange(0, change, after=after)
                    dying.counts = True
                    getattr(run, call)("kept")
                    dying.counts = False

            status = os.waitpid(fork(life), 0)[1]
            assert status in (0, signal.SIGKILL)
            with opened(folder) as run:
                run.run.agree_on_snapshots(set(run.run.snapshots))
                assert run.run.snapshots.all == run.run.snapshots
                assert not run.run.snapshots.unreadable
                if run.run.snapshots:
                    run.adopt(run.run.snapshots["kept"])
                    run.remove_snapshot("kept")
                assert name_of(run.run.committed[0]) == "1"
        if not status:
            break
    assert 3 < change < 39


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("place", [3, 40, 300, -1])
def test_a_flipped_bit_takes_no_snapshot_away_without_a_word_and_its_space_is_not_used_again(folder, place):
    with opened(folder) as run:
        run.snapshot("best")
        stripes = [w.extent.stripes for slot in run.run.extents.slots for w in slot.current]
        run.commit("2", 2)
        run.snapshot("other")
        run.commit("3", 3)
        where = run.run.folder
        truth = run.truth
    swap = (where / "swap").read_bytes()
    flip(where / "snapshot.best", place)
    sizes = []
    for life in range(3):
        with opened(folder) as run:
            assert list(run.run.snapshots) == ["other"]
            assert list(run.run.snapshots.unreadable) == ["best"]
            for step in range(4, 8):
                run.commit(f"{life}.{step}", step)
            if life == 1:
                run.run.prepare_snapshot("best")  # the name of what nobody can read
                run.run.agree_on_snapshots(set())  # another rank could not
        assert find_runs([folder])[0].ranks[0].unreadable == ("best",)
        content = (where / "swap").read_bytes()
        for _, offset, size in (stripe for of_slot in stripes for stripe in of_slot):
            assert content[offset : offset + size] == swap[offset : offset + size]
        sizes.append(len(content))
    assert sizes[2] == sizes[1], "more is taken in each life"
    with opened(folder) as run:
        run.adopt(run.run.snapshots["other"])
        assert run.read() == truth["2"]
        run.run.delete_snapshot("best")
        for step in range(3, 6):
            run.commit(f"again {step}", step)
        run.snapshot("best")
    assert len((where / "swap").read_bytes()) == sizes[2]
    assert not list(where.glob("unreadable.*"))


def test_a_run_of_an_earlier_version_goes_on_and_its_commits_have_identities_from_then_on(folder):
    with opened(folder) as run:
        run.snapshot("kept")
        truth, where = run.truth, run.run.folder
    as_an_earlier_version_wrote(where)
    with opened(folder, goes_on=False) as run:
        assert [manifest.commit_id for manifest in [*run.run.found, *run.run.snapshots.values()]] == [""] * 3
        run.adopt(run.run.found[0])
        assert '"format": 3' in (where / "run.json").read_text()
        run.commit("2", 2)
        run.commit("3", 3)
        newest, before = run.run.committed
        assert newest.previous_id == before.commit_id != ""
        run.adopt(run.run.snapshots["kept"])
        assert run.run.committed[0].commit_id == ""
        assert run.read() == truth.get("1", run.values and tuple(run.values))
        run.commit("2 again", 2)
        assert run.run.committed[0].previous_id == ""
    with opened(folder, goes_on=False) as run:
        assert [name_of(manifest) for manifest in run.run.found] == ["2 again", "1"]
