"""A drive that fails, or is full: an error where a tensor has no place, the right gradients everywhere else."""

import errno
import logging
import random
import re
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from nvme_offload import ActivationSwapper, FaultSpec, OutOfSpaceError, SwapIOError
from tests.support.activations import KEEPS, Attending, KiB, Layers, batch, gradients, section, train_once
from tests.support.failing_drive import Failing, Op
from tests.support.forked import printed
from tests.support.own_resources import Resources
from tests.support.pairs import each_value_once
from tests.support.sandbox import needs_mounts, run_python
from tests.support.training import assert_same_bits


@pytest.fixture(scope="module")
def expected():
    return gradients(Layers, train_once)[0]


def attempt(model, swapper):
    """The gradients, or None where an error said that there are none."""
    model.zero_grad()
    torch.manual_seed(1)
    try:
        train_once(model, swapper.saving)
    except SwapIOError as error:
        return None if "activation" in str(error) else str(error)
    return {name: param.grad for name, param in model.named_parameters()}


def fresh(make=Layers):
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize(
    ("keep", "failing"), each_value_once(KEEPS, [(Op.WRITE, errno.EIO), (Op.WRITE, errno.ENOSPC), (Op.READ, errno.EIO)])
)
def test_each_transfer_fails_once_and_the_next_iteration_is_right(tmp_path, monkeypatch, failing, keep):
    """One that fails ahead of its time is an error when it is wanted; a write that fails is one if it must leave."""
    make, config = partial(Attending, 3), section(tmp_path, keep, host_budget=32 * KiB)
    expected = gradients(make, train_once)[0]
    before, outcomes, first = Resources.steady(), [], 1
    while True:
        model = fresh(make)
        with monkeypatch.context() as patch, ActivationSwapper(config, model=model) as swapper:
            drive = Failing(swapper.tier, patch, failing[0], first, number=1, code=failing[1])
            found = attempt(model, swapper)
            if drive.left > 0:
                break  # every transfer of an iteration has failed once
            outcomes.append(found is None)
            if found is not None:
                assert_same_bits(found, expected)
            assert_same_bits(attempt(model, swapper), expected)
            assert swapper.stats().num_kept == swapper.stats().held_bytes == 0
        first += 1
    del drive
    assert any(outcomes)
    assert list(tmp_path.iterdir()) == []
    assert not Resources.settled(before).beyond(before)


@pytest.mark.parametrize(("kind", "keep"), each_value_once(["eio", "enospc"], KEEPS))
def test_faults_from_seeds_are_never_silent(tmp_path, expected, kind, keep):
    outcomes = []
    for seed in range(7):
        faults, model = FaultSpec(seed=seed, **{kind: random.Random(seed).choice((0.03, 0.2, 1.0))}), fresh()
        config = section(tmp_path, keep, host_budget=64 * KiB)
        with ActivationSwapper(config, model=model, faults=faults) as swapper:
            for _ in range(2):
                found = attempt(model, swapper)
                outcomes.append(found is None)
                if found is not None:
                    assert_same_bits(found, expected)
            assert swapper.stats().num_kept == 0
    assert {True, False} == set(outcomes)


def test_corrupted_bytes_are_found(tmp_path):
    model = fresh()
    with ActivationSwapper(section(tmp_path, aio={"checksums": True}), model=model) as swapper:
        with swapper.saving():
            loss = model(batch()).square().mean()
        [path] = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 64 * KiB]
        with path.open("r+b") as file:
            file.write(b"\xff" * 64 * KiB)
        with pytest.raises(RuntimeError, match="activation"):
            loss.backward()


