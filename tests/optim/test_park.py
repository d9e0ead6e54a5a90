"""A parked trainer has given its memory back, loses nothing, and wakes with the next forward."""

import random
import time
from contextlib import nullcontext

import pytest
import torch
from torch.distributed.tensor import DTensor

from nvme_offload import FaultSpec, OffloadAdamW, StateError, get_full_optimizer_state, get_full_param, initialize
from tests.optim.state.test_on_device import take_step
from tests.optim.zero.test_engine_on_device import BF16, DRIVE, FP16, KEPT, assert_same, behind, trained
from tests.optim.zero.test_engine_on_device import section as section_on_device
from tests.support.forked import lines_of
from tests.support.interrupts import OURS, PACKAGES, every, send_sigint, strided, struck
from tests.support.sharded_model import full_state
from tests.support.tiers import EVERYTHING, Model, loss_of, section
from tests.support.training import assert_same_bits, faulty_drive, noted, params_of, run_child, set_grads
from tests.support.training import section as plain_section

pytestmark = pytest.mark.usefixtures("one_thread")

PARKED = """
import re, sys
import torch
from pathlib import Path
from nvme_offload import initialize
def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
print(resident())
from tests.support.tiers import EVERYTHING, Model, loss_of, section
torch.set_num_threads(1)
config = section(sys.argv[1], **EVERYTHING)
config["zero_optimization"]["offload_optimizer"]["staging_budget"] = "128MiB"
config["activations"] = {"device": "nvme", "nvme_path": sys.argv[1], "keep": "all", "host_budget": "4KiB"}
with initialize(Model(num_layers=6, width=800), config) as engine:
    for micro in range(2):
        engine.backward(loss_of(engine, 0, micro, 0))
        engine.step()
    print(resident())
    engine.park()
    print(resident())
    engine.backward(loss_of(engine, 1, 0, 0))
"""


def test_a_parked_trainer_is_as_large_as_what_it_has_imported(tmp_path):
    imported, trained, parked = map(int, run_child(PARKED, tmp_path, fresh=True).split())
    assert trained > imported + 100
    assert parked <= imported + 64


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


def durable_on_device(*arguments, **more):
    config = behind("forward", *arguments, **more)
    config["zero_optimization"]["offload_optimizer"] = {**DRIVE, "durable": True, "rewrite_every": 3}
    return config


ON_DEVICE = {
    "state on the device": section_on_device("none", accumulation=2, device_budget="1GiB", **BF16),
    "some of it, fp32, inside the step": section_on_device("none", overlap_step="off", device_budget="40KiB"),
    "state on NVMe": section_on_device("none", "nvme", model={"num_layers": 6}, **FP16),
    "a durable run": durable_on_device("nvme", **BF16),
    "in backward": behind("backward", "nvme", model={"width": 256, "slow": True}, **BF16),
    "stage 2": section_on_device("cpu", **BF16)
    | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "everything on NVMe": section_on_device("nvme", "nvme", 2, "nvme", activations=KEPT | {"keep": "all"}, **BF16),
    "block by block": section_on_device("none", "nvme", 2, "nvme", micro_batch_order="vertical", **BF16),
}


IN_EVERY_RUN = ["state on the device", "a durable run", "in backward", "everything on NVMe"]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(1, IN_EVERY_RUN), *(pytest.param(ranks, [*ON_DEVICE], marks=pytest.mark.slow) for ranks in (1, 2))],
)
def test_an_engine_leaves_its_device_and_comes_back_with_the_same_bits(ranks, names):
    """They are those of the CPU, where nobody parks."""
    results = trained([ON_DEVICE[name] | {"scales": [1] * 3, "parks": True} for name in names], ranks=ranks)
    for name, (expected, found) in zip(names * ranks, results, strict=True):
        with noted(name):
            assert_same(expected, found)
            assert found["parked"] == [0] * 3


