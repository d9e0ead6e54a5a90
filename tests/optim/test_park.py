"""A parked trainer has given its memory back, loses nothing, and wakes with the next forward."""

import random
import subprocess
import sys
import time

import pytest
import torch

from nvme_offload import FaultSpec, OffloadAdamW, StateError, initialize
from tests.optim.state.test_on_device import take_step
from tests.support.forked import ROOT
from tests.support.interrupts import every, send_sigint, strided, struck
from tests.support.sharded_model import full_state
from tests.support.tiers import EVERYTHING, Model, loss_of, section
from tests.support.training import assert_same_bits, faulty_drive, params_of, run_child, set_grads
from tests.support.training import section as plain_section

pytestmark = pytest.mark.usefixtures("one_thread")

RESIDENT = """
import re, sys
import torch
from pathlib import Path
from nvme_offload import initialize
def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
print(resident())
"""
PARKED = """
from tests.support.tiers import EVERYTHING, Model, loss_of, section
torch.set_num_threads(1)
config = section(sys.argv[1], **EVERYTHING)
config["zero_optimization"]["offload_optimizer"]["staging_budget"] = "128MiB"
config["activations"] = {"device": "nvme", "nvme_path": sys.argv[1], "keep": "all", "host_budget": "4KiB"}
with initialize(Model(num_layers=6, width=1200), config) as engine:
    for step in range(2):
        for micro in range(2):
            engine.backward(loss_of(engine, step, micro, 0))
            engine.step()
    print(resident())
    engine.park()
    print(resident())
    engine.backward(loss_of(engine, 2, 0, 0))
"""


def test_a_parked_trainer_is_as_large_as_what_it_has_imported(tmp_path):
    [imported] = run_child(RESIDENT, tmp_path, fresh=True).split()
    _, trained, parked = map(int, run_child(RESIDENT + PARKED, tmp_path, fresh=True).split())
    assert trained > int(imported) + 100
    assert parked <= int(imported) + 64


def steps(engine, first, last, parks):
    for step in range(first, last):
        for micro in range(2):
            engine.backward(loss_of(engine, step, micro, 0))
            engine.step()
        for _ in range(2 * parks):
            engine.park()
        if parks and step % 2:
            engine.wake()
    return full_state(engine.module, engine.optimizer)


@pytest.mark.parametrize("place", ["nvme", "cpu", "durable"])
def test_bits_are_those_of_a_trainer_that_never_rested(place, tmp_path, alone):
    def begun(folder):
        (tmp_path / folder).mkdir()
        config = section(tmp_path / folder, **({} if place == "cpu" else EVERYTHING))
        if place == "durable":
            config["zero_optimization"]["offload_optimizer"] |= {"durable": "run", "rewrite_every": 3}
            config["zero_optimization"]["offload_optimizer"]["staging_budget"] = "8MiB"
            config["host_budget"] = "1MiB"
        torch.manual_seed(0)
        return initialize(Model(), config)

    with begun("a") as engine:
        expected = steps(engine, 0, 5, parks=False)
    with begun("b") as engine:
        steps(engine, 0, 2, parks=True)
        engine.backward(loss_of(engine, 2, 0, 0))
        engine.step()
        with pytest.raises(StateError, match=r"engine.park: expected a call between two steps"):
            engine.park()
        engine.backward(loss_of(engine, 2, 1, 0))
        engine.step()
        found = steps(engine, 3, 5, parks=True)
    assert_same_bits(list(found.values()), list(expected.values()))


SHAPES = [(70_001,), (999,), (65_537,)]


def made(config):
    params = params_of(SHAPES, torch.bfloat16)
    return params, OffloadAdamW(params, lr=1e-2, offload=config)


def assert_as_in_memory(params, optimizer, number):
    """After so many steps."""
    others, in_memory = made(plain_section(None, sub_group_size=65536))
    with in_memory:
        for step in range(number):
            set_grads(others, step)
            in_memory.step()
        assert_same_bits(params, others)
        for ours, theirs in zip(*(each.state_dict()["state"].values() for each in (optimizer, in_memory)), strict=True):
            assert_same_bits(list(ours.values()), list(theirs.values()))


@strided(61)
def test_a_ctrl_c_anywhere_in_park_and_wake_loses_nothing(stride, tmp_path):
    params, optimizer = made(plain_section(tmp_path, sub_group_size=65536))
    with optimizer:
        number = 0
        for interrupt in every(stride, send_sigint):
            set_grads(params, number)
            optimizer.step()
            number += 1
            struck(interrupt, lambda: (optimizer.park(), optimizer.wake()))
            if number % 3 == 0:
                optimizer.park()
        assert number > 3
        assert_as_in_memory(params, optimizer, number)


def test_a_full_disk_stops_park_but_not_wake_and_loses_nothing(tmp_path):
    with faulty_drive(FaultSpec(seed=3, enospc=0.4)):
        params, optimizer = made(plain_section(tmp_path, sub_group_size=65536))
    with optimizer:
        refused = 0
        for step in range(8):
            set_grads(params, step)
            take_step(optimizer)
            for attempt in range(20):
                try:
                    optimizer.park()
                    break
                except OSError:
                    refused += 1
                finally:
                    if attempt % 2 == step % 2:
                        optimizer.wake()  # what is in memory alone stays there
        assert refused > 0
        assert_as_in_memory(params, optimizer, 8)


def durable(folder):
    config = plain_section(folder, sub_group_size=65536)
    config["zero_optimization"]["offload_optimizer"] |= {"durable": "run", "rewrite_every": 3}
    return config


PARKS = """
import sys
from pathlib import Path
from tests.optim.test_park import durable, made, set_grads
params, optimizer = made(durable(Path(sys.argv[1])))
with optimizer:
    found = optimizer.resume()
    for step in range(found[0] if found else 0, 10_000):
        set_grads(params, step)
        optimizer.step()
        optimizer.park()
        print(step, flush=True)
        if step % 2:
            optimizer.wake()
"""


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_a_trainer_that_is_killed_while_it_parks_or_wakes_goes_on_from_its_run(kills, tmp_path):
    chance, steps_said = random.Random(0), -1
    for _ in range(kills):
        with subprocess.Popen([sys.executable, "-c", PARKS, tmp_path], stdout=subprocess.PIPE, cwd=ROOT) as trainer:
            steps_said = max(steps_said, int([trainer.stdout.readline() for _ in range(chance.randrange(1, 6))][-1]))
            time.sleep(chance.random() * 0.02)
            trainer.kill()
            steps_said = max(steps_said, *(int(line) for line in trainer.stdout if line.endswith(b"\n")), -1)
        params, optimizer = made(durable(tmp_path))
        with optimizer:
            step, _ = optimizer.resume()
            assert steps_said + 1 <= step <= steps_said + 2, "what was parked is on the drive"
            assert_as_in_memory(params, optimizer, step)


def test_a_durable_run_parks_and_wakes_without_a_byte_of_the_drive(tmp_path):
    params, optimizer = made(durable(tmp_path))
    with optimizer:
        for step in range(4):
            set_grads(params, step)
            optimizer.step()
            optimizer.synchronize()
            before = optimizer.stats()
            optimizer.park()
            optimizer.wake()
            after = optimizer.stats()
            assert (after.bytes_written, after.bytes_read) == (before.bytes_written, before.bytes_read)
        assert before.bytes_written > 0
        assert_as_in_memory(params, optimizer, 4)
