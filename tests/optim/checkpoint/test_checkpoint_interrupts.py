"""An exception between any two instructions of save, load and export: the run before, the run after, or a refusal."""

import gc
import shutil
import weakref

import pytest
import torch

from nvme_offload import StateError
from tests.support.interrupts import STRIKES, Interrupt, Struck, every, raise_struck, strided, struck
from tests.support.sharded_model import full_state
from tests.support.tiers import EVERYTHING, check_buffers, make, section, train_step


def state_of(engine):
    return full_state(engine.module, engine.optimizer) | {"steps": torch.tensor(engine.global_steps)}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture
def engine(alone, tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir()
    with make(section(drive, **EVERYTHING, accumulation=1), num_layers=2) as engine:
        train_step(engine, 0)
        yield engine
    assert not list(drive.iterdir())


@pytest.fixture
def root(engine, in_memory):
    """A folder with a checkpoint of this engine in it."""
    root = in_memory / "checkpoints"
    engine.save_checkpoint(root, "good")
    return root


@STRIKES
@strided(22013)
def test_a_save_is_whole_or_leaves_nothing(engine, root, strike, stride):
    before = state_of(engine)
    for interrupt in every(stride, strike):
        shutil.rmtree(root / "next", ignore_errors=True)
        struck(interrupt, lambda: engine.save_checkpoint(root, "next"))
        assert (root / "latest").read_text() in ("good", "next"), interrupt.place
        check_buffers(engine.optimizer, interrupt.place, may_hold=interrupt.kept is not None)
        assert same(state_of(engine), before), interrupt.place
        engine.load_checkpoint(root)
        assert same(state_of(engine), before), interrupt.place
        interrupt.kept = None  # its frames may have the lock on the folder, and hold a block
        check_buffers(engine.optimizer, interrupt.place)
        engine.save_checkpoint(root, "next")
        assert sorted(path.name for path in root.iterdir()) == ["good", "latest", "next"], interrupt.place
        (root / "latest").write_text("good")


def test_nothing_of_a_save_that_was_cut_off_waits_for_a_collection(engine, root):
    """Not its lock on the folder either, wherever it was cut off."""
    refs = []
    gc.disable()
    try:
        try:
            with Interrupt(lambda point: point.code.co_name == "_begin", raise_struck):
                engine.save_checkpoint(root, "next")
        except Struck as error:
            refs.append(weakref.ref(error))
        assert [ref() for ref in refs] == [None]
    finally:
        gc.enable()


@STRIKES
@strided(14009)
def test_after_a_load_it_is_the_run_before_or_the_one_loaded_or_refuses_to_step(engine, root, strike, stride):
    saved = state_of(engine)
    train_step(engine, 1)
    engine.save_checkpoint(root, "later")
    before = state_of(engine)
    for interrupt in every(stride, strike):
        engine.load_checkpoint(root, "later")
        struck(interrupt, lambda: engine.load_checkpoint(root, "good"))
        check_buffers(engine.optimizer, interrupt.place, may_hold=True)  # what a load has gathered
        if engine.optimizer.has_unfinished_step:
            with pytest.raises(StateError, match="a load stopped halfway"):
                state_of(engine)
            engine.backward(engine(torch.zeros(1, 1, dtype=torch.int64)).sum())
            with pytest.raises(StateError, match="load a checkpoint"):
                engine.step()
        else:
            now = state_of(engine)
            assert same(now, before) or same(now, saved), interrupt.place
        engine.load_checkpoint(root, "good")
        assert same(state_of(engine), saved), interrupt.place


@STRIKES
@strided(6007)
def test_an_export_is_the_one_before_or_the_new_one_or_refused(engine, in_memory, strike, stride):
    folder, before = in_memory / "export", state_of(engine)
    engine.export_safetensors(folder)
    expected = digest(folder)
    for interrupt in every(stride, strike):
        struck(interrupt, lambda: engine.export_safetensors(folder))
        check_buffers(engine.optimizer, interrupt.place)
        assert same(state_of(engine), before), interrupt.place
        engine.export_safetensors(folder)
        assert digest(folder) == expected, interrupt.place


def digest(folder):
    return sorted((path.name, path.read_bytes()) for path in folder.iterdir())
