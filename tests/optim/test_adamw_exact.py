"""Where state lives, how it is cut and who computes never changes a bit; and the bits are the reference twin's."""

import pytest
import torch
from torch import nn

from tests.support.training import (
    AWKWARD_SHAPES,
    BLOCK,
    Twin,
    assert_same_bits,
    param,
    params_of,
    set_grads,
    snapshot,
    take_steps,
)

DTYPES = {
    "bf16": (torch.bfloat16,),
    "fp16": (torch.float16,),
    "fp32": (torch.float32,),
    "mixed": (torch.bfloat16, torch.float32, torch.float16),
}


NARROW = [  # dtypes, staging buffers, threads, elements of a subgroup
    ("mixed", 2, 1, 1),
    ("mixed", 3, 3, 65536),
    ("bf16", 4, 2, 200_000),
    ("fp16", 8, 2, 1),
    ("fp32", 2, 3, 200_000),
    ("bf16", 2, 3, 1),
]


@pytest.mark.parametrize(
    ("device", "dtypes", "buffers", "threads", "sub_group_size"),
    [*(("cpu", dtypes, 4, 2, 100_000) for dtypes in DTYPES), *(("nvme", *narrow) for narrow in NARROW)],
)
def test_the_bits_are_the_reference_twins(make_adamw, num_threads, device, dtypes, buffers, threads, sub_group_size):
    """Two groups with clipping; every gradient comes in two parts, and each step some parameters have none."""
    num_threads(threads)
    params = params_of(AWKWARD_SHAPES, *DTYPES[dtypes])
    half = len(params) // 2
    second = {"lr": 3e-4, "weight_decay": 0.0, "maximize": True}
    twin = Twin(params, clip=0.5)
    twin.own_settings = dict.fromkeys(range(half, len(params)), second)
    groups = [{"params": params[:half]}, {"params": params[half:], **second}]
    optimizer = make_adamw(groups, device, clip=0.5, buffers=buffers, sub_group_size=sub_group_size)
    for step in range(4):
        set_grads(params, step, without=[step, step + 3, 2 * step + 2])
        for p in params:
            if p.grad is not None:
                (p * p.grad.clone()).sum().backward()
        norm = twin.step([p.grad for p in params])
        optimizer.step()
        assert optimizer.stats().total_norm == pytest.approx(norm, rel=1e-14)
        assert optimizer.stats().clip_coef < 1
    twin.assert_equals(optimizer)
    assert (optimizer.stats().bytes_written > 0) == (device == "nvme")
    assert optimizer.stats().staging_bytes <= optimizer.stats().state_bytes


def test_memory_order_does_not_matter(make_adamw):
    """channels_last parameters, transposed parameters, and gradients in another order than their parameter."""
    params = [
        nn.Parameter(param((8, 16, 3, 40)).detach().to(memory_format=torch.channels_last)),
        nn.Parameter(param((300, 257)).detach().t()),
        param((2, 3, 4, 5)),
    ]
    assert not any(p.is_contiguous() for p in params[:2])
    twin, optimizer = Twin(params), make_adamw(params)
    for step in range(5):
        set_grads(params, step)
        if step % 2:
            params[0].grad = params[0].grad.to(memory_format=torch.channels_last)
            params[2].grad = params[2].grad.to(memory_format=torch.channels_last)
        twin.step([p.grad for p in params])
        optimizer.step()
    twin.assert_equals(optimizer)
    assert optimizer.state[params[0]]["exp_avg"].stride() == params[0].stride()


def test_views_of_one_storage_are_parameters_like_any_other(make_adamw):
    whole = param((1000,)).detach()
    params = [nn.Parameter(whole[:300]), nn.Parameter(whole[300:301]), nn.Parameter(whole[500:].view(5, 100))]
    twin, optimizer = Twin(params), make_adamw(params)
    between = whole[301:500].clone()
    take_steps(optimizer, params, *range(3), twin=twin)
    twin.assert_equals(optimizer)
    assert_same_bits(whole[301:500], between)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_state_of_a_parameter_that_shares_a_subgroup_but_had_no_gradient(make_adamw, device):
    """Its first block is born with its neighbour, its other blocks are not: the master is the parameter in both."""
    params = params_of([(1000,), (3 * BLOCK + 5,)], torch.bfloat16)
    optimizer = make_adamw(params, device, sub_group_size=2 * BLOCK)
    optimizer.place()
    assert [len(slot.subgroup.runs) for slot in optimizer.store.slots] == [2, 1, 1]
    take_steps(optimizer, params, 0, without=[1])
    assert_same_bits(optimizer.state_dict()["state"][1]["master"], params[1].detach().float())
    assert_same_bits(optimizer.state[params[1]]["master"], params[1].detach().float())


def test_a_step_without_any_gradient_changes_nothing(make_adamw):
    params = params_of([(1000,), (7,)], torch.bfloat16)
    optimizer = make_adamw(params)
    take_steps(optimizer, params, 0)
    before = snapshot(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.had_gradients
    assert_same_bits(snapshot(optimizer), before)
