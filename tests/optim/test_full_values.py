"""One parameter's full values, and torch's own functions for state dicts: nothing else changes when they are read."""

import copy
import errno
import platform
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nvme_offload import (
    ClosedError,
    OffloadAdamW,
    SwapIOError,
    get_full_grad,
    get_full_optimizer_state,
    get_full_param,
    set_full_grad,
    set_full_optimizer_state,
    set_full_param,
)
from nvme_offload.offload.staging.block_cache import BlockCache
from nvme_offload.optim.state.pipeline import StepPipeline
from tests.support.ranks import on_ranks
from tests.support.resuming import ResumedModel, fresh_engine, loss_of, next_loss, scalars_of, steps_of
from tests.support.sharded_model import assert_same, full_state, gathered, whole


def everything(engine):
    """Also the gradients."""
    engine._drop_gathered()
    grads = {f"{name}.grad": p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
    return full_state(engine.module, engine.optimizer) | gathered(grads)


def check_torch_state_dicts(engine, other, rank):
    """Read them between backward and step; load them into another engine."""
    engine.backward(loss_of(engine, rank, 3))
    before, scalars = everything(engine), scalars_of(engine)
    steps = engine.optimizer.stats().steps
    model_state = get_model_state_dict(engine.module)
    optimizer_state = get_optimizer_state_dict(engine.module, engine.optimizer)
    get_state_dict(engine.module, engine.optimizer)
    everywhere = get_optimizer_state_dict(
        engine.module, engine.optimizer, options=StateDictOptions(full_state_dict=True)
    )
    assert_same(everything(engine), before)
    assert scalars_of(engine) == scalars
    assert engine.optimizer.stats().steps == steps
    trainable = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    assert optimizer_state["state"].keys() == trainable
    for name, entries in optimizer_state["state"].items():
        param = dict(engine.module.named_parameters())[name]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(entries[key]), get_full_optimizer_state(param, key))
            assert torch.equal(everywhere["state"][name][key], get_full_optimizer_state(param, key))
    other.module.load_state_dict(model_state)
    set_optimizer_state_dict(other.module, other.optimizer, copy.deepcopy(optimizer_state))
    assert_same(full_state(other.module, other.optimizer), full_state(engine.module, engine.optimizer))
    engine.step()
    return next_loss(other)


def check_full_values(engine, rank):
    name = "wide.0.weight"
    with pytest.raises(ValueError, match="FSDP2 may show gathered copies in their place"):
        get_full_param(engine.module.wide[0].weight)
    engine.backward(loss_of(engine, rank, 4))
    param = engine.module.wide[0].weight
    before = everything(engine)
    assert torch.equal(get_full_param(param), before[name])
    assert torch.equal(get_full_grad(param), before[f"{name}.grad"].float())
    assert get_full_optimizer_state(param, "step") == 2
    old_loss = next_loss(engine)
    values = torch.arange(param.numel()).view(param.shape) / 2**20 + 1 / 3
    set_full_param(param, values)
    assert torch.equal(get_full_param(param), values)
    assert next_loss(engine) != old_loss, "a gathered copy is old"
    set_full_grad(param, values)
    assert torch.equal(get_full_grad(param), values.to(param.grad.dtype).float())
    for number, key in enumerate(("exp_avg", "exp_avg_sq")):
        set_full_optimizer_state(param, key, values + number)
        assert torch.equal(get_full_optimizer_state(param, key), values + number)
    set_full_optimizer_state(param, "step", torch.tensor(7.0))
    assert get_full_optimizer_state(param, "step") == 7
    after = everything(engine)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    index = [name for name, _ in engine.module.named_parameters()].index(name)
    expected = {name, f"{name}.grad", *(f"{index}.{key}" for key in ("exp_avg", "exp_avg_sq", "step"))}
    assert changed - {f"{index}.master"} == expected
    with pytest.raises(
        ValueError, match=r"set_full_param: needs a whole tensor of shape \(3008, 37\), not one of shape \(3,\)"
    ):
        set_full_param(param, torch.ones(3))
    with pytest.raises(ValueError, match="'variance' is no optimizer state of this parameter; it has step"):
        get_full_optimizer_state(param, "variance")
    with pytest.raises(ValueError, match=r"get_full_grad: a tensor of shape .* is no parameter of an OffloadOptimizer"):
        get_full_grad(torch.ones(2))
    assert get_full_grad(engine.module.blocks[1][0].weight) is None, "it is frozen"
    assert_same(everything(engine), after)


