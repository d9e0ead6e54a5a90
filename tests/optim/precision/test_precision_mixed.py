"""fp32 routers, heads and norms in a bf16 or fp16 GPT: sharding, gradients, norm, optimizer, tiers, resume."""

import copy
import json
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from nvme_offload import ConfigError, OffloadConfig, initialize
from nvme_offload.optim.precision.plan import PrecisionPlan
from tests.support import build
from tests.support.precision import rounded
from tests.support.ranks import run_ranks
from tests.support.sharded_model import assert_same, assert_same_run, full_state

VOCABULARY, WIDTH, STEPS, ACCUMULATION = 31, 16, 2, 2
HYPERPARAMETERS = {"lr": 1e-3, "weight_decay": 0.1}
MODES = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KEPT = {"fp32_modules": ["LayerNorm", "blocks.*.router", "*.decay", "head"]}


class Block(nn.Module):
    """Attention and two experts behind a router; and of two parameters of its own one is fp32, cast by hand."""

    def __init__(self, casts):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.decay, self.mix = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.casts = casts

    def call(self, fp32_module, x):
        """As the user of a mixed model writes it, or as it is written for a model of one dtype."""
        return fp32_module(x.float()).to(x.dtype) if self.casts else fp32_module(x)

    def forward(self, x):
        q, k, v = self.qkv(self.call(self.norm1, x)).unflatten(-1, (3, 2, WIDTH // 2)).movedim(-3, 0).transpose(-2, -3)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        hidden = self.call(self.norm2, x)
        hidden = (hidden.float() * self.decay.sigmoid()).to(hidden.dtype) * self.mix
        weights = self.call(self.router, hidden).softmax(-1)
        return x + sum(
            weights[..., i, None] * nn.functional.gelu(expert(hidden)) for i, expert in enumerate(self.experts)
        )


class GPT(nn.Module):
    def __init__(self, casts=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(casts) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("positions", torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.casts = casts

    def forward(self, tokens):
        self.seen += 1
        hidden = self.embedding(tokens)
        hidden = hidden + self.positions[: tokens.shape[-1]].to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden)
        if self.casts:
            return self.head(self.norm(hidden.float()).to(hidden.dtype).float())
        return self.head(self.norm(hidden))


def fresh_model(casts=False):
    torch.manual_seed(0)
    return GPT(casts)


def loss_of(model, rank, step, micro):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(0, VOCABULARY, (3, 7), generator=generator)
    logits = model(tokens)
    assert logits.dtype is torch.float32, "the head is fp32, and nothing 16-bit comes after it"
    return nn.functional.cross_entropy(logits.flatten(0, 1), (tokens * 7 + 3).flatten() % VOCABULARY)


def section(mode, stage=3, path=None, **more):
    more = {**MODES[mode], **more}
    return build.section(path, stage=stage, accumulation=ACCUMULATION, clip=0.5, adamw=HYPERPARAMETERS, **more)


def run_steps(engine, rank, steps):
    return build.train(engine, steps, lambda engine, step, micro: loss_of(engine, rank, step, micro))


def train(rank, model, config, **options):
    """Losses, norms, the whole state."""
    with initialize(model, config, **options) as engine:
        return *run_steps(engine, rank, range(STEPS)), full_state(engine.module, engine.optimizer)


def resume_from_checkpoint(rank, mode, path, folder):
    """Half of the steps with the state on NVMe, the others in memory; what comes between is on the drive."""
    with initialize(fresh_model(), section(mode, path=path, **KEPT)) as engine:
        run_steps(engine, rank, range(STEPS // 2))
        engine.save_checkpoint(folder)
        saved = full_state(engine.module, engine.optimizer)
    with initialize(fresh_model(), section(mode, **KEPT)) as engine:
        run_steps(engine, rank, range(7, 8))  # so that there is something to overwrite
        engine.load_checkpoint(folder)
        assert_same(full_state(engine.module, engine.optimizer), saved)
        losses, norms = run_steps(engine, rank, range(STEPS // 2, STEPS))
        assert int(engine.module.seen) == STEPS * ACCUMULATION, "buffers are saved"
        engine.export_safetensors(folder / "fp32")
        engine.save_16bit_model(folder / "16 bits")
        engine.export_safetensors(folder / "own", "own")
        return losses, norms, full_state(engine.module, engine.optimizer)


def train_on_tiers(rank, path, model, keys, **options):
    """Everything on NVMe."""
    there = {"device": "nvme", "nvme_path": str(path)}
    config = section("bf16", path=path, **keys, offload_gradients=there)
    config["zero_optimization"]["offload_param"] = there
    return train(rank, model, config, **options)


def typed_model(mode):
    """The user's own dtypes, and casts, in place of `fp32_modules`."""
    model = fresh_model(casts=True)
    for part in (model.embedding, *(part for block in model.blocks for part in (block.qkv, block.out, block.experts))):
        part.to(DTYPES[mode])
    for block in model.blocks:
        block.mix.data = block.mix.data.to(DTYPES[mode])
    return model


def fp32_model_of(typed):
    """The same fp32 values without the dtypes."""
    model = fresh_model()
    model.load_state_dict(typed.state_dict())
    return model


def train_all(rank, world_size, path):
    results = {}
    for mode in MODES:
        kept = section(mode, **KEPT)
        results[mode, "memory"] = train(rank, fresh_model(), kept)
        results[mode, "by hand"] = train(rank, fresh_model(casts=True), kept)
        results[mode, "checkpoint"] = resume_from_checkpoint(rank, mode, path / "drive", path / mode)
    if rank == 0:
        save_file(fresh_model().state_dict(), path / "weights.safetensors")
    dist.barrier()
    with torch.device("meta"):
        unborn = GPT()
    weights = path / "weights.safetensors"
    results["born on tiers"] = train_on_tiers(rank, path / "drive", unborn, KEPT, weights=weights)
    results["typed on tiers"] = train_on_tiers(rank, path / "drive", typed_model("bf16"), {})
    results["stage 2"] = train(rank, fresh_model(), section("bf16", stage=2, **KEPT))
    results["typed"] = train(rank, typed_model("bf16"), section("bf16"))
    results["typed as names"] = train(rank, fp32_model_of(typed_model("bf16")), section("bf16", **KEPT))
    return results


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_gpt_with_fp32_router_head_and_norms(world_size, tmp_path):
    start = fresh_model().state_dict()
    (tmp_path / "drive").mkdir()
    for results in run_ranks(train_all, world_size, tmp_path):
        for mode in MODES:
            memory = results[mode, "memory"]
            assert all(0 < norm < 100 for norm in memory[1])
            assert not any(torch.equal(memory[2][name], value) for name, value in start.items() if name in memory[2])
            assert_same_run(results[mode, "by hand"], memory)
            losses, norms, state = memory
            assert_same_run(
                results[mode, "checkpoint"], (losses[STEPS // 2 * ACCUMULATION :], norms[STEPS // 2 :], state)
            )
            check_exports(tmp_path / mode, state, DTYPES[mode])
        for key in ("stage 2", "born on tiers"):
            assert_same_run(results[key], results["bf16", "memory"])
        for key in ("typed", "typed on tiers"):
            assert_same_run(results[key], results["typed as names"])
    assert not list((tmp_path / "drive").iterdir())


def check_exports(folder, state, dtype):
    """All weights in fp32 are the masters; in 16 bits, and in their own dtypes, they are those of the forward."""
    exact, narrow, own = (load_file(folder / name / "model.safetensors") for name in ("fp32", "16 bits", "own"))
    model = fresh_model()
    assert exact.keys() == narrow.keys() == own.keys() == model.state_dict().keys()
    kinds = set()
    for name, _ in model.named_parameters():
        assert torch.equal(exact[name], state[name])
        kinds.add(kind := own[name].dtype)
        assert kind in (dtype, torch.float32)
        expected = rounded(state[name], dtype).to(dtype) if kind is dtype else state[name]
        assert torch.equal(own[name], expected), name
        assert narrow[name].dtype is kind
        assert torch.equal(narrow[name], own[name])
    assert kinds == {dtype, torch.float32}


def test_the_plan_prints_and_exports(alone, tmp_path):
    more = {"gradient_accumulation_dtype": "fp32", **KEPT}
    with initialize(fresh_model(), section("bf16", path=tmp_path, **more)) as engine:
        plan = engine.precision_plan
    rows = {row["names"]: row for row in json.loads(plan.to_json())["parameters"]}
    assert rows["blocks.*.experts.*.weight"] == {
        "names": "blocks.*.experts.*.weight",
        "tensors": 4,
        "parameters": 4 * WIDTH * WIDTH,
        "trainable": True,
        "storage": "bf16",
        "compute": "bf16",
        "gather": "bf16",
        "reduce": "bf16",
        "accumulate": "fp32",
        "master": "split",
        "states": "fp32",
        "bytes_per_parameter": {"memory": 2 + 4, "nvme": 2 + 8},
    }
    router = rows["blocks.*.router.weight"]
    assert router["bytes_per_parameter"] == {"memory": 4 + 4, "nvme": 8}
    assert {router[key] for key in ("storage", "compute", "gather", "reduce", "accumulate")} == {"fp32"}
    assert router["master"] == "itself"
    text = str(plan)
    assert text.startswith("precision bf16, no loss scaling\n")
    line = next(line for line in text.splitlines() if line.startswith("blocks.*.router.weight"))
    assert line.split() == ["blocks.*.router.weight", "2", "64", *["fp32"] * 5, "itself", "fp32", "8", "8"]
    assert any(line.split() == ["positions", "float32"] for line in text.splitlines())


def test_bytes_are_counted_on_the_tier_where_they_are():
    nvme = {"device": "nvme", "nvme_path": "/somewhere"}
    zero = {"offload_optimizer": nvme, "offload_param": nvme}
    model = fresh_model()
    model.blocks[1].qkv.requires_grad_(False)
    keys = {**BF16, **KEPT, "zero_optimization": zero, "offload_gradients": nvme}
    rows = {row["names"]: row["bytes_per_parameter"] for row in plan_of(model, **keys).to_dict()["parameters"]}
    assert rows["blocks.*.out.weight"] == {"memory": 0, "nvme": 2 + 2 + 10}
    assert rows["blocks.*.router.weight"] == {"memory": 0, "nvme": 4 + 4 + 8}
    frozen = [row.bytes for row in plan_of(model, **keys).rows if not row.trainable]
    assert frozen == [{"memory": 2, "nvme": 2}] * 2
    with torch.device("meta"):
        born = GPT()
    assert plan_of(born, **BF16).rows[0].bytes == {"memory": 14}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.uint8, "uint8"),
        (torch.bfloat16, "bf16"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.float64, "float64"),
    ],
)
def test_a_frozen_base_in_a_dtype_of_its_own_is_planned_as_it_is(dtype, name):
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].base = nn.Parameter(torch.arange(64).view(8, 8).to(dtype), requires_grad=False)
    drive = {"device": "nvme", "nvme_path": "/somewhere"}
    for tiers, tier in (({"offload_param": drive}, "nvme"), ({}, "memory")):
        plan = plan_of(model, **BF16, zero_optimization={"stage": 3, "offload_optimizer": drive, **tiers})
        row = next(row for row in plan.to_dict()["parameters"] if row["names"] == "*.base")
        columns = ("storage", "compute", "gather", "reduce", "accumulate", "master")
        assert [row[key] for key in columns] == [name, name, name, "-", "-", "itself"]
        assert row["bytes_per_parameter"] == {tier: dtype.itemsize}


def plan_of(model, **keys):
    return PrecisionPlan.of(OffloadConfig.from_dict(keys), model)


def kept_by(plan):
    return {name for name, precision in plan.parameters.items() if precision.compute is torch.float32}


BF16 = MODES["bf16"]


def test_modules_are_named_by_pattern_class_or_dtype():
    norms = {f"{name}.{kind}" for name in ("norm",) for kind in ("weight", "bias")}
    norms |= {f"blocks.{i}.norm{j}.{kind}" for i in (0, 1) for j in (1, 2) for kind in ("weight", "bias")}
    model = fresh_model()
    assert kept_by(plan_of(model, **BF16)) == set()
    assert kept_by(plan_of(model, **BF16, fp32_modules=["LayerNorm"])) == norms
    assert kept_by(plan_of(model, **BF16, fp32_modules=["torch.nn.modules.normalization.Layer*"])) == norms
    assert kept_by(plan_of(model, **BF16, fp32_modules=["torch.nn.LayerNorm"])) == norms, "the public name"
    assert kept_by(plan_of(model, **BF16, fp32_modules=["*norm*"])) == norms
    assert kept_by(plan_of(model, **BF16, fp32_modules=["blocks.1"])) == {
        name for name, _ in model.named_parameters() if name.startswith("blocks.1.")
    }
    for block in model.blocks:
        block.router.bfloat16()
    assert len(kept_by(plan_of(model, **BF16))) == len(list(model.parameters())) - 4


def test_a_stage_is_planned_with_the_dtypes_of_the_other_stages():
    stage, config = nn.Sequential(nn.Linear(4, 4)), OffloadConfig.from_dict({**BF16, "fp32_modules": ["head"]})
    assert kept_by(PrecisionPlan.of(config, stage, elsewhere={torch.float32})) == set()
    assert kept_by(PrecisionPlan.of(config, stage, elsewhere={torch.bfloat16})) == {"0.weight", "0.bias"}


def test_tied_parameters_have_one_precision():
    model = fresh_model()
    model.head.weight = model.embedding.weight
    plan = plan_of(model, **BF16, fp32_modules=["head"])
    assert plan["embedding.weight"] == plan["head.weight"]
    assert plan["embedding.weight"].compute is torch.float32
    autocast = plan_of(model, torch_autocast={"enabled": True, "dtype": "bf16"})
    assert autocast["head.weight"].gather is autocast["head.weight"].reduce is torch.float32
    assert (autocast["head.bias"].gather, autocast["head.bias"].reduce) == (torch.bfloat16, torch.float32)
    assert autocast["blocks.0.qkv.bias"].gather is torch.bfloat16


def test_batch_norms_of_a_16_bit_model_on_a_cpu_are_to_be_named(alone):
    model, key = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), {"fp32_modules": ["BatchNorm1d"]}
    with pytest.raises(ValueError, match=r'1: a BatchNorm1d with weights .* write "fp32_modules": \["BatchNorm1d"\]'):
        initialize(copy.deepcopy(model), MODES["bf16"])
    for one, more in ((copy.deepcopy(model).bfloat16(), {}), (model, key)):
        with initialize(one, MODES["bf16"] | more) as engine:
            for each in (engine, engine.eval()):
                each(torch.ones(2, 4)).sum().backward()


def test_what_does_not_go_is_said(alone):
    with pytest.raises(ConfigError, match=r'fp32_modules: "routre" names no module or parameter.*Block.*LayerNorm'):
        plan_of(fresh_model(), **BF16, fp32_modules=["routre"])
    with pytest.raises(
        ConfigError, match=r'gradient_accumulation_dtype = "bf16": parameter "blocks.*fp32_modules.*"fp32"'
    ):
        plan_of(fresh_model(), **BF16, fp32_modules=["LayerNorm"], gradient_accumulation_dtype="bf16")
    with pytest.warns(RuntimeWarning, match="become fp32 and are computed in fp32"):
        assert plan_of(fresh_model().bfloat16()).mode == "none"
    with warnings.catch_warnings(action="error"):
        plan_of(fresh_model().bfloat16(), **BF16)
