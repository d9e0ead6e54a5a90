"""Where state lives, how it is cut and who computes never changes a bit; and the bits are the reference twin's."""

import pytest
import torch
from torch import nn

from nvme_offload import OffloadAdamW
from tests.support.training import (
    AWKWARD_SHAPES,
    BLOCK,
    SETTINGS,
    Twin,
    assert_same_bits,
    param,
    params_of,
    section,
    set_grads,
    snapshot,
)

SHAPES = [(300,), (BLOCK + 1,), (211, 1009), (97_001,)]
DTYPES = {
    "bf16": (torch.bfloat16,),
    "fp16": (torch.float16,),
    "fp32": (torch.float32,),
    "mixed": (torch.bfloat16, torch.float32, torch.float16),
}


def two_groups(params, **second):
    half = len(params) // 2
    return [{"params": params[:half]}, {"params": params[half:], "lr": 3e-4, "weight_decay": 0.0, **second}]


def train(make_adamw, device, dtypes, *, steps=15, shapes=SHAPES, clip=1.0, **options):
    """Steps of two groups with clipping, every gradient accumulated from three backwards."""
    params = params_of(shapes, *dtypes)
    optimizer = make_adamw(two_groups(params), device, clip=clip, **options)
    for step in range(steps):
        for part in range(3):
            for i, p in enumerate(params):
                generator = torch.Generator().manual_seed(1000 * step + 10 * i + part)
                factor = torch.randn(p.shape, generator=generator).to(p.dtype)
                (p * factor).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.fixture(scope="module")
def in_memory():
    """The run that all others must equal, once per dtype: in host memory, one thread, one subgroup per group."""
    runs = {}

    def get(name):
        if name not in runs:
            before = torch.get_num_threads()
            torch.set_num_threads(1)

            def make(params, device, **options):
                return OffloadAdamW(params, offload=section(None, **options), **SETTINGS)

            with train(make, "cpu", DTYPES[name], sub_group_size=1 << 22) as optimizer:
                runs[name] = snapshot(optimizer)
            torch.set_num_threads(before)
        return runs[name]

    return get


@pytest.mark.parametrize(
    ("dtypes", "buffers", "threads", "sub_group_size"),
    [
        ("mixed", 2, 1, 1),
        ("mixed", 3, 3, 65536),
        ("bf16", 4, 2, 200_000),
        ("fp16", 8, 2, 1),
        ("fp32", 2, 3, 1 << 22),
        ("bf16", 2, 3, 1),
    ],
)
def test_nvme_gives_the_bits_of_host_memory(
    make_adamw, num_threads, in_memory, dtypes, buffers, threads, sub_group_size
):
    num_threads(threads)
    optimizer = train(make_adamw, "nvme", DTYPES[dtypes], buffers=buffers, sub_group_size=sub_group_size)
    assert optimizer.stats().bytes_written > 0
    assert_same_bits(snapshot(optimizer), in_memory(dtypes))
    assert optimizer.stats().staging_bytes <= optimizer.stats().state_bytes
    assert optimizer.stats().clip_coef < 1


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_the_bits_are_the_reference_twins(make_adamw, device, dtypes):
    params = params_of(AWKWARD_SHAPES, *DTYPES[dtypes])
    twin = Twin(params, clip=0.5)
    half = len(params) // 2
    twin.own_settings = {i: {"lr": 3e-4, "weight_decay": 0.0, "maximize": True} for i in range(half, len(params))}
    optimizer = make_adamw(two_groups(params, maximize=True), device, clip=0.5, sub_group_size=100_000)
    for step in range(4):
        set_grads(params, step, without=[step, step + 3, 2 * step + 2])
        norm = twin.step([p.grad for p in params])
        optimizer.step()
        assert optimizer.stats().total_norm == pytest.approx(norm, rel=1e-14)
    twin.assert_equals(optimizer)


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
    for step in range(3):
        set_grads(params, step)
        twin.step([p.grad for p in params])
        optimizer.step()
    twin.assert_equals(optimizer)
    assert_same_bits(whole[301:500], between)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_state_of_a_parameter_that_shares_a_subgroup_but_had_no_gradient(make_adamw, device):
    """Its first block is born with its neighbour, its other blocks are not: the master is the parameter in both."""
    params = params_of([(1000,), (3 * BLOCK + 5,)], torch.bfloat16)
    optimizer = make_adamw(params, device, sub_group_size=2 * BLOCK)
    optimizer.place()
    assert [len(slot.subgroup.runs) for slot in optimizer.store.slots] == [2, 1, 1]
    set_grads(params, 0, without=[1])
    optimizer.step()
    assert_same_bits(optimizer.state_dict()["state"][1]["master"], params[1].detach().float())
    assert_same_bits(optimizer.state[params[1]]["master"], params[1].detach().float())


def test_a_step_without_any_gradient_changes_nothing(make_adamw):
    params = params_of([(1000,), (7,)], torch.bfloat16)
    optimizer = make_adamw(params)
    set_grads(params, 0)
    optimizer.step()
    before = snapshot(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.had_gradients
    assert_same_bits(snapshot(optimizer), before)
