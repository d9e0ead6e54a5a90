"""A step of a run with a log, and who reads its state, cut short anywhere: the bits stay, and so do the buffers."""

import contextlib

import pytest
import torch

from nvme_offload import StateError
from nvme_offload.optim.layout.master import TILE_NUMEL
from tests.support.interrupts import STRIKES, Struck, every, raise_struck, strided
from tests.support.logged_pair import ADAMW


@pytest.fixture
def pair(pairs):
    pair = pairs(ADAMW, 3, seed=2, dtypes=(torch.bfloat16,), shapes=[(TILE_NUMEL,)] * 7, buffers=4)
    pair.plain_step()
    return pair


@STRIKES
@strided(797)
def test_a_step_that_is_cut_short_is_finished_and_logged_once(pair, strike, stride):
    optimizer = pair.logged

    def step(interrupt):
        before = optimizer.stats().steps
        with contextlib.suppress(Struck, KeyboardInterrupt), interrupt:
            optimizer.step()
        if optimizer.has_unfinished_step:
            try:
                optimizer.finish_step()
            except StateError:  # struck in the kernel, of which nobody knows how far it got
                pair.load()
        elif optimizer.stats().steps == before:
            optimizer.step()

    for interrupt in every(stride, strike):
        pair.plain_step(by=lambda at=interrupt: step(at))
        check(pair, interrupt)


@strided(797)
@pytest.mark.parametrize("read", ["state_dict", "synchronize"])
def test_a_reader_that_is_cut_short_changes_nothing(pair, read, stride):
    for interrupt in every(stride, raise_struck):
        pair.plain_step()
        with contextlib.suppress(Struck), interrupt:
            getattr(pair.logged, read)()
        pair.plain_step()
        check(pair, interrupt)


def check(pair, interrupt):
    """The bits are those of the other training, and each buffer is free or has one owner."""
    try:
        pair.check()
    except BaseException as error:
        error.add_note(f"struck at {interrupt.place}")
        raise
    store = pair.logged.store
    assert store.pool.num_free + len(store.pipeline.residents) == store.pool.num_buffers, interrupt.place
    pair.logged.synchronize()
