"""Bits are the reference twin's wherever state lives; so they are after gradients and changes that nobody expects."""

import pytest
import torch
from torch import nn

from nvme_offload import OffloadAdamW
from tests.support.pairs import each_value_once
from tests.support.training import (
    AWKWARD_SHAPES,
    BLOCK,
    Twin,
    assert_same_bits,
    param,
    params_of,
    section,
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


MIXED = (torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_skips_the_step(make_adamw, device, bad, clip):
    params = params_of([(BLOCK + 3,), (5, 5), (1,)], *MIXED)
    twin, optimizer = Twin(params, clip=clip), make_adamw(params, device, clip=clip)
    for step in range(4):
        set_grads(params, step)
        if step in (0, 2):
            before = snapshot(optimizer)
            params[step and 1].grad.view(-1)[-1] = bad
            with pytest.warns(RuntimeWarning, match="step skipped.*skipped_steps") as caught:
                optimizer.step()
            assert [warning.filename for warning in caught] == [__file__]
            assert_same_bits(snapshot(optimizer), before)
        else:
            twin.step([p.grad for p in params])
            optimizer.step()
    assert optimizer.stats().skipped_steps == 2
    assert optimizer.stats().steps == 2
    twin.assert_equals(optimizer)


def test_where_no_step_may_be_skipped_such_a_gradient_is_an_error(drive):
    params = params_of([(BLOCK + 3,)], torch.bfloat16)
    with OffloadAdamW(params, offload={**section(drive), "skip_non_finite": False}) as optimizer:
        take_steps(optimizer, params, 0)
        before = snapshot(optimizer)
        params[0].grad.view(-1)[5] = torch.inf
        with pytest.raises(ValueError, match="skip_non_finite") as caught:
            optimizer.step()
        assert caught.value.__notes__[0].startswith("Step 2 has updated nothing")
        assert_same_bits(snapshot(optimizer), before)
        assert (optimizer.stats().steps, optimizer.stats().skipped_steps) == (1, 0)


def test_a_norm_beyond_fp32_is_still_a_norm(make_adamw):
    params = params_of([(70_000,)], torch.float32)
    twin, optimizer = Twin(params, clip=1.0), make_adamw(params, clip=1.0)
    params[0].grad = torch.full((70_000,), 3e38)
    norm = twin.step([params[0].grad])
    optimizer.step()
    assert norm > 3.5e38
    assert optimizer.stats().total_norm == pytest.approx(norm, rel=1e-12)
    twin.assert_equals(optimizer)


CHANGES = {
    "added to": (lambda p: p.add_(0.5), 0, None),
    "copied, which the version counter does not see": (lambda p: p.data.copy_(p.data * 2), 0, None),
    "one element": (lambda p: p.data[BLOCK + 17].add_(1), BLOCK, 2 * BLOCK),
    "last element": (lambda p: p.data[-1].fill_(-3.0), 2 * BLOCK, None),
}
"""Each changes a parameter, in the blocks between two elements; None: its last one."""


@pytest.mark.parametrize(
    ("where", "dtype", "change"),
    each_value_once(
        [{"device": "cpu"}, {"buffers": 8}, {"buffers": 2}], [torch.bfloat16, torch.float16], list(CHANGES)
    ),
    ids=str,
)
def test_a_changed_parameter_is_taken_over_and_said(make_adamw, where, dtype, change):
    """Exactly the blocks that changed start from the 16-bit values found; all others keep their lower halves."""
    params = params_of([(2 * BLOCK + 100,), (3 * BLOCK,), (40,)], dtype)
    twin, optimizer = Twin(params), make_adamw(params, **where)
    for step in range(6):
        set_grads(params, step)
        if step == 3:
            changed = params[0] if step % 2 else params[1]
            disturb, start, stop = CHANGES[change]
            with torch.no_grad():
                disturb(changed)
            stop = stop or changed.numel()
            twin.take_over(0, start, stop, changed[start:stop])
            blocks = -(-(stop - start) // BLOCK)
            twin.assert_equals(optimizer)  # already seen when the state is read
            with pytest.warns(RuntimeWarning, match=f"{blocks} tiles of 65536 elements were changed") as caught:
                optimizer.step()
            assert [warning.filename for warning in caught] == [__file__]
            assert optimizer.stats().resplit_blocks == blocks
        else:
            optimizer.step()
        twin.step([p.grad for p in params])
    twin.assert_equals(optimizer)
    assert optimizer.stats().resplit_blocks == blocks


@pytest.mark.filterwarnings("always")
def test_a_run_says_once_that_somebody_changes_its_parameters(make_adamw, recwarn):
    """A lookahead optimizer around this one does so every few steps."""
    params = params_of([(40,), (70_000,)], torch.bfloat16)
    optimizer = make_adamw(params)
    for step in range(9):
        take_steps(optimizer, params, step)
        if step % 2:
            with torch.no_grad():
                params[step % 4 // 2].mul_(0.5)
    assert optimizer.stats().resplit_blocks == 6
    assert ["tiles of 65536 elements were changed" in str(warning.message) for warning in recwarn] == [True]


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(("clip", "warnings"), [(0.0, 1), (1.0, 0)], ids=["torch clips", "the section clips"])
def test_gradients_that_torchs_clipping_made_zero_are_said_once(make_adamw, recwarn, clip, warnings):
    params = params_of([(40,), (7,)], torch.float32)
    optimizer = make_adamw(params, clip=clip)
    for _ in range(2):
        for p in params:
            p.grad = torch.full_like(p, 1e38)
        if not clip:
            assert torch.nn.utils.clip_grad_norm_(params, 1.0) == torch.inf
        optimizer.step()
    assert ["write gradient_clipping in the section" in str(warning.message) for warning in recwarn] == [
        True
    ] * warnings


def test_an_fp32_parameter_is_its_own_master(make_adamw, recwarn):
    """Nothing to detect: what somebody writes there is the master."""
    params = params_of([(BLOCK + 9,)], torch.float32)
    twin, optimizer = Twin(params), make_adamw(params)
    for step in range(3):
        with torch.no_grad():
            params[0].mul_(0.5)
        twin.take_over(0, 0, BLOCK + 9, params[0])
        take_steps(optimizer, params, step, twin=twin)
    twin.assert_equals(optimizer)
    assert not list(recwarn)


def test_neither_a_change_before_the_first_step_nor_a_write_of_the_same_bits_is_a_disturbance(make_adamw, recwarn):
    params = params_of([(BLOCK + 9,)], torch.bfloat16)
    optimizer = make_adamw(params)
    with torch.no_grad():
        params[0].mul_(3)  # a checkpoint loaded into the model, say
    twin = Twin(params)
    for step in range(3):
        if step:
            params[0].data.copy_(params[0].data.clone())  # model.load_state_dict of what is there
        take_steps(optimizer, params, step, twin=twin)
    twin.assert_equals(optimizer)
    assert optimizer.stats().resplit_blocks == 0
    assert not list(recwarn)
