"""A crash at every moment of a save: the checkpoint before is found, or the one after, and never a part of either.

The drive is simulated by ALICE's rules (tests/support/power_loss), the save is real.
"""

import itertools
import os
import random

import pytest
import torch.distributed as dist

from nvme_offload.optim.checkpoint import files
from tests.support.crashed_saves import (
    SaveCase,
    found_by_the_next_run,
    load_quietly,
    save_again,
    small_engine,
    train,
)
from tests.support.killed_saves import digest_of
from tests.support.power_loss import History, Recording
from tests.support.ranks import run_ranks

CASES = {
    "first": ("", "new"),
    "new tag": ("old", "new"),
    "same tag": ("old", "old"),
    "same tag, no marker": ("old", "old"),
}


@pytest.fixture
def undurable(monkeypatch):
    """What is restored needs no drive."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def case_of(name, folder):
    (folder / name).mkdir()
    return SaveCase(folder / name, *CASES[name], without_marker="no marker" in name)


@pytest.fixture
def case(request, in_memory, alone, undurable):
    return case_of(request.param, in_memory)


every_case = pytest.mark.parametrize("case", CASES, indirect=True)


@every_case
def test_killed_anywhere(case):
    crashes = list(case.history.kills())
    assert len(crashes) > 25
    assert not case.problems(crashes)


@every_case
def test_power_lost_anywhere(case):
    crashes = list(case.history.power_losses(num_random=300))
    assert len(crashes) > 200
    assert not case.problems(crashes)


@pytest.mark.slow
@every_case
def test_power_lost_in_many_ways(case):
    crashes = case.history.power_losses(at_most=1024, num_random=20_000, seed=1)
    assert not case.problems(crashes)


@pytest.mark.usefixtures("alone", "undurable")
def test_every_sync_is_needed(in_memory):
    """Left out alone, each leads somewhere to neither checkpoint, or to something that stays for ever."""
    unneeded = {}
    for name in CASES:
        case = case_of(name, in_memory)
        for sync in case.history.syncs:
            place = os.path.basename(sync.what), sync.caller
            if unneeded.get(place, True):
                unneeded[place] = not case.is_noticed(case.history.losses_without(sync))
    assert len(unneeded) > 10
    assert not [place for place in unneeded if unneeded[place]]


@pytest.mark.parametrize("case", ["new tag", "same tag"], indirect=True)
def test_a_run_goes_on_with_the_bits_of_either_and_saves(case):
    """The whole of it, with an engine: at every kill, and at some of the power losses."""
    sampled = random.Random(0).sample(list(case.history.power_losses(num_random=500)), 15)
    found = []
    with small_engine(seed=1) as engine:
        for crash in [*itertools.islice(case.history.kills(), 0, None, 3), *sampled]:
            root = case.restore(crash)
            load_quietly(engine, root)
            found.append(case.digests.index(digest_of(engine)))
            assert found[-1] == 1 or "saved" not in crash.marks, str(crash)
            train(engine, 2)
            engine.save_checkpoint(root, "next")
            assert (
                {"old", "next", "latest"} <= set(os.listdir(root)) - case.strangers <= {"old", "new", "next", "latest"}
            )
    assert set(found) == {0, 1}


def save_and_record(rank, world_size, root):
    with small_engine() as engine:
        train(engine, 0)
        engine.save_checkpoint(root, "old")
        train(engine, 1)
        dist.barrier()
        with Recording(root) as recording:
            dist.barrier()
            engine.save_checkpoint(root, "new")
            recording.mark(f"saved on rank {rank}")
        dist.barrier()
    return recording.base, recording.events


def test_the_save_of_two_ranks(in_memory, undurable):
    """Both write into one folder; one history is made of what each of them recorded."""
    root = in_memory / "root"
    root.mkdir()
    recordings = run_ranks(save_and_record, 2, root)
    history = History.merged(root, recordings)
    assert {"__0_0.distcp", "__1_0.distcp"} <= {os.path.basename(sync.what) for sync in history.syncs}
    before, after = (files.read_manifest(root / tag) for tag in ("old", "new"))
    assert before != after
    copies = (in_memory / str(number) for number in itertools.count())
    count = 0
    for crash in itertools.chain(history.kills(), history.power_losses(num_random=200)):
        copy = crash.restore(next(copies))
        assert found_by_the_next_run(copy)[1] in ([after] if crash.marks else [before, after]), str(crash)
        save_again(copy, "new")
        assert sorted(os.listdir(copy)) == ["latest", "new", "old"], str(crash)
        count += 1
    assert count > 150
