"""A checkpoint of a durable run that is written while training goes on: the same files, and nothing waits for it."""

import os
import signal
from unittest.mock import Mock

import pytest
import torch

from nvme_offload import CheckpointWriteError, OutOfSpaceError, StateError
from nvme_offload.optim.checkpoint import background, storage
from tests.support.durable_engine import TIERS, durable, expected, whole
from tests.support.ranks import on_ranks
from tests.support.resuming import fresh_engine, steps_of
from tests.support.sharded_model import assert_same
from tests.support.training import run_child


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "saved"  # beside the drive


QUICK = [("bf16", "state"), ("fp16", "state, logged"), ("fp32", "state")]
SLOW = [("fp16", "state"), *((mode, tiers) for mode in ("bf16", "fp32") for tiers in TIERS if tiers != "state")]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def contents_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def held_back(monkeypatch):
    """The thread does not begin before somebody waits for it."""
    write = background.BackgroundSave._write

    def held(save):
        save._pace._hurried.wait()
        write(save)

    monkeypatch.setattr(background.BackgroundSave, "_write", held)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("mode", "tiers"), CASES)
def test_the_files_are_those_of_a_save_that_training_waits_for(drive, folder, monkeypatch, mode, tiers):
    held_back(monkeypatch)
    with durable(mode, drive, "run", tiers) as engine:
        steps_of(engine, 0, range(2))
        with torch.no_grad():  # by hand, and after the commit of the step
            next(engine.module.wide.parameters()).view(-1)[:50] += 0.25
        engine.save_checkpoint(folder / "waited", client_state={"at": 2})
        engine.save_checkpoint(folder / "beside", client_state={"at": 2}, background=True)
        before = whole(engine)
        steps_of(engine, 0, range(2, 5))
        with torch.no_grad():
            engine.module.blocks[1][0].weight += 1  # frozen
        assert engine.optimizer.stats().checkpoint_progress == 0.0
        assert os.listdir(folder / "beside") == ["global_step2.partial"]
        engine.wait_for_checkpoint()
        assert engine.optimizer.stats().checkpoint_progress is None
        assert contents_of(folder / "beside" / "global_step2") == contents_of(folder / "waited" / "global_step2")
        assert engine.optimizer.stats().failed_commits == 0
    with fresh_engine(mode, drive, seed=9) as engine:
        engine.load_checkpoint(folder / "beside")
        assert_same(whole(engine)[0], before[0])


def test_one_that_fails_is_told_and_leaves_the_checkpoint_before_and_the_run(drive, folder, monkeypatch):
    with durable("bf16", drive, "run") as engine:
        steps_of(engine, 0, range(1))
        engine.save_checkpoint(folder, "old")

        def save():
            engine.save_checkpoint(folder, "new", background=True)  # which may have failed when this returns
            engine.wait_for_checkpoint()

        with monkeypatch.context() as patch:
            patch.setattr(storage, "_compact", Mock(side_effect=OSError(28, "no space is left")))
            with pytest.warns(RuntimeWarning, match="training goes on"), pytest.raises(CheckpointWriteError):
                save()
        assert sorted(os.listdir(folder)) == ["latest", "old"]
        steps_of(engine, 0, range(1, 3))
        engine.save_checkpoint(folder, "new", background=True)
    assert (folder / "latest").read_text() == "new"
    with durable("bf16", drive, "run") as engine:
        assert engine.resume() == (3, {})


def test_space_for_it_is_reserved_beforehand_or_it_is_refused(drive, folder, monkeypatch):
    full = Mock(side_effect=OutOfSpaceError(path=drive, needed_bytes=10, free_bytes=0))
    with durable("bf16", drive, "run") as engine:
        steps_of(engine, 0, range(1))
        monkeypatch.setattr(type(engine.optimizer.durable.commits.run.extents), "pin", full)
        with pytest.raises(OutOfSpaceError, match="needed"):
            engine.save_checkpoint(folder, background=True)
        assert not folder.exists()
        steps_of(engine, 0, range(1, 2))


def test_what_it_reserved_is_free_again(drive, folder):
    with durable("bf16", drive, "run") as engine:
        swap = drive / "nvme-durable-run-rank0" / "swap"
        sizes = []
        for step in range(4):
            steps_of(engine, 0, [step])
            engine.save_checkpoint(folder, "same", background=True)
            engine.wait_for_checkpoint()
            sizes.append(swap.stat().st_size)
    assert sizes[1:] == sizes[:-1]


def test_without_a_durable_run_it_is_refused(folder):
    with fresh_engine("bf16") as engine:
        with pytest.raises(StateError, match=r"durable.*offload_optimizer"):
            engine.save_checkpoint(folder, background=True)
        with pytest.raises(ValueError, match="share = 0 of the time"):
            engine.save_checkpoint(folder, share=0)


KILLED = """
import os, signal, sys
from pathlib import Path
from nvme_offload.optim.checkpoint import storage
from tests.optim.durable.test_durable_engine import durable
from tests.support.resuming import steps_of
drive, folder = map(Path, sys.argv[1:])
compact, items = storage._compact, []

def killed(tensor):
    items.append(tensor)
    if len(items) == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    return compact(tensor)

with durable("bf16", drive, "run") as engine:
    steps_of(engine, 0, range(2))
    engine.save_checkpoint(folder, "old")
    steps_of(engine, 0, [2])
    engine.optimizer.durable.commits.settle()
    storage._compact = killed
    engine.save_checkpoint(folder, "new", background=True, share=0.9)
    step = 3
    while True:
        steps_of(engine, 0, [step])
        step += 1
"""


def test_killed_in_the_middle_of_it_neither_the_run_nor_the_checkpoint_before_is_lost(drive, folder):
    with pytest.raises(AssertionError, match=f"exit status -{signal.SIGKILL:d}\n"):
        run_child(KILLED, drive, folder)
    assert sorted(os.listdir(folder)) == ["latest", "new.partial", "old"]
    with durable("bf16", drive, "run") as engine:
        step, _ = engine.resume()
        assert step >= 3
        assert_same(whole(engine)[0], expected("bf16", step)[0])
        engine.save_checkpoint(folder, "new", background=True)
        engine.wait_for_checkpoint()
        assert sorted(os.listdir(folder)) == ["latest", "new", "old"]
        assert engine.load_checkpoint(folder, "old")[0].endswith("old")
        assert engine.global_steps == 2


@on_ranks(2)
def test_ranks_write_it_together(rank, world_size, drive, folder):
    with durable("bf16", drive, "run") as engine:
        steps_of(engine, rank, range(2))
        engine.save_checkpoint(folder / "waited")
        engine.save_checkpoint(folder / "beside", background=True)
        steps_of(engine, rank, range(2, 4))
        engine.wait_for_checkpoint()
        assert_same(whole(engine)[0], expected("bf16", 4, rank=rank)[0])
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:  # the other one has written its part, and nothing failed there
                patch.setattr(background.files, "publish", Mock(side_effect=OSError(28, "no space is left")))
            engine.save_checkpoint(folder / "beside", "next", background=True)
            with pytest.raises(CheckpointWriteError, match=r"next\.partial"):
                engine.wait_for_checkpoint()
    assert contents_of(folder / "beside" / "global_step2") == contents_of(folder / "waited" / "global_step2")
