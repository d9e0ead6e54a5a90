"""An optimizer with a log in a power loss at any moment: what was committed last is there, bit for bit."""

import itertools
import os
import random
import shutil
import warnings

import pytest
import torch

from nvme_offload import CorruptionError, OffloadAdamW, ResumeError, StateError
from nvme_offload.offload.durable.extent_pool import ExtentPool
from nvme_offload.offload.durable.ring import ExtentRing
from tests.support.killed_steps import durable_section
from tests.support.power_loss import Recording
from tests.support.training import assert_same_bits, params_of, set_grads, snapshot

SHAPES = [(700,), (31,), (300,)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def made(folder):
    params = params_of(SHAPES, *DTYPES)
    options = {"rewrite_every": 3, "engine": "aiofiles", "direct": "optional"}
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 1e-2}]
    return OffloadAdamW(groups, offload=durable_section(folder, "small", **options))


def live(folder, mark):
    """Steps, an end in between, and going back by one."""
    truth = {}

    def step(optimizer, number):
        set_grads(
            [p for group in optimizer.param_groups for p in group["params"]], number, without=[] if number % 3 else [1]
        )
        mark(f"begin {number}")
        optimizer.step()
        optimizer.durable.commits.settle()
        mark(f"done {number}")
        truth[number] = snapshot(optimizer)

    with made(folder) as optimizer:
        for number in range(1, 6):
            step(optimizer, number)
    with made(folder) as optimizer:
        assert optimizer.resume() == (5, {})
        for number in (6, 7):
            step(optimizer, number)
        mark("begin 6")
        assert optimizer.rewind() == (6, {})
        mark("done 6")
        for number in (7, 8, 9):
            step(optimizer, number)
    return truth


def problem(crash, truth, folder, monkeypatch):
    """What is wrong with what the next process finds; None: nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    crash.restore(folder)
    with monkeypatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(os, "fdatasync", lambda descriptor: None)
        with made(folder) as optimizer:
            try:
                step, _ = optimizer.resume() or (None, {})
                if (str(step) if step else None) not in crash.committed():
                    return f"{step} was found, and may be {crash.committed()}"
                if step is not None:
                    assert_same_bits(snapshot(optimizer), truth[step])
            except (ResumeError, CorruptionError, AssertionError) as error:
                return str(error)
    return None


def problems(folder, monkeypatch, *, num_random, seed=0, num_crashes=None):
    """Yield what is wrong after each crash; of drawn ones, where `num_crashes` says how many."""
    drive = folder / "drive"
    drive.mkdir()
    with Recording(drive) as recording:
        truth = live(drive, recording.mark)
    history = recording.history()
    chance, losses = random.Random(seed), history.power_losses(at_most=1, num_random=num_random, seed=seed)
    drawn = (history.some_crash(chance) for _ in range(num_crashes or 0))
    for crash in drawn if num_crashes else itertools.chain(history.kills(seed), losses):
        if found := problem(crash, truth, folder / "after", monkeypatch):
            yield f"{crash}: {found}"


def test_whatever_is_lost_the_latest_step_is_there(in_memory, monkeypatch):
    assert not list(problems(in_memory, monkeypatch, num_random=0, num_crashes=25))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(5))
def test_many_random_subsets_of_sectors(in_memory, monkeypatch, seed):
    assert not list(problems(in_memory, monkeypatch, num_random=2000, seed=seed))


def extents_reused_before_the_commit(patch):
    """What a chain does not need any more is taken for the next write at once, newest first."""

    def release(ring, record, chain):
        ring._pool.give_back(
            pair for pair in record.extents(chain) if pair[1] not in {w.extent for w in record.current}
        )

    def take(pool, size):
        pool._used[size] += 1
        return pool._idle[size].pop() if pool._idle[size] else pool._space.allocate_all([size])[0]

    patch.setattr(ExtentRing, "_release", release)
    patch.setattr(ExtentPool, "take", take)


def test_space_that_is_used_again_too_early_is_found(in_memory, monkeypatch):
    """Other mistakes are those of any durable run: offload/durable/test_durable_power_loss.py finds them."""
    extents_reused_before_the_commit(monkeypatch)
    try:
        found = next(problems(in_memory, monkeypatch, num_random=50), None)
    except (CorruptionError, ResumeError, StateError, AssertionError) as error:  # without any crash
        found = str(error)
    assert found