FULL = """
import sys, torch
from nvme_offload import ActivationSwapper, OutOfSpaceError
from tests.support.activations import KiB, Layers, gradients, section, train_once
from tests.support.training import assert_same_bits
expected, _ = gradients(Layers, train_once)
torch.manual_seed(0)
model = Layers()
with ActivationSwapper(section(sys.argv[1], host_budget=int(sys.argv[2])), model=model) as swapper:
    for _ in range(2):
        model.zero_grad()
        try:
            train_once(model, swapper.saving)
            assert_same_bits({name: param.grad for name, param in model.named_parameters()}, expected)
            print("right")
        except OutOfSpaceError as error:
            print(type(error).__name__, error, *error.__notes__)
        stats = swapper.stats()
        assert stats.num_kept == stats.held_bytes == 0, stats
"""


@needs_mounts
@pytest.mark.parametrize("budget", [400 * KiB, 64 * KiB])
def test_a_full_disk_keeps_tensors_in_memory_while_the_budget_allows(tmp_path, budget):
    """612 KiB are saved, and 256 KiB fit on the disk."""
    said = printed(run_python(FULL, tmp_path, budget, mounts={tmp_path: "tmpfs,size=256k"}))
    if budget == 400 * KiB:
        assert said.split() == ["right", "right"]
    else:
        assert said.count("OutOfSpaceError") == 2
        assert re.search(r"needed [\d.]+ KiB, free .* activations.host_budget, 64 KiB, .*activations.nvme_path", said)


def test_failed_writes_are_logged_and_not_repeated_for_each_tensor(tmp_path, monkeypatch, caplog, expected):
    """While the budget holds all, one that failed is enough."""
    model = fresh()
    with ActivationSwapper(section(tmp_path, host_budget=620 * KiB), model=model) as swapper:
        full = Mock(side_effect=OutOfSpaceError(path=tmp_path, needed_bytes=1, free_bytes=0))
        monkeypatch.setattr(swapper.tier, "reserve", full)
        with caplog.at_level(logging.ERROR):
            assert_same_bits(attempt(model, swapper), expected)
    assert len([record for record in caplog.records if "swap_out" in record.message]) <= 2


def test_nothing_is_left_after_iterations_of_which_one_in_four_raises(tmp_path):
    """In a forward, or in a backward."""
    before = Resources.steady()
    model, draw = fresh(), random.Random(0)
    raised = 0

    class StopError(Exception):
        pass

    def stop(*_):
        raise StopError

    with ActivationSwapper(section(tmp_path), model=model) as swapper:
        for _ in range(60):
            hook, layer = None, model.layers[draw.randrange(len(model.layers))]
            if draw.random() < 0.25:
                where = draw.choice((layer.register_forward_hook, layer.register_full_backward_pre_hook))
                hook = where(stop)
            try:
                attempt(model, swapper)
            except StopError:
                raised += 1
            finally:
                if hook:
                    hook.remove()
        stats = swapper.stats()
        assert stats.num_kept == stats.held_bytes == 0
        assert stats.read_bytes
    assert raised > 10
    assert list(tmp_path.iterdir()) == []
    assert not Resources.settled(before).beyond(before)


def test_what_is_written_is_what_was_saved_less_the_budget(tmp_path):
    """And the budget is never exceeded by more than the tensor that is just saved."""
    model, budget = Layers(150), 1024 * KiB
    with ActivationSwapper(section(tmp_path, host_budget=budget), model=model) as swapper:
        train_once(model, swapper.saving)
        stats = swapper.stats()
    assert abs(stats.written_bytes - (stats.saved_bytes - budget)) <= 0.01 * stats.saved_bytes
    assert stats.read_bytes <= stats.written_bytes  # one that is asked for while it is copied is still there
    assert stats.num_reads_foreseen == stats.num_reads
    assert stats.peak_held_bytes <= budget + 25_600


def test_a_graph_that_outlives_the_swapper_is_an_error(tmp_path):
    model = fresh()
    with ActivationSwapper(section(tmp_path), model=model) as swapper, swapper.saving():
        loss = model(batch()).square().mean()
    with pytest.raises(RuntimeError, match="closed"):
        loss.backward()