SHAPES = [(70_001,), (999,), (65_537,)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def made(config, device="cpu"):
    params = [torch.nn.Parameter(p.detach().to(device)) for p in params_of(SHAPES, *DTYPES)]
    return params, OffloadAdamW(params, lr=1e-2, offload=config)


def assert_as_in_memory(params, optimizer, number):
    """After so many steps."""
    others, in_memory = made(plain_section(None, sub_group_size=65536))
    with in_memory:
        for step in range(number):
            set_grads(others, step)
            in_memory.step()
        assert_same_bits([p.cpu() for p in params], others)
        for ours, theirs in zip(*(each.state_dict()["state"].values() for each in (optimizer, in_memory)), strict=True):
            assert_same_bits(list(ours.values()), list(theirs.values()))


PLACES = ["nvme", "durable", "memory", "device"]


def config_of(place, folder):
    """All of it there, or on the device as much of it as leaves some for the drive."""
    if place == "durable":
        return durable(folder)
    budget = "900KiB" if place == "device" else None
    return plain_section(folder if place != "memory" else None, sub_group_size=65536, device_budget=budget)


@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_leaves_parameters_and_gradients_of_a_plain_module_alone_on_their_device(place, late, tmp_path):
    params, optimizer = made(config_of(place, tmp_path), "late")
    with optimizer:
        for step in range(4):
            assert optimizer.weights_version  # which marks what changes
            set_grads(params, step)
            optimizer.step()
            optimizer.park()
            optimizer.park()  # which needs no room on the device
            kept = [*params, *(p.grad for p in params)]
            assert late.live_bytes + late.waiting_bytes == sum(each.nbytes for each in kept)
            assert not late.pinned
            if step % 2:
                late.requests_left = step if place == "device" else 0
                with pytest.raises(torch.OutOfMemoryError) if late.requests_left else nullcontext():
                    optimizer.wake()
                optimizer.wake()
            assert optimizer.stats().device_state_bytes > 0 or place != "device"
        assert_as_in_memory(params, optimizer, 4)
        optimizer.park()
    assert [p.isfinite().all().item() for p in params] == [True] * 3, "they outlive what is parked"


class Shards:
    """An engine, and gradients that no backward has brought: a process has the devices of its first one for good."""

    def __init__(self, config, device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(257, 257), torch.nn.Linear(257, 7)).to(device)
        model[1].bias.requires_grad_(False)
        self.engine = initialize(model, {**config, "fp32_modules": ["1"]})
        self.in_fp32 = [*self.engine.module[1].parameters()]

    def step(self, number):
        for place, param in enumerate(self.engine.module.parameters()):
            if param.requires_grad:
                values = torch.randn(param.shape, generator=torch.Generator().manual_seed(9 * number + place))
                values = (values if place > 1 else values.bfloat16()).to(param.device)
                param.grad = DTensor.from_local(values, param.device_mesh, param.placements)
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()

    def values(self):
        params, entry = [*self.engine.module.parameters()], get_full_optimizer_state
        return [*map(get_full_param, params), *(entry(param, "exp_avg") for param in params[:3])]


@strided(61)
@pytest.mark.parametrize("place", ["nvme", "device", "shards"])
def test_a_ctrl_c_anywhere_in_park_and_wake_loses_nothing(stride, place, tmp_path, request):
    if place != "nvme":
        request.getfixturevalue("late")
    if place == "shards":
        request.getfixturevalue("alone")
        config = section_on_device("none", device_budget="600KiB", **BF16)
        ours, theirs = Shards(config, "late"), Shards({**config, "device_budget": None}, "cpu")
        trainer, step = ours.engine, ours.step
    else:
        params, trainer = made(config_of(place, tmp_path), "cpu" if place == "nvme" else "late")

        def step(number):
            set_grads(params, number)
            trainer.step()

    with trainer:
        number = 0
        far, inside = (1, OURS) if place == "nvme" else (5, PACKAGES)  # not in the stand-in, which takes its time
        for interrupt in every(far * stride, send_sigint, inside):
            step(number)
            number += 1
            struck(interrupt, lambda: (trainer.park(), trainer.wake()))
            if number % 3 == 0:
                trainer.park()
        assert number > 3
        if place == "shards":
            for done in range(number):
                theirs.step(done)
            expected = theirs.values()
            assert_same_bits(ours.values(), expected)
            theirs.engine.close()
            trainer.park()
        else:
            assert_as_in_memory(params, trainer, number)
    if place == "shards":  # what is fp32 outlives its optimizer, also where that was parked
        assert_same_bits([p.to_local().cpu() for p in ours.in_fp32], expected[2:4])


@pytest.mark.parametrize("device", ["cpu", "late"])
def test_a_full_disk_stops_park_but_not_wake_and_loses_nothing(device, tmp_path, request):
    if device == "late":
        request.getfixturevalue("late")
    with faulty_drive(FaultSpec(seed=3, enospc=0.4)):
        params, optimizer = made(config_of("nvme" if device == "cpu" else "device", tmp_path), device)
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


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_a_trainer_that_is_killed_while_it_parks_or_wakes_goes_on_from_its_run(kills, tmp_path):
    chance, steps_said = random.Random(0), -1
    for _ in range(kills):
        with lines_of(PARKS, tmp_path) as (trainer, lines):
            steps_said = max(steps_said, int([lines.readline() for _ in range(chance.randrange(1, 6))][-1]))
            time.sleep(chance.random() * 0.02)
            trainer.kill()
            steps_said = max(steps_said, *(int(line) for line in lines if line.endswith("\n")), -1)
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
