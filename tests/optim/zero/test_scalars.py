"""Parameters without dimensions, as CLIP has: they train with the bits of plain torch, and keep their shape."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from nvme_offload import BlockOrderError, get_full_param, initialize, set_full_param
from tests.support.pairs import slow_but
from tests.support.ranks import on_ranks, run_ranks
from tests.support.tiers import EVERYTHING, PRECISIONS, section

WIDTH, STEPS, ACCUMULATION = 24, 3, 2
MODES = PRECISIONS | {"mixed": {"fp32_modules": ["blocks.1"]}}
NO_CLIPPING = {"gradient_clipping": 0.0}


class Block(nn.Module):
    """With a scalar of its own, and a frozen one."""

    def __init__(self, shape):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full(shape, 0.3))
        self.shift = nn.Parameter(torch.full(shape, 0.1), requires_grad=False)
        self.idle = False

    def reset_parameters(self):
        nn.init.constant_(self.scale, 0.3)
        nn.init.constant_(self.shift, 0.1)

    def forward(self, hidden):
        return hidden + (0.5 if self.idle else self.scale) * self.linear(hidden) + self.shift


class Model(nn.Module):
    """As CLIP: a temperature that the model itself reads, behind all blocks."""

    def __init__(self, shape=(), penalty=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(3))
        self.logit_scale = nn.Parameter(torch.full(shape, 1.5))
        self.penalty = penalty

    def reset_parameters(self):
        nn.init.constant_(self.logit_scale, 1.5)

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden * self.logit_scale.exp() + (self.blocks[0].scale if self.penalty else 0)


def built(shape=()):
    torch.manual_seed(0)
    return Model(shape)


def batches(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(ACCUMULATION)]


def loss_of(model, batch):
    return model(batch).float().square().mean()


def train(engine, rank, steps, *, by_turns):
    for step in steps:
        if by_turns:
            engine.accumulate(lambda batch: loss_of(engine, batch), batches(rank, step))
            engine.step()
        else:
            for batch in batches(rank, step):
                engine.backward(loss_of(engine, batch))
                engine.step()


def values_of(engine):
    found = {name: get_full_param(param) for name, param in engine.module.named_parameters()}
    for name, param in engine.module.named_parameters():
        for entry, value in engine.optimizer.state.get(param, {}).items() if param.ndim == 0 else ():
            found[f"{name}.{entry}"] = torch.as_tensor(value).clone()
    return found


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.shape == theirs[name].shape, name
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(("ranks", "precision"), slow_but([(1, "fp32"), (2, "bf16")], [1, 2], [*MODES]))
@on_ranks("ranks")
def test_scalars_train_are_saved_loaded_exported_and_born(rank, world_size, tmp_path, precision):
    """Stages 0 and 1 add up before they reduce, 2 and 3 reduce each micro-batch. A scalar does the first in all."""
    ends = []
    for stage, tiers, by_turns in (
        *((0, {}, False), (1, {"state": "nvme"}, True)),
        *((2, {"param": "cpu"}, False), (3, EVERYTHING, True), (3, EVERYTHING, False)),
    ):
        config = section(tmp_path, stage=stage, accumulation=ACCUMULATION, **tiers) | MODES[precision]
        config |= {"micro_batch_order": "vertical"} if by_turns else {}
        config |= NO_CLIPPING if stage < 2 else {}  # the norm adds up scalars apart
        saved = tmp_path / f"{precision} {len(ends)}"
        with initialize(built(), config) as engine:
            train(engine, rank, range(1), by_turns=by_turns)
            engine.save_checkpoint(saved)
            train(engine, rank, range(1, 2), by_turns=by_turns)
            set_full_param(engine.module.logit_scale, torch.tensor(7.0))
            engine.load_checkpoint(saved)
            train(engine, rank, range(1, STEPS), by_turns=by_turns)
            ends.append(values_of(engine))
            [file] = engine.export_safetensors(saved, "own")
            for shown in (dict(engine.weights()), load_file(file), engine.module.state_dict()):
                for name in ("logit_scale", "blocks.1.scale", "blocks.1.shift"):
                    assert shown[name].shape == (), name
                    assert torch.equal(shown[name], get_full_param(engine.module.get_parameter(name))), name
        with torch.device("meta"):
            model = Model()
        with initialize(model, config, weights=file) as engine:
            assert engine.module.logit_scale == load_file(file)["logit_scale"] != 1.5
            train(engine, rank, range(1), by_turns=by_turns)
    with initialize(built(shape=(1,)), section(tmp_path, stage=1) | MODES[precision] | NO_CLIPPING) as engine:
        train(engine, rank, range(STEPS), by_turns=False)
        by_fsdp2 = {name: value if "linear" in name else value.view(()) for name, value in values_of(engine).items()}
    if precision == "fp32":  # in 16 bits FSDP2 casts one of one dimension
        assert_equal({name: ends[0][name] for name in by_fsdp2}, by_fsdp2)
    for first, others in ((ends[0], ends[1:2]), (ends[2], ends[3:])):
        for values in others:
            assert_equal(values, first)
            assert values["logit_scale"] != 1.5
    for name in ("logit_scale", "blocks.0.scale"):
        gathered = [torch.empty(()) for _ in range(world_size)]
        dist.all_gather(gathered, ends[-1][name])
        assert torch.equal(gathered[0], gathered[-1]), "the same on all ranks"


def gathered_sum(value, world_size):
    parts = [torch.empty(()) for _ in range(world_size)]
    dist.all_gather(parts, value)
    return torch.stack(parts).sum()


def leave_out(rank, world_size, path):
    """The second rank uses one scale in the first micro-batch alone, and one in none; nobody uses the third."""
    plain, model = built(), built()
    with initialize(model, section(path, **EVERYTHING) | MODES["fp32"] | NO_CLIPPING) as engine:
        for micro, batch in enumerate(batches(rank, 0)):
            for each in (plain, model):
                each.blocks[0].idle, each.blocks[1].idle, each.blocks[2].idle = rank * micro == 1, rank == 1, True
            (loss_of(plain, batch) / ACCUMULATION).backward()
            engine.backward(loss_of(engine, batch))
            if micro == 0:
                engine.step()
        scalars = {name: model.get_parameter(name) for name in ("blocks.0.scale", "blocks.1.scale", "logit_scale")}
        for name, param in scalars.items():
            own = plain.get_parameter(name).grad
            total = gathered_sum(torch.zeros(()) if own is None else own, world_size)
            assert torch.equal(param.grad, total / world_size), name
            param.grad.mul_(0.5)  # as a loop does that divides
        halves = [param.grad.clone() for param in scalars.values()]
        assert model.blocks[2].scale.grad is None
        engine.backward(0 * loss_of(engine, batch))
        assert all(torch.equal(param.grad, half) for param, half in zip(scalars.values(), halves, strict=True))
        engine.zero_grad()
        assert all(param.grad is None for param in scalars.values())
        model.blocks[1].shift.requires_grad_(True)
        train(engine, rank, range(2), by_turns=False)
        assert model.blocks[1].shift != torch.tensor(0.1)
        engine.save_checkpoint(path / "saved")
        return values_of(engine)


def load(rank, world_size, path):
    model = built()
    model.blocks[1].shift.requires_grad_(True)
    model.blocks[2].idle = True
    with initialize(model, section(path) | MODES["fp32"]) as engine:
        engine.load_checkpoint(path / "saved")
        return values_of(engine)


def test_a_rank_that_does_not_use_a_scalar_takes_part_and_one_rank_goes_on(tmp_path):
    ours, theirs = run_ranks(leave_out, 2, tmp_path)
    [alone] = run_ranks(load, 1, tmp_path)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
        assert torch.equal(value, alone[name]), name


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_a_durable_run_has_them_too(rank, world_size, tmp_path):
    config = section(tmp_path, **EVERYTHING) | NO_CLIPPING
    with initialize(built(), config) as engine:
        train(engine, rank, range(STEPS), by_turns=False)
        expected = values_of(engine)
    config["zero_optimization"]["offload_optimizer"]["durable"] = "run"
    for steps in (range(1), range(1, STEPS)):
        with initialize(built(), config) as engine:
            assert (engine.resume() is None) is (steps.start == 0)
            train(engine, rank, steps, by_turns=steps.start > 0)
            ended = values_of(engine)
    assert_equal(ended, expected)


class Between(Model):
    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden) * self.logit_scale
        return hidden


@pytest.mark.parametrize("build", [Between, lambda: Model(penalty=True)], ids=["in two places", "inside a block"])
def test_a_scalar_whose_gradient_would_be_added_up_otherwise_is_refused_block_by_block(alone, tmp_path, build):
    config = section(tmp_path, accumulation=ACCUMULATION) | {"micro_batch_order": "vertical"}
    with (
        initialize(build(), config) as engine,
        pytest.raises(BlockOrderError, match=r"used in several places between blocks|parameters themselves"),
    ):
        train(engine, 0, range(1), by_turns=True)
