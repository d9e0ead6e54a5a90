"""State has no place before the first step or load: until then other parameters may come in place of those given."""

import gc
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter

from nvme_offload import ConfigError, OffloadAdamW, OutOfSpaceError
from tests.support.ranks import be_alone
from tests.support.training import assert_same_bits, params_of, section, set_grads, snapshot, take_steps

GIVEN = [(1000,), (70_000,), (3, 5)]
OTHERS = [(7,), (40_000,), (2, 2)]


def reserved(drive):
    return sum(path.stat().st_size for path in drive.rglob("swap"))


def exchange(optimizer, others):
    """As accelerate does it: the lists in the groups stay, what is in them goes."""
    others = iter(others)
    for group in optimizer.param_groups:
        group["params"][:] = [next(others) for _ in group["params"]]


def trained(optimizer, params, steps=2):
    take_steps(optimizer, params, *range(steps))
    return snapshot(optimizer)


def test_until_the_first_step_nothing_is_reserved_and_the_entries_are_there(make_adamw, drive):
    params = params_of(GIVEN, torch.bfloat16)
    optimizer = make_adamw(params)
    assert list(optimizer.state) == params
    assert not optimizer.state[params[1]]["exp_avg"].any()
    assert_same_bits(optimizer.state[params[2]]["master"], params[2].detach().float())
    assert optimizer.state_dict()["state"].keys() == {0, 1, 2}
    for entries in optimizer.state.values():  # a Lightning fit begins with that
        entries.update(entries)
    assert optimizer.tier_plan.bytes_on("nvme") > 0, "planned"
    assert (reserved(drive), optimizer.stats().state_bytes) == (0, 0)
    take_steps(optimizer, params, 0, without=[0, 1])
    assert len(optimizer.state_dict()["state"]) == 3
    assert reserved(drive) >= optimizer.stats().state_bytes > 10 * 71_015


@pytest.mark.parametrize("as_groups", [False, True])
def test_parameters_that_were_exchanged_are_trained(make_adamw, drive, as_groups):
    def grouped(params):
        return [{"params": [p], "lr": 0.1 * i} for i, p in enumerate(params)] if as_groups else params

    optimizer = make_adamw(grouped(params_of(GIVEN, torch.bfloat16)))
    optimizer.state_dict()
    others, twins = params_of(OTHERS, torch.float32), params_of(OTHERS, torch.float32)
    exchange(optimizer, others)
    assert list(optimizer.state) == others
    assert_same_bits(trained(optimizer, others), trained(make_adamw(grouped(twins), "cpu"), twins))
    assert reserved(drive) < 8 * 40_011 + 65536, "what the others need"


def test_a_state_dict_goes_to_exchanged_parameters(make_adamw):
    params, others = params_of(GIVEN, torch.bfloat16), params_of(GIVEN, torch.bfloat16)
    first = make_adamw(params)
    trained(first, params)
    second = make_adamw(params_of(GIVEN, torch.float32))
    exchange(second, others)
    second.load_state_dict(first.state_dict())
    assert_same_bits(snapshot(second), snapshot(first))
    exchange(second, params_of(GIVEN, torch.bfloat16))
    for call in (second.step, second.state_dict, lambda: second.load_state_dict(first.state_dict())):
        with pytest.raises(ValueError, match="came into the group after the state of this optimizer had its place"):
            call()


def test_what_cannot_be_used_is_refused_by_the_first_step(make_adamw):
    optimizer = make_adamw(params_of(GIVEN, torch.bfloat16))
    exchange(optimizer, [*params_of(GIVEN[:2], torch.bfloat16), Parameter(torch.zeros(3, 5, dtype=torch.float64))])
    with pytest.raises(ValueError, match=r"parameter 2 of group 0 is torch\.float64"):
        optimizer.step()
    others = params_of(GIVEN, torch.bfloat16)
    exchange(optimizer, others)
    trained(optimizer, others)


def test_a_group_that_comes_before_the_first_step(make_adamw):
    params, late = params_of(GIVEN, torch.bfloat16), params_of(OTHERS, torch.bfloat16)
    optimizer = make_adamw(params)
    optimizer.add_param_group({"params": late, "lr": 0.5})
    twins = [*params_of(GIVEN, torch.bfloat16), *params_of(OTHERS, torch.bfloat16)]
    expected = make_adamw([{"params": twins[:3]}, {"params": twins[3:], "lr": 0.5}], "cpu")
    assert_same_bits(trained(optimizer, [*params, *late]), trained(expected, twins))


def test_construction_and_place_name_a_disk_that_is_too_full(make_adamw, drive, monkeypatch):
    """Free space is asked for at construction; what another process has taken since is found when it is reserved."""
    optimizer = make_adamw(params_of(GIVEN, torch.bfloat16))
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: SimpleNamespace(f_bavail=1, f_frsize=4096, f_blocks=1000))
    with pytest.raises(OutOfSpaceError, match="needed"):
        make_adamw(params_of(GIVEN, torch.bfloat16))
    with pytest.raises(OutOfSpaceError, match="needed"):
        optimizer.place()
    monkeypatch.undo()
    optimizer.place()
    assert optimizer.stats().state_bytes > 0


def test_parameters_that_may_be_sharded_yet_are_let_go(alone, make_adamw, drive):
    be_alone()
    params = params_of(GIVEN, torch.float32)
    references = [weakref.ref(p) for p in params]
    optimizer = make_adamw(params)
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does, to move it to a device
    assert optimizer.state_dict()["state"] == {}, "as torch's before its first step"
    others = params_of(GIVEN, torch.float32)
    exchange(optimizer, others)
    del params
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert reserved(drive) == 0
    assert len(optimizer.state) == 3
    assert optimizer.state_dict()["state"].keys() == {0, 1, 2}, "somebody has looked"
    twins = params_of(GIVEN, torch.float32)
    assert_same_bits(trained(optimizer, others), trained(make_adamw(twins, "cpu"), twins))


def test_block_tiers_wait_for_shards_where_there_may_be_some(alone, drive):
    be_alone()
    nvme = {"device": "nvme", "nvme_path": str(drive)}
    config = section(drive) | {"zero_optimization": {"offload_optimizer": nvme, "offload_param": nvme}}
    params = params_of(GIVEN, torch.float32)
    with OffloadAdamW(params, offload=config) as optimizer:
        set_grads(params, 0)
        with pytest.raises(ConfigError):
            optimizer.step()
