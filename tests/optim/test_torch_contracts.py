"""What users of torch.optim may rely on: hooks, `optimizer.state` as a mapping, switches, compilation, no cycles."""

import copy
import gc
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from nvme_offload import OffloadAdamW, initialize
from tests.support.own_resources import Resources
from tests.support.sharded_model import assert_same, full_state
from tests.support.tiers import EVERYTHING, make, train_step
from tests.support.tiers import section as section_of_tiers
from tests.support.training import (
    SETTINGS,
    Twin,
    assert_same_bits,
    param,
    params_of,
    section,
    set_grads,
    snapshot,
    take_steps,
)

SHAPES = [(70_000,), (300,)]


def trained(make_adamw, device="nvme", steps=2):
    params = params_of(SHAPES, torch.bfloat16)
    optimizer = make_adamw(params, device)
    take_steps(optimizer, params, *range(steps))
    return params, optimizer


def test_dropping_the_optimizer_frees_everything_at_once(drive):
    torch.optim.AdamW([param((1,))])  # torch's first optimizer imports the compiler, whose frames stay for a while

    def tasks():
        return set(os.listdir("/proc/self/task"))

    params = params_of(SHAPES, torch.bfloat16)
    gc.collect()
    gc.disable()
    try:
        before, resources = tasks(), Resources.steady()
        optimizer = OffloadAdamW(params, offload=section(drive), **SETTINGS)
        take_steps(optimizer, params, 0)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.state.clear()
        assert list(drive.iterdir())
        del optimizer
        assert not list(drive.iterdir())
        assert tasks() <= before
        assert not Resources.settled(resources).beyond(resources)
    finally:
        gc.enable()


def test_a_pre_hook_of_load_state_dict_sees_the_state_and_may_edit_it(make_adamw):
    params, optimizer = trained(make_adamw)
    saved, seen = optimizer.state_dict(), []

    def edit(hooked, state_dict):
        assert hooked is optimizer
        seen.append(sorted(state_dict["state"][0]))
        state_dict = copy.deepcopy(state_dict)
        state_dict["state"][0]["exp_avg"].fill_(7.0)
        state_dict["param_groups"][0]["lr"] = 0.125
        return state_dict

    handle = optimizer.register_load_state_dict_pre_hook(edit)
    optimizer.load_state_dict(saved)
    assert seen == [["exp_avg", "exp_avg_sq", "master", "step"]]
    assert (optimizer.state[params[0]]["exp_avg"] == 7).all()
    assert optimizer.param_groups[0]["lr"] == 0.125
    handle.remove()
    optimizer.load_state_dict(saved)
    assert_same_bits(snapshot(optimizer)["state"], saved["state"])


def test_hooks_of_state_dict_run_before_and_after_it(make_adamw):
    params, optimizer = trained(make_adamw)

    def before(hooked):
        hooked.state[params[1]]["exp_avg"] = torch.full((300,), 3.0)

    def add(hooked, state_dict):
        state_dict["state"][0]["mine"] = state_dict["state"][0]["exp_avg"].sum()

    def exchange(hooked, state_dict):
        return {**state_dict, "more": len(state_dict["state"])}

    optimizer.register_state_dict_pre_hook(before)
    optimizer.register_state_dict_post_hook(add)
    optimizer.register_state_dict_post_hook(exchange)
    packed = optimizer.state_dict()
    assert packed["more"] == 2
    assert packed["state"][0]["mine"] == packed["state"][0]["exp_avg"].sum()
    assert (packed["state"][1]["exp_avg"] == 3).all()


@pytest.mark.parametrize(
    "drop",
    [
        lambda o, p: o.state.clear(),
        lambda o, p: o.state.pop(p),
        lambda o, p: o.state.__delitem__(p),
        lambda o, p: o.state.__setitem__(p, {}),
        lambda o, p: setattr(o, "state", {}),
    ],
    ids=["clear", "pop", "del", "assign", "exchange"],
)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_state_that_is_dropped_begins_afresh(make_adamw, device, drop):
    p = param((70_000,))
    optimizer, twin = make_adamw([p], device), Twin([p])
    for step in range(4):
        if step == 2:
            drop(optimizer, p)
            twin.steps[0] = 0
            for values in twin.states.values():
                values[0][:] = 0
        take_steps(optimizer, [p], step, twin=twin)
    twin.assert_equals(optimizer)


def test_what_is_popped_is_what_was_there_and_can_be_assigned_again(make_adamw):
    params, optimizer = trained(make_adamw)
    before = snapshot(optimizer)
    entries = optimizer.state.pop(params[0])
    assert float(optimizer.state[params[0]]["step"]) == 0
    assert float(optimizer.state[params[1]]["step"]) == 2
    assert optimizer.state.pop(param((3,)), None) is None
    optimizer.state[params[0]] = entries
    assert_same_bits(snapshot(optimizer), before)
    optimizer.state[params[1]] = optimizer.state[params[1]]
    assert_same_bits(snapshot(optimizer), before)


