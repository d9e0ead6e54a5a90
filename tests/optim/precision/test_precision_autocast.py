"""`torch_autocast` beside plain PyTorch autocast without sharding, and autocast contexts in and around the engine."""

import pytest
import torch
from torch import nn

from nvme_offload import ConfigError, initialize
from tests.support.precision import DTYPES
from tests.support.ranks import run_ranks

STEPS, ACCUMULATION, VOCABULARY = 3, 2, 31
HYPERPARAMETERS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


class Router(nn.Module):
    """Of a class of its own, so that it is not in the list of safe modules."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, width))

    def forward(self, x):
        return nn.functional.linear(x, self.weight).softmax(-1)


class Block(nn.Module):
    def __init__(self, width, switches_off):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = Router(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.gate = nn.Linear(width, width)
        self.switches_off = switches_off

    def forward(self, x):
        hidden = self.norm(x)
        weights = self.router(hidden)
        mixed = sum(weights[..., i, None] * expert(hidden) for i, expert in enumerate(self.experts))
        if not self.switches_off:
            return x + mixed * self.gate(hidden).tanh()
        with torch.autocast("cpu", enabled=False):
            return x + mixed.float() * self.gate(hidden.float()).tanh()


class Model(nn.Module):
    def __init__(self, switches_off=False, width=13):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, switches_off) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def fresh_model(switches_off):
    torch.manual_seed(0)
    model = Model(switches_off)
    for block in model.blocks:
        nn.init.normal_(block.router.weight)
    return model


def loss_of(model, rank, step, micro):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(0, VOCABULARY, (3, 7), generator=generator)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), (tokens * 7 + 3).flatten() % VOCABULARY)


def section(dtype, stage, **more):
    return {
        "zero_optimization": {"stage": stage},
        "torch_autocast": {"enabled": True, "dtype": dtype},
        "fp16": {"loss_scale": 256.0},
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": HYPERPARAMETERS},
        **more,
    }


def train(rank, config, switches_off):
    losses, norms = [], []
    with initialize(fresh_model(switches_off), config) as engine:
        for step in range(STEPS):
            for micro in range(ACCUMULATION):
                loss = loss_of(engine, rank, step, micro)
                engine.backward(loss)
                losses.append(loss.item())
                engine.step()
            norms.append(engine.get_global_grad_norm())
        params = {name: param.full_tensor().clone() for name, param in engine.module.named_parameters()}
    return losses, norms, params


CASES = [("bf16", False), ("bf16", True), ("fp16", False)]


def train_all(rank, world_size):
    return {(*case, stage): train(rank, section(case[0], stage), case[1]) for case in CASES for stage in (1, 2, 3)}


def train_plainly(dtype, switches_off, world_size):
    """PyTorch as its documentation has it: fp32 model, autocast around forward, all ranks' batches in one process."""
    model = fresh_model(switches_off)
    optimizer = torch.optim.AdamW(model.parameters(), **HYPERPARAMETERS)
    losses, norms = [[] for _ in range(world_size)], []
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            for rank in range(world_size):
                with torch.autocast("cpu", DTYPES[dtype]):
                    loss = loss_of(model, rank, step, micro)
                (loss * (256 / ACCUMULATION / world_size)).backward()
                losses[rank].append(loss.item())
        for param in model.parameters():
            param.grad /= 256
        norms.append(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.fixture(scope="module")
def of_ranks():
    return run_ranks(train_all, 2)


@pytest.mark.parametrize(("dtype", "switches_off"), CASES)
def test_all_stages_agree_with_plain_autocast(of_ranks, dtype, switches_off):
    losses, norms = train_plainly(dtype, switches_off, world_size=2)
    for rank, results in enumerate(of_ranks):
        for stage in (1, 2, 3):
            ours = results[dtype, switches_off, stage]
            assert ours[0] == pytest.approx(losses[rank], rel=1e-3)
            assert ours[1] == pytest.approx(norms, rel=1e-3)
        second, third = (results[dtype, switches_off, stage] for stage in (2, 3))
        assert second[:2] == third[:2]
        assert all(torch.equal(value, third[2][name]) for name, value in second[2].items())


@pytest.mark.parametrize(("dtype", "switches_off"), CASES)
def test_one_rank_is_plain_autocast(alone, dtype, switches_off):
    losses, norms = train_plainly(dtype, switches_off, world_size=1)
    ours = train(0, section(dtype, 3), switches_off)
    assert ours[0] == pytest.approx(losses[0], rel=1e-6)
    assert ours[1] == pytest.approx(norms, rel=1e-6)


def test_parameters_are_fp32_once_and_their_own_masters(alone):
    with initialize(fresh_model(False), section("bf16", 2)) as engine:
        rows = engine.precision_plan.to_dict()["parameters"]
        assert {(row["storage"], row["master"], row["accumulate"]) for row in rows} == {("fp32", "itself", "fp32")}
        gathers = {row["names"]: row["gather"] for row in rows}
        assert gathers["blocks.*.gate.weight"] == gathers["head.bias"] == "bf16"
        assert gathers["blocks.*.norm.weight"] == gathers["blocks.*.router.weight"] == "fp32"
        assert engine.loss_scale == 1
        assert {param.dtype for param in engine.module.parameters()} == {torch.float32}
    with initialize(fresh_model(False), section("fp16", 2)) as engine:
        assert engine.precision_plan.loss_scaling
        assert engine.loss_scale == 256


def test_other_classes_can_be_listed_and_must_exist(alone):
    def config(*names):
        listed = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": list(names)}
        return section("bf16", 2, torch_autocast=listed)

    with initialize(fresh_model(False), config(f"{__name__}.Router")) as engine:
        gathers = {row["names"]: row["gather"] for row in engine.precision_plan.to_dict()["parameters"]}
        assert [name for name, gather in gathers.items() if gather == "bf16"] == ["blocks.*.router.weight"]
    with pytest.raises(ConfigError, match=r'safe_modules: "torch.nn.Linnear" cannot be imported'):
        initialize(fresh_model(False), config("torch.nn.Linnear"))
    with pytest.raises(ConfigError, match=r'safe_modules: "math.pi" is no class'):
        initialize(fresh_model(False), config("math.pi"))
    with pytest.warns(RuntimeWarning, match="names no class of this model"):
        initialize(fresh_model(False), config("torch.nn.Conv2d")).close()


@pytest.mark.parametrize("mode", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}], ids=str)
def test_autocast_around_an_engine_without_it_is_an_error(alone, mode):
    with initialize(fresh_model(False), {"zero_optimization": {"stage": 2}, **mode}) as engine:
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(RuntimeError, match=r'torch_autocast\.enabled = false.*"enabled": true, "dtype": "bf16"'),
        ):
            loss_of(engine, 0, 0, 0)
        loss = loss_of(engine, 0, 0, 0)
        with torch.autocast("cpu", torch.bfloat16):
            engine.backward(loss)
            engine.step()


def test_autocast_around_an_engine_with_it_is_a_warning_and_changes_nothing(alone):
    plain = train(0, section("bf16", 3), False)
    with torch.autocast("cpu", torch.float16), pytest.warns(RuntimeWarning, match="fp16.*bf16 holds"):
        around = train(0, section("bf16", 3), False)
    assert plain[:2] == around[:2]
    assert all(torch.equal(value, around[2][name]) for name, value in plain[2].items())
