"""All ranks choose alike what leaves memory, from what there is, and one tells; the bits do not depend on it."""

import io
import json
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn

from nvme_offload import ConfigError, OffloadAdamW, OffloadConfig, TensorSwapper, initialize
from tests.support.ranks import on_ranks
from tests.support.sharded_model import assert_same, full_state

MiB, GiB = 2**20, 2**30
WIDTH, LAYERS = 1024, 8  # in bf16 16 MiB of parameters, of gradients, and 80 MiB of state


def auto(path, **state):
    drive = {"device": "nvme", "nvme_path": str(path), **state}
    zero = {"stage": 3, "sub_group_size": 2**20, "offload_optimizer": {**drive, "staging_budget": "48MiB"}}
    return {"offload": "auto", "zero_optimization": zero, "bf16": {"enabled": True}}


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).bfloat16()


def leave(monkeypatch, size_bytes):
    monkeypatch.setattr("nvme_offload.offload.host.available_memory.available_bytes", lambda: 2 * GiB + size_bytes)


def train(engine, steps=1):
    for step in range(steps):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    return full_state(engine.module, engine.optimizer)


def places(config):
    """Return where the section has parameters and gradients, and whether it has a budget."""
    found = config.zero_optimization.offload_param.device, config.offload_gradients.device
    return *found, config.host_budget is not None


STATE, GRADS, ALL = ("none", "none", True), ("none", "nvme", True), ("nvme", "nvme", False)
SIZES = {
    "all in memory": (512 * MiB, STATE, {"host"}, "everything fits into memory"),
    "part of the state": (120 * MiB, STATE, {"host", "nvme"}, "the optimizer state does not fit"),
    "gradients, too": (72 * MiB, GRADS, {"host", "nvme"}, "gradients do not fit into memory beside parameters"),
    "nothing is left": (MiB, ALL, {"nvme"}, "memory is scarce"),
}


@pytest.fixture(scope="module")
def expected():
    with initialize(model(), {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}) as engine:
        return train(engine)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", SIZES)
def test_what_memory_has_decides_and_the_bits_do_not_depend_on_it(name, expected, tmp_path, monkeypatch, capsys):
    left, chosen, tiers, why = SIZES[name]
    leave(monkeypatch, left)
    with initialize(model(), auto(tmp_path)) as engine:
        told = capsys.readouterr().err.splitlines()
        assert [why in line for line in told] == [True], told
        assert places(engine.config) == chosen
        assert {
            tier for tier in ("host", "nvme") if engine.optimizer.tier_plan.units_on(tier, "optimizer state")
        } == tiers
        written = json.loads(engine.config.model_dump_json(exclude_unset=True))
        assert OffloadConfig.from_dict(written) == engine.config, "what was chosen cannot be written as a section"
        assert_same(train(engine), expected)


@on_ranks(2)
def test_ranks_with_different_memory_choose_alike_and_one_tells(rank, world_size, tmp_path):
    leave(pytest.MonkeyPatch(), GiB if rank else world_size * MiB)
    told = io.StringIO()
    with redirect_stderr(told), initialize(model(), auto(tmp_path)) as engine:
        train(engine)
        assert places(engine.config) == ALL
    assert told.getvalue().count("memory is scarce") == (rank == 0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("first", "chosen"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in ((GiB, STATE), (72 * MiB, GRADS))), (MiB, ALL)],
)
def test_a_durable_run_goes_on_with_what_it_began_with(first, chosen, tmp_path, monkeypatch):
    leave(monkeypatch, first)
    section = auto(tmp_path, durable=True)
    with initialize(model(), section) as engine:
        assert engine.config.zero_optimization.offload_optimizer.rewrite_every == "auto"
        train(engine)
    leave(monkeypatch, 120 * MiB if first == GiB else GiB)
    with initialize(model(), section) as engine:
        assert places(engine.config) == chosen
        assert engine.resume() == (1, {})
        resumed = train(engine)
    with initialize(model(), {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}) as engine:
        train(engine)
        assert_same(resumed, train(engine))


def test_an_optimizer_alone_keeps_of_its_state_what_memory_holds(tmp_path, monkeypatch, capsys):
    leave(monkeypatch, 100 * MiB)
    section = {key: value for key, value in auto(tmp_path).items() if key != "bf16"}
    with OffloadAdamW(model().parameters(), offload=section) as optimizer:
        plan, told = optimizer.tier_plan, capsys.readouterr().err
        assert plan.units_on("host", "optimizer state")
        assert plan.units_on("nvme", "optimizer state")
        assert told.count("\n") == 1
        assert "the optimizer state does not fit into memory" in told


def test_a_swapper_has_nothing_to_choose(tmp_path, capsys):
    with TensorSwapper(auto(tmp_path)):
        assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("zero", "more", "told"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, {}, 'offload = "auto": chooses what goes to NVMe; write'),
        ({"offload_param": {"device": "cpu"}}, {}, 'offload_param.device = "cpu": offload = "auto" chooses it'),
        ({}, {"offload_gradients": {"device": "cpu"}}, 'offload_gradients.device = "cpu": offload = "auto" chooses it'),
        ({}, {"offload": "fast"}, 'offload = "fast"'),
    ],
)
def test_what_leaves_nothing_to_choose_is_refused(zero, more, told, tmp_path):
    section = {**auto(tmp_path), **more}
    section["zero_optimization"] |= zero
    with pytest.raises(ConfigError, match=told):
        OffloadConfig.of(section)