def read_with_stock_torch(folder):
    """Plain FSDP2 and a plain reader: names, shapes and values are what torch's own tools expect."""
    model = ResumedModel()
    fully_shard(model)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    with fresh_engine("bf16", seed=1) as engine:
        engine.load_checkpoint(folder.parent)
        wanted = full_state(engine.module, engine.optimizer)
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), wanted[name]), name
    assert model.num_batches > 0
    assert torch.equal(model.head.weight.full_tensor(), wanted["embedding.weight"])


@on_ranks(2)
def test_a_part_that_cannot_be_read_is_said_on_every_rank(rank, world_size, tmp_path):
    """A part that one rank cannot read is said on every rank; nobody waits in the gathering."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    tiers = {"offload_gradients": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with fresh_engine("bf16", tmp_path, mesh=mesh, **tiers) as engine, pytest.MonkeyPatch.context() as patch:
        engine.backward(loss_of(engine, rank, 0))
        engine._drop_gathered()
        param = engine.module.wide[0].weight
        error = SwapIOError(errno.EIO, path="swap", offset=0, size_bytes=1, direction="read", extent="a subgroup")
        if rank == 1:
            patch.setattr(StepPipeline, "acquire", Mock(side_effect=error))
            patch.setattr(BlockCache, "holding", Mock(side_effect=error))
        for read in (get_full_param, get_full_grad, lambda param: get_full_optimizer_state(param, "exp_avg")):
            with pytest.raises(SwapIOError, match="EIO") as caught:
                read(param)
            assert caught.value.__notes__ == [f"on rank 1, host {platform.node()}"]
        patch.undo()
        assert get_full_param(param).shape == (3008, 37)


@pytest.mark.parametrize("modes", [("bf16",), pytest.param(("fp32", "fp16"), marks=pytest.mark.slow)], ids=str)
@on_ranks(2)
def test_two_ranks(rank, world_size, tmp_path, modes):
    for mode in modes:
        with fresh_engine(mode) as engine, fresh_engine(mode, seed=1) as other:
            steps_of(engine, rank, range(1))
            next_loss(other)  # gathers what must be dropped
            loss = check_torch_state_dicts(engine, other, rank)
            engine.save_checkpoint(tmp_path / mode)
            assert loss != next_loss(engine)
            check_full_values(engine, rank)
    if "bf16" in modes:
        read_with_stock_torch(tmp_path / "bf16" / "global_step2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plain_parameters(dtype):
    param, frozen = torch.nn.Parameter(torch.randn(40, 3).to(dtype)), torch.nn.Parameter(torch.ones(2))
    with OffloadAdamW([param], offload={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}) as optimizer:
        assert get_full_grad(param) is None
        with pytest.raises(ValueError, match="the parameter has no gradient; call it between backward and step"):
            set_full_grad(param, torch.ones(40, 3))
        values = torch.full((40, 3), 1 / 3)
        set_full_param(param, values)
        assert torch.equal(get_full_param(param), values), "the master has all bits"
        assert torch.equal(param.detach().float(), values.to(dtype).float())
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert torch.equal(get_full_optimizer_state(param, "exp_avg"), optimizer.state[param]["exp_avg"])
        with pytest.raises(ValueError, match="is no parameter of an OffloadOptimizer"):
            get_full_param(frozen)
        copy.deepcopy(param)
    with pytest.raises(ClosedError):
        get_full_param(param)
