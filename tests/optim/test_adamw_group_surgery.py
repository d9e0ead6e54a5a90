"""Parameters and groups that are taken out of `param_groups`, moved and brought back, as torch permits."""

import math

import pytest
import torch
from torch import nn

from tests.support.training import Twin, assert_same_bits, bits, param, params_of, set_grads, snapshot, take_steps

SHAPES = [(70_000,), (300,), (5,)]


def one_by_one(params):
    return [{"params": [p]} for p in params]


@pytest.mark.parametrize("taken", ["a group", "all of a group", "one of several"])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_what_is_in_no_group_is_not_updated_and_not_in_the_norm(make_adamw, device, taken):
    params = params_of(SHAPES, torch.bfloat16)
    twin = Twin(params, clip=1.0)
    groups = [{"params": params}] if taken == "one of several" else one_by_one(params)
    optimizer = make_adamw(groups, device, clip=1.0, sub_group_size=1 << 22)
    for step in range(4):
        if step == 2:
            if taken == "a group":
                del optimizer.param_groups[1]
            else:
                group = next(group for group in optimizer.param_groups if any(p is params[1] for p in group["params"]))
                group["params"] = [p for p in group["params"] if p is not params[1]]
            before = {name: value.clone() for name, value in optimizer.state[params[1]].items()}
            weights = params[1].detach().clone()
        set_grads(params, step, scale=2.0)
        norm = twin.step([None if step >= 2 and i == 1 else p.grad for i, p in enumerate(params)])
        optimizer.step()
        assert math.isclose(optimizer.total_norm, norm, rel_tol=1e-12)
        assert not optimizer.has_unfinished_step
    for i in (0, 2):
        assert (bits(params[i]) == twin.param_bits(i)).all()
    assert_same_bits(params[1].detach(), weights)
    assert_same_bits(dict(optimizer.state[params[1]]), before)
    assert params[1].grad is not None


def test_what_is_in_no_group_counts_for_no_clipping_and_keeps_its_gradient(make_adamw):
    params = params_of(SHAPES, torch.float32)
    optimizer = make_adamw([("a", params[0]), ("b", params[1]), ("c", params[2])])
    set_grads(params, 0)
    del optimizer.param_groups[0]["params"][0]  # torch leaves its name
    expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params[1:]))
    with pytest.raises(ValueError, match="max_norm is 0 and has to be more than 0"):
        optimizer.clip_grad_norm_(0)
    assert math.isclose(float(optimizer.clip_grad_norm_(1e-3)), expected, rel_tol=1e-12)
    optimizer.zero_grad()
    assert [p.grad is None for p in params] == [False, True, True]


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_parameter_moved_to_another_group_gets_its_hyperparameters(make_adamw, device):
    params = params_of(SHAPES, torch.bfloat16)
    twin = Twin(params)
    twin.own_settings = {1: {"lr": 1e-2}}
    optimizer = make_adamw([{"params": [params[0]]}, {"params": params[1:], "lr": 1e-2}], device)
    twin.own_settings = {1: {"lr": 1e-2}, 2: {"lr": 1e-2}}
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
            optimizer.param_groups.reverse()
            del twin.own_settings[2]
        take_steps(optimizer, params, step, twin=twin)
    for i, p in enumerate(params):
        assert (bits(p) == twin.param_bits(i)).all()
        assert (bits(optimizer.state[p]["exp_avg"]) == twin.states["exp_avg"][i].view("int32")).all()


def test_a_state_dict_holds_what_is_in_the_groups_in_their_order(make_adamw):
    params, others = params_of(SHAPES, torch.bfloat16), params_of(SHAPES, torch.bfloat16)
    optimizer = make_adamw(one_by_one(params))
    take_steps(optimizer, params, 0)
    del optimizer.param_groups[0]
    optimizer.param_groups.reverse()
    packed = optimizer.state_dict()
    assert [group["params"] for group in packed["param_groups"]] == [[0], [1]]
    assert {number: entry["exp_avg"].shape for number, entry in packed["state"].items()} == {0: (5,), 1: (300,)}
    again = make_adamw([{"params": [others[2]]}, {"params": [others[1]]}])
    again.load_state_dict(packed)
    assert_same_bits(dict(again.state[others[2]]), dict(optimizer.state[params[2]]))
    kept = dict(optimizer.state[params[0]])
    optimizer.load_state_dict(packed)
    assert_same_bits(snapshot(optimizer)["state"], packed["state"])
    assert_same_bits(dict(optimizer.state[params[0]]), kept)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_parameter_that_comes_back_goes_on_with_its_state(make_adamw, device):
    params = params_of(SHAPES, torch.bfloat16)
    twin = Twin(params)
    optimizer = make_adamw(one_by_one(params), device)
    for step in range(5):
        if step == 1:
            optimizer.param_groups.clear()
            optimizer.add_param_group({"params": [params[2]]})
        if step == 3:
            optimizer.add_param_group({"params": [params[1], params[0]]})
        set_grads(params, step)
        twin.step([p.grad if i == 2 or step not in (1, 2) else None for i, p in enumerate(params)])
        optimizer.step()
    for i, p in enumerate(params):
        assert float(optimizer.state[p]["step"]) == twin.steps[i]
        assert (bits(p) == twin.param_bits(i)).all()


def test_a_returning_parameter_and_a_new_one_that_is_refused_leave_nothing_behind(make_adamw):
    params = params_of(SHAPES, torch.bfloat16)
    optimizer = make_adamw(one_by_one(params))
    optimizer.place()
    optimizer.param_groups.pop()
    with pytest.raises(ValueError, match=r"parameter 1 of group 2 is torch\.float64"):
        optimizer.add_param_group({"params": [params[2], nn.Parameter(torch.zeros(3, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 2
    assert len(optimizer.state) == 3
    optimizer.add_param_group({"params": [params[2], late := param((4,))]})
    take_steps(optimizer, [*params, late], 0)
    assert float(optimizer.state[late]["step"]) == 1


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (1, "parameter 1 of group 0 and parameter 0 of group 1 are the same parameter"),
        (None, r"parameter 1 of group 0 \(shape \(2,\)\) came .* after the state .* add_param_group"),
    ],
)
@pytest.mark.parametrize("call", [lambda o: o.step(), lambda o: o.clip_grad_norm_(1.0)], ids=["step", "clip"])
def test_groups_that_cannot_be_right_are_refused_before_anything_moves(make_adamw, other, words, call):
    params = params_of(SHAPES, torch.bfloat16)
    optimizer = make_adamw(one_by_one(params))
    optimizer.place()
    set_grads(params, 0)
    before = snapshot(optimizer)
    optimizer.param_groups[0]["params"].append(params[other] if other else nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match=words):
        call(optimizer)
    optimizer.param_groups[0]["params"].pop()
    assert_same_bits(snapshot(optimizer), before)
    optimizer.step()
    assert optimizer.stats().steps == 1
