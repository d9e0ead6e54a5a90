"""OffloadAdamW on parameters that FSDP2 shards, in a loop of one's own: real process groups, 1, 2 and 4 ranks."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nvme_offload import OffloadAdamW, split_parameters
from tests.support.interrupts import Struck, at_update, raise_struck
from tests.support.killed_steps import durable_section
from tests.support.ranks import be_alone, on_ranks
from tests.support.sharded_model import (
    VOCABULARY,
    assert_same,
    backward,
    full_state,
    loss_of,
    make,
    section,
    sharded_model,
)
from tests.support.tiers import section as tiers_section


def stock_adamw(model):
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
@on_ranks("ranks")
def test_it_follows_torch_adamw_on_read_through_shards(rank, world_size, tmp_path):
    """Ours, and stock AdamW twice: on read-through shards, and on plain FSDP2's fp32 shards. All get our gradients."""
    ours = sharded_model(torch.bfloat16)
    theirs = [sharded_model(torch.bfloat16), sharded_model(torch.bfloat16, split=False)]
    optimizer, stocks = make(ours, section("nvme", tmp_path)), [stock_adamw(model) for model in theirs]
    norms, coefficients = [], []
    for step in range(6):
        backward(ours, rank, step)
        for p, *others in zip(*(model.parameters() for model in (ours, *theirs)), strict=True):
            assert p.grad.dtype is torch.bfloat16, "the partition is 16-bit"
            for q in others:
                q.grad_dtype = None
                q.grad = DTensor.from_local(
                    p.grad.to_local().float(), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
                )
        squares = sum(p.grad.full_tensor().double().square().sum().item() for p in ours.parameters())
        optimizer.step()
        norms.append((optimizer.total_norm, math.sqrt(squares)))
        coefficients.append(optimizer.stats().clip_coef)
        for model, stock in zip(theirs, stocks, strict=True):
            for q in model.parameters():
                q.grad.mul_(coefficients[-1])
            stock.step()
            stock.zero_grad()
        optimizer.zero_grad()
    found, *expected = (
        torch.cat([p.detach().full_tensor().flatten().double() for p in model.parameters()])
        for model in (ours, *theirs)
    )
    optimizer.close()
    for weights in expected:
        assert (found - weights).norm() / weights.norm() <= 1e-6
    for norm, exact in norms:
        assert norm == pytest.approx(exact, rel=1e-6)
    assert min(coefficients) < 1, "clipping acts"
    assert all(
        c == pytest.approx(min(1, 0.5 / exact), rel=1e-4) for c, (_, exact) in zip(coefficients, norms, strict=True)
    )


@torch.no_grad()
def model_without_reduce_dtype(kind, *, split=True):
    """Weights are such that bf16 holds them, so that every kind gathers the same."""
    model = sharded_model(torch.bfloat16, split=False, reduce_dtype=None)
    for param in model.parameters():
        param.to_local().copy_(param.to_local().bfloat16())
    if kind == "halves" and split:
        split_parameters(model)
    return model.bfloat16() if kind == "bf16" else model


@pytest.mark.parametrize("kind", ["fp32", "halves", "bf16"])
@on_ranks(2)
def test_gradients_are_reduced_in_the_dtype_of_this_torch_and_a_log_of_them_resumes(rank, world_size, tmp_path, kind):
    """FSDP2 without a `reduce_dtype`: torch 2.15 reduces gradients of fp32 parameters in fp32, older ones in bf16."""
    theirs = model_without_reduce_dtype(kind, split=False)
    ours, kept, again = (model_without_reduce_dtype(kind) for _ in range(3))
    offload = durable_section(tmp_path, "run", rewrite_every=3)
    logged, in_memory = make(ours, offload), make(kept, durable_section(None, None))
    for step in range(5):
        for model in (ours, kept, theirs):
            for micro in range(2):  # reduced together
                model.set_requires_gradient_sync(micro == 1)
                loss_of(model, rank, step, micro).backward()
        if step == 0:
            for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert param.grad.dtype is (torch.float32 if kind == "fp32" else torch.bfloat16)
                assert torch.equal(param.grad.to_local(), expected.grad.to_local().to(param.grad.dtype))
        for optimizer in (logged, in_memory):
            optimizer.step()
            optimizer.zero_grad()
    logged.durable.commits.settle()
    extents = logged.durable.commits.run.extents
    assert any(extents.num_logged_next(slot) > 1 for slot in range(len(extents.slots))) == (kind != "fp32")
    logged.close()
    with make(again, offload) as resumed, in_memory:
        assert resumed.resume() == (5, {})
        assert_same(full_state(again, resumed), full_state(kept, in_memory))


