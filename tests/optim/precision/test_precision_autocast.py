"""`torch_autocast` beside plain PyTorch autocast without sharding, and autocast contexts in and around the engine."""

import warnings

import pytest
import torch
from torch import nn

from nvme_offload import ConfigError, initialize
from tests.support import build
from tests.support.precision import DTYPES
from tests.support.ranks import run_ranks

STEPS, ACCUMULATION, VOCABULARY = 2, 2, 31
HYPERPARAMETERS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def loss_of(model, rank, step, micro):
    return build.token_loss(model, 1000 * step + 10 * micro + rank, VOCABULARY)


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
    with initialize(kinds(switches_off), config) as engine:
        losses, norms = build.train(engine, range(STEPS), lambda *given: loss_of(given[0], rank, *given[1:]))
        params = {name: param.full_tensor().clone() for name, param in engine.module.named_parameters()}
    return losses, norms, params


CASES = [("bf16", False), ("bf16", True), ("fp16", False)]


def train_plainly(dtype, switches_off, world_size):
    """PyTorch as its documentation has it: fp32 model, autocast around forward, all ranks' batches in one process."""
    model = kinds(switches_off)
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


def test_other_classes_can_be_listed_and_must_exist(alone):
    def config(*names):
        listed = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": list(names)}
        return section("bf16", 2, torch_autocast=listed)

    with initialize(kinds(False), config(f"{__name__}.Columns")) as engine:
        gathers = {row["names"]: row["gather"] for row in engine.precision_plan.to_dict()["parameters"]}
        assert {name for name, gather in gathers.items() if gather == "bf16"} == {
            "columns.weight",
            "columns.bias",
            "columns.factor",
        }
    with pytest.raises(ConfigError, match=r'safe_modules: "torch.nn.Linnear" cannot be imported'):
        initialize(kinds(False), config("torch.nn.Linnear"))
    with pytest.raises(ConfigError, match=r'safe_modules: "math.pi" is no class'):
        initialize(kinds(False), config("math.pi"))
    with pytest.warns(RuntimeWarning, match="names no class of this model"):
        initialize(kinds(False), config("torch.nn.Conv2d")).close()


@pytest.mark.parametrize("mode", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}], ids=str)
def test_autocast_around_an_engine_without_it_is_an_error(alone, mode):
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    with initialize(model, {"zero_optimization": {"stage": 2}, **mode}) as engine:
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