def test_a_parameter_without_state_yet_gets_none_by_being_cleared(make_adamw):
    params = params_of(SHAPES, torch.bfloat16)
    params[1].requires_grad_(False)
    optimizer = make_adamw(params)
    optimizer.state.clear()
    assert optimizer.state_dict()["state"].keys() == {0}


def exchanged(optimizer):
    optimizer.state = {"x": 1}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda o: o.state["x"], KeyError, "'x' is not a parameter of this optimizer"),
        (lambda o: o.state.pop("x"), KeyError, "'x' is not a parameter"),
        (lambda o: o.state.__setitem__("x", {}), KeyError, "'x' is not a parameter"),
        (lambda o: o.state.popitem(), TypeError, r"use pop\(parameter\), or clear\(\)"),
        (lambda o: o.state.__setitem__(o.param_groups[0]["params"][0], 3), TypeError, "is a mapping of step, master"),
        (
            lambda o: o.state.__setitem__(o.param_groups[0]["params"][0], {"y": 3}),
            KeyError,
            "'y' is not optimizer state",
        ),
        (exchanged, TypeError, "cannot be exchanged"),
    ],
    ids=["get", "pop", "set", "popitem", "no mapping", "unknown entry", "exchange"],
)
def test_what_cannot_be_said_of_the_state_is_refused_in_words(make_adamw, call, error, words):
    _, optimizer = trained(make_adamw)
    before = snapshot(optimizer)
    with pytest.raises(error, match=words):
        call(optimizer)
    assert_same_bits(snapshot(optimizer), before)


def test_torch_compile_does_not_look_inside_a_step(make_adamw):
    params = params_of(SHAPES, torch.bfloat16)
    twin = Twin(params)
    optimizer, graphs = make_adamw(params), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend)
    def update():
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()

    for step in range(3):
        set_grads(params, step)
        twin.step([p.grad for p in params])
        update()
    twin.assert_equals(optimizer)
    assert not graphs


@pytest.mark.parametrize("tiers", [{}, EVERYTHING], ids=["memory", "nvme"])
def test_an_asynchronous_save_of_split_parameters(alone, tmp_path, tiers):
    with make(section_of_tiers(tmp_path, **tiers)) as engine:
        train_step(engine, 0)
        state = get_model_state_dict(engine.module)
        wanted = {name: value.full_tensor().clone() for name, value in state.items()}
        saving = dcp.async_save(state, checkpoint_id=tmp_path / "saved")
        train_step(engine, 1)
        saving.result()
    loaded = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "saved")
    assert_same(loaded, wanted)


@pytest.mark.parametrize("tiers", [{}, EVERYTHING], ids=["memory", "nvme"])
def test_a_model_may_be_moved_to_where_it_is(alone, tmp_path, tiers):
    ends = []
    for move in (False, True):
        with make(section_of_tiers(tmp_path, **tiers)) as engine:
            for step in range(3):
                train_step(engine, step)
                if move:
                    assert engine.module.to("cpu").float() is engine.module
            ends.append(full_state(engine.module, engine.optimizer))
    assert_same(*ends)


@pytest.mark.parametrize("mode", ["bf16", "fp32"])
def test_converting_a_model_that_is_trained_is_refused_and_changes_nothing(alone, mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = {"bf16": {"enabled": mode == "bf16"}, "gradient_accumulation_dtype": "fp32"}
    with initialize(model, config, blocks=["0"]) as engine:
        for part, name in ((engine.module, "0.weight"), (engine.module[0], "weight")):
            with pytest.raises(ValueError, match=rf"^{name} of a sharded model would be converted"):
                part.to(torch.float64)
        if mode == "bf16":
            with pytest.raises(RuntimeError, match="swap"):
                engine.module[1].double()
        engine.backward(engine(torch.ones(2, 8)).float().sum())
        engine.step()
        assert engine.optimizer.stats().steps == 1


def test_split_parameters_that_were_exchanged_are_refused_before_anything_moves(alone):
    with initialize(nn.Linear(8, 8), {"bf16": {"enabled": True}}) as engine:
        engine.backward(engine(torch.ones(2, 8)).float().sum())
        local = engine.optimizer.param_groups[0]["params"][0]
        local._local_tensor = torch.zeros(8, 8, dtype=torch.bfloat16)
        with pytest.raises(
            ValueError, match=r"was a shard in parts of torch\.bfloat16 .* and is now a tensor of torch\.bf"
        ):
            engine.step()
        assert not engine.optimizer.has_unfinished_step