@on_ranks(2)
def test_writing_through_reaches_the_tier_and_the_forward(rank, world_size, tmp_path):
    """load_state_dict after an evaluation, at stage 2: the unsharded copy must not be used any more."""
    model = sharded_model(torch.bfloat16, reshard=False)
    with make(model, section("nvme", tmp_path)), torch.no_grad():
        before = loss_of(model, 0, 99, 0).item()
        state = {name: value.full_tensor() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.zero_()
        assert loss_of(model, 0, 99, 0).item() == pytest.approx(math.log(VOCABULARY), rel=1e-3)
        assert all(not value.full_tensor().any() for value in model.state_dict().values())
        for name, parameter in model.named_parameters():
            full = state[name]
            parameter.copy_(
                DTensor.from_local(full, parameter.device_mesh, run_check=False).redistribute(
                    placements=parameter.placements
                )
            )
        assert loss_of(model, 0, 99, 0).item() == before
        assert all(torch.equal(v.full_tensor(), state[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("tiers", [{}, {"state": "nvme"}, {"param": "nvme"}], ids=["cpu", "state", "param"])
def test_a_state_dict_without_masters_leaves_split_parameters_alone(alone, tmp_path, tiers):
    """After "load the model, then the optimizer" no lower half is gone, of a frozen parameter neither."""
    be_alone()
    model = sharded_model(torch.bfloat16)
    model.blocks[1].requires_grad_(False)
    with OffloadAdamW(model.parameters(), offload=tiers_section(tmp_path, **tiers)) as optimizer:
        backward(model, 0, 0)
        optimizer.step()
        before = [p.detach().full_tensor() for p in model.parameters()]
        assert not torch.equal(before[0], before[0].bfloat16().float())
        stock = torch.optim.AdamW([nn.Parameter(torch.zeros_like(p)) for p in before])
        frozen = model.blocks[1][0].weight
        assert torch.equal(optimizer.state[frozen]["master"].full_tensor(), frozen.detach().full_tensor())
        for entries in ({}, {i: {"exp_avg": torch.ones_like(p)} for i, p in enumerate(model.parameters())}):
            optimizer.load_state_dict({**stock.state_dict(), "state": entries})
            after = [p.detach().full_tensor() for p in model.parameters()]
            assert all(map(torch.equal, after, before))
            moments = [optimizer.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
            assert all(bool((moment == (1 if entries else 0)).all()) for moment in moments)


def test_split_parameters_have_one_optimizer(alone):
    """Each would change the upper halves under the other's lower ones."""
    be_alone()
    config = section("cpu", None)
    model, other = sharded_model(torch.bfloat16), sharded_model(torch.bfloat16)
    optimizer = make(model, config)
    make(other, config).close()
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0 belonged to an OffloadAdamW that is closed.*new model"
    ):
        make(other, config)
    before = full_state(model, optimizer)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 belongs to another OffloadAdamW.*load_state_dict"):
        make(model, config)
    with OffloadAdamW(nn.Linear(2, 2).parameters(), offload=config) as third:
        with pytest.raises(ValueError, match="parameter 0 of group 1 belongs to another"):
            third.add_param_group({"params": [model.head.weight]})
        assert len(third.param_groups) == 1
    assert_same(full_state(model, optimizer), before)
    optimizer.close()


@pytest.mark.parametrize("with_masters", [True, False], ids=["masters", "no masters"])
def test_the_way_back_that_a_stopped_step_names_with_split_parameters(alone, with_masters):
    """The optimizer's state dict, then the model's: the model's cannot be loaded while half of it is in doubt."""
    be_alone()
    model = sharded_model(torch.bfloat16)
    with make(model, section("cpu", None)) as optimizer:
        backward(model, 0, 0)
        optimizer.step()
        weights, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
        if not with_masters:
            for entries in state["state"].values():
                del entries["master"]
        before = full_state(model, optimizer)
        backward(model, 0, 1)
        with at_update(2, raise_struck), pytest.raises(Struck) as stopped:
            optimizer.step()
        way_on = "cannot be finished: load a checkpoint with load_state_dict, the optimizer's, then the model's"
        assert way_on in stopped.value.__notes__[0]
        with pytest.raises(RuntimeError, match=way_on):
            model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        model.load_state_dict(weights)
        assert_same(full_state(model, optimizer), before)


def test_split_parameters_needs_a_sharded_module():
    with pytest.raises(ValueError, match="fully_shard"):
        split_parameters(nn.Linear(2, 2))