class Columns(nn.Module):
    """As GPT-2 has its linear layers, with a factor that stays fp32."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width, 2 * width)), nn.Parameter(torch.zeros(2 * width))
        self.factor = nn.Parameter(torch.ones(width))
        nn.init.normal_(self.weight, std=0.1)

    def forward(self, x):
        out = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
        return out[..., : x.shape[-1]] * self.factor


class MyLinear(nn.Linear):
    pass


class Mixture(nn.Module):
    """Takes what it is called with in a way that nobody guesses."""

    def __init__(self, width):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, width, width) * 0.1)

    def forward(self, x, *, weights):
        return (torch.stack([x @ expert for expert in self.experts]) * weights[:, None, None, None]).sum(0)


class Kinds(nn.Module):
    """One of each kind of module that autocast computes in 16 bits although it is no plain Linear or Conv."""

    def __init__(self, switches_off=False, width=16):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.columns, self.linear = Columns(width), MyLinear(width, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.spread, self.recurrent = nn.ConvTranspose1d(7, 7, 1), nn.GRU(width, width, batch_first=True)
        self.bilinear, self.head = nn.Bilinear(width, width, width), nn.Linear(width, VOCABULARY)
        self.switches_off = switches_off

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.linear(self.columns(x)).float()
        with torch.autocast("cpu", torch.get_autocast_dtype("cpu"), enabled=not self.switches_off):
            x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.spread(x) + self.recurrent(x)[0]
        return self.head(x + self.bilinear(x, x))


def kinds(switches_off):
    torch.manual_seed(0)
    return Kinds(switches_off)


def train_all(rank, world_size, cases, stages):
    return {(*case, stage): train(rank, section(case[0], stage), case[1]) for case in cases for stage in stages}


@pytest.mark.parametrize(
    ("ranks", "cases", "stages"), [(1, CASES, (2, 3)), pytest.param(2, CASES[1:], (1, 3), marks=pytest.mark.slow)]
)
def test_whatever_autocast_computes_in_16_bits_is_as_exact_as_plain_linears(ranks, cases, stages):
    of_ranks = run_ranks(train_all, ranks, cases, stages)
    for dtype, switches_off in cases:
        losses, norms = train_plainly(dtype, switches_off, ranks)
        for rank, results in enumerate(of_ranks):
            for stage in stages:
                ours = results[dtype, switches_off, stage]
                assert ours[0] == pytest.approx(losses[rank], rel=1e-3 if ranks > 1 else 1e-6)
                assert ours[1] == pytest.approx(norms, rel=1e-3 if ranks > 1 else 1e-6)
            if 2 in stages:
                second, third = (results[dtype, switches_off, stage] for stage in (2, 3))
                assert second[:2] == third[:2]
                assert all(torch.equal(value, third[2][name]) for name, value in second[2].items())


def test_what_is_gathered_in_16_bits_is_found_by_watching_a_forward(alone):
    with initialize(kinds(False), section("bf16", 2)) as engine:
        low = {name for name, each in engine.precision_plan.parameters.items() if each.gather is torch.bfloat16}
        reduced = {name: each.reduce for name, each in engine.precision_plan.parameters.items()}
    every = {name for name, _ in Kinds().named_parameters()}
    assert every - low == {"embedding.weight", "columns.factor", "bilinear.weight", "bilinear.bias"}
    # Autograd's gradients of one module are reduced together.
    assert {name for name in low if reduced[name] is torch.float32} == {"columns.weight", "columns.bias"}


class Noting(MyLinear):
    def forward(self, x):
        self.calls.append(x)
        self.latest = x
        return super().forward(x)


def test_a_module_is_left_as_it_was_by_being_watched(alone):
    module, tied = Noting(4, 4), MyLinear(4, 4, bias=False)
    module.calls = []
    model = nn.Sequential(nn.Embedding(4, 4), module, tied)
    tied.weight = model[0].weight
    module.register_forward_hook(lambda *unused: pytest.fail("a hook of the user's was called"))
    state = torch.get_rng_state()
    with initialize(model, section("bf16", 2)) as engine:
        gathers = {name: engine.precision_plan[name].gather for name in ("0.weight", "1.weight", "1.bias")}
    assert gathers == {"0.weight": torch.float32, "1.weight": torch.bfloat16, "1.bias": torch.bfloat16}
    assert (module.calls, hasattr(module, "latest")) == ([], False)
    assert torch.equal(state, torch.get_rng_state())


def test_a_module_that_could_not_be_watched_is_named_once(alone):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Mixture(8), Mixture(8)

        def forward(self, x):
            weights = torch.ones(2, dtype=torch.bfloat16)
            return self.second(self.first(x, weights=weights), weights=weights)

    with initialize(Two(), section("bf16", 2)) as engine:
        assert engine.precision_plan["first.experts"].gather is torch.float32
        with pytest.warns(RuntimeWarning, match=r"first gives bfloat16, and its 128 .*\.Mixture\"") as said:
            [engine(torch.randn(2, 3, 8)) for _ in range(2)]
    assert len([each for each in said if "torch_autocast" in str(each.message)]) == 1
    named = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": [f"{__name__}.Mixture"]}
    with warnings.catch_warnings(action="error"), initialize(Two(), section("bf16", 2, torch_autocast=named)) as engine:
        assert engine.precision_plan["first.experts"].gather is torch.bfloat16
        engine(torch.randn(2, 3, 8))
