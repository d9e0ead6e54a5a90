"""A frozen base in 16 bits may be packed codes: every pattern of 16 bits comes out as it went in, wherever it was."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from nvme_offload import get_full_param, initialize, set_full_param, split_parameters
from tests.support.pairs import slow_but
from tests.support.ranks import be_alone, on_ranks
from tests.support.tiers import EVERYTHING, PRECISIONS, section

ROWS = 13
"""Two ranks have shards of different sizes."""


def patterns(dtype):
    """All of them, as a matrix."""
    words = torch.arange(ROWS * 5042, dtype=torch.int32).to(torch.int16)
    return words.view(dtype).view(ROWS, 5042)


def same_bits(ours, theirs):
    return ours.dtype is theirs.dtype and torch.equal(ours.contiguous().view(torch.int16), theirs.view(torch.int16))


class Packed(nn.Module):
    """A base that the forward must see as it is, and an adapter."""

    def __init__(self, dtype):
        super().__init__()
        self.codes = nn.Parameter(patterns(dtype), requires_grad=False)
        self.adapter = nn.Linear(ROWS, ROWS)

    def forward(self, hidden):
        assert same_bits(self.codes.detach(), patterns(self.codes.dtype))
        return hidden + self.adapter(hidden)


def packed(dtype):
    torch.manual_seed(0)
    return nn.Sequential(Packed(dtype), Packed(dtype))


def train(engine, before_step=None):
    def loss_of(hidden):
        return engine(hidden).float().square().mean()

    hidden = [torch.ones(2, ROWS) * (1 + micro) for micro in range(2)]
    engine.accumulate(loss_of, hidden)
    if before_step:
        before_step()
    engine.step()


def check(engine, codes):
    for name, value in (*engine.weights("own"), *engine.weights("fp32")):
        assert not name.endswith("codes") or same_bits(value, codes), name
    for name, param in engine.module.named_parameters():
        assert not name.endswith("codes") or (same_bits(get_full_param(param), codes) and param.dtype is codes.dtype)
        assert name.endswith("codes") or param.dtype is torch.float32


@pytest.mark.parametrize(
    ("ranks", "precision"), slow_but([(1, "bf16"), (2, "fp16")], [1, 2], ["bf16", "fp16", "autocast", "mixed"])
)
@on_ranks("ranks")
def test_every_pattern_of_a_frozen_16_bit_base_stays_in_every_stage_and_tier(rank, world_size, tmp_path, precision):
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    codes = patterns(dtype)
    for stage, tiers in ((0, {}), (1, {"param": "cpu"}), (2, EVERYTHING), (3, {}), (3, EVERYTHING)):
        config = section(tmp_path, stage=stage, **tiers) | PRECISIONS[precision]
        saved = tmp_path / f"{stage} {len(tiers)}"
        with initialize(packed(dtype), config, blocks=["0", "1"]) as engine:
            train(engine)
            check(engine, codes)
            engine.save_checkpoint(saved)
            for target in ("fp32", "bf16"):
                [file] = engine.export_safetensors(saved / target, target)
                assert same_bits(load_file(file)["1.codes"], codes)
            set_full_param(engine.optimizer.param_groups[0]["params"][0], torch.zeros_like(codes))
            assert not get_full_param(engine.optimizer.param_groups[0]["params"][0]).any()
            engine.load_checkpoint(saved)
            check(engine, codes)
            train(engine)
        with torch.device("meta"):
            model = packed(dtype)
        with initialize(model, config, blocks=["0", "1"], weights=saved / "fp32") as engine:
            check(engine, codes)
            train(engine)


class Made(TorchDispatchMode):
    """Lists operators that make fp32 tensors as large as the base."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.found = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype in (torch.float32, torch.float64) and not made.is_meta:
            self.found += [str(func)] * (made.numel() >= self.numel)
        return made


@pytest.mark.parametrize("tiers", [{}, EVERYTHING], ids=["in memory", "everything"])
def test_no_fp32_copy_of_a_frozen_16_bit_base_is_made_from_birth_to_export(alone, tmp_path, tiers):
    codes = patterns(torch.bfloat16)
    with Made(codes.numel()) as made:
        with initialize(packed(codes.dtype), section(tmp_path, **tiers), blocks=["0", "1"]) as engine:
            train(engine)
            check(engine, codes)
            engine.save_checkpoint(tmp_path / "saved")
            engine.load_checkpoint(tmp_path / "saved")
            engine.export_safetensors(tmp_path / "out", "fp32")
        with torch.device("meta"):
            model = packed(codes.dtype)
        with initialize(model, section(tmp_path, **tiers), weights=tmp_path / "out") as engine:
            train(engine)
    assert not made.found
    with made, initialize(packed(codes.dtype).requires_grad_(True), section(tmp_path)):
        assert made.found, "it sees what is made of a base that is trained"


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_a_durable_run_over_packed_codes_is_resumed(rank, world_size, tmp_path):
    config = section(tmp_path, **EVERYTHING)
    config["zero_optimization"]["offload_optimizer"]["durable"] = "run"
    for goes_on in (False, True):
        with initialize(packed(torch.bfloat16), config, blocks=["0", "1"]) as engine:
            assert (engine.resume() is not None) is goes_on
            train(engine)
            check(engine, patterns(torch.bfloat16))


def test_split_parameters_leaves_packed_codes_as_they_are(alone):
    be_alone()
    for dtype in (torch.bfloat16, torch.float16):
        model = packed(dtype)
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(dtype))
        split_parameters(model)
        model(torch.ones(2, ROWS, dtype=dtype)).sum().backward()
        assert same_bits(model[0].codes.to_local(), patterns(dtype))


@pytest.mark.parametrize("tiers", [{}, EVERYTHING], ids=["in memory", "everything"])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_unfrozen_16_bit_parameter_gets_a_master_with_its_first_gradient(alone, tmp_path, tiers, precision, dtype):
    """As one that was trained from the start, and had no gradient before."""
    ends = []
    for frozen in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(ROWS, ROWS).to(dtype) for _ in range(3)))
        model[0].requires_grad_(not frozen)
        with initialize(model, section(tmp_path, **tiers) | PRECISIONS[precision], blocks=["0", "1", "2"]) as engine:
            weight = engine.optimizer.param_groups[0]["params"][0]
            for step in range(4):
                if frozen and step == 2:
                    model[0].requires_grad_(True)
                train(engine, before_step=model[0].zero_grad if not frozen and step < 2 else None)
                assert get_full_param(weight).dtype is (dtype if frozen and step < 2 else torch.float32)
            [file] = engine.export_safetensors(tmp_path / str(frozen), "fp32")
            assert weight.dtype is (dtype if frozen else torch.float32)
            assert engine.module[0].weight.full_tensor().dtype is weight.dtype
            ends.append(load_file(file) | {"master": get_full_param(weight)})
    assert all(value.dtype is torch.float32 and torch.equal(value, ends[1][name]) for name, value in ends[0].items())
