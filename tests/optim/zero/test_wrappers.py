"""Weights of classes that keep their values in other tensors, as torchao's float8 does, are refused by that class."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map

import nvme_offload.deepspeed
from nvme_offload import OffloadAdamW, initialize, split_parameters
from tests.support.ranks import be_alone
from tests.support.small_engine import BF16, section

ops = torch.ops.aten


class Scaled(torch.Tensor):
    """One tensor inside, to which every operator goes; and an all-gather of its own."""

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(
            cls, inside.shape, strides=inside.stride(), dtype=inside.dtype, device=inside.device
        )

    def __init__(self, inside):
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(value):
            return value.inside if isinstance(value, cls) else value

        result = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        if func is ops.copy_.default:
            return args[0]
        return tree_map(lambda value: cls(value) if isinstance(value, torch.Tensor) else value, result)

    def fsdp_pre_all_gather(self, *unused):
        return (self.inside,), None

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        return None if out is not None else (gathered[0], gathered)


REFUSED = r"is a Scaled, which keeps its values in other tensors: .* Give its module a plain torch.nn.Parameter"


def wrapped(device="cpu", requires_grad=True):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    model[1].weight = nn.Parameter(Scaled(model[1].weight.detach()), requires_grad=requires_grad)
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_initialize_names_the_parameter_and_its_class(alone, device, requires_grad, stage):
    for enter in (initialize, lambda model, config: nvme_offload.deepspeed.initialize(model=model, config=config)):
        for keys in ({}, BF16):
            model = wrapped(device, requires_grad)
            with pytest.raises(ValueError, match=rf"initialize: '1\.weight' {REFUSED}"):
                enter(model, {**section(stage), **keys, "gradient_accumulation_steps": 1})
            assert type(model[1].weight) is Scaled
            if dist.is_initialized():
                dist.destroy_process_group()


def test_an_optimizer_says_so_of_one_and_of_two(alone, tmp_path):
    be_alone()
    sharded = wrapped()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    for params, place in (
        ([wrapped()[1].weight], "0 of group 0"),
        ([wrapped()[1].weight, wrapped()[1].weight], "0 of group 0"),
        (list(sharded.parameters()), "2 of group 0"),
    ):
        with pytest.raises(ValueError, match=f"parameter {place} {REFUSED}"):
            OffloadAdamW(params, offload=section(path=tmp_path))
    with pytest.raises(ValueError, match=rf"split_parameters: '1\.weight' {REFUSED}"):
        split_parameters(sharded, fp32_too=True)
    assert not list(tmp_path.iterdir())
