"""State seen from outside: entries, state dicts, torch's state dicts, and what is refused."""

import copy
import pickle

import pytest
import torch

import nvme_offload
from nvme_offload import get_full_optimizer_state, set_full_optimizer_state
from tests.support.training import BLOCK, Twin, assert_same_bits, param, params_of, section, snapshot, take_steps

SHAPES = [(BLOCK + 1,), (33, 65), (), (200,)]
MIXED = (torch.bfloat16, torch.float32, torch.float16)


def trained(make_adamw, device="nvme", *, steps=3, first=0, params=None, **options):
    params = params_of(SHAPES, *MIXED) if params is None else params
    optimizer = make_adamw(params, device, **options)
    take_steps(optimizer, params, *range(first, first + steps))
    return params, optimizer


def test_a_state_dict_is_ordinary(make_adamw):
    params, optimizer = trained(make_adamw)
    state = optimizer.state_dict()
    assert state.keys() == {"state", "param_groups"}
    assert state["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert "offload" not in str(state["param_groups"])
    for i, p in enumerate(params):
        entries = state["state"][i]
        assert entries["step"].dtype == torch.float32
        assert entries["step"].shape == ()
        for name in entries.keys() - {"step"}:
            assert (entries[name].dtype, entries[name].shape) == (torch.float32, p.shape)
            assert entries[name].device.type == "cpu"
    later = copy.deepcopy(state)
    take_steps(optimizer, params, 9)
    assert_same_bits(state, later)  # a copy, not a window


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_without_masters_they_start_from_the_parameters(make_adamw, device, recwarn):
    """What torch.optim.AdamW saved of 16-bit parameters: moments, cast back here, and no master."""
    params, optimizer = trained(make_adamw, device)
    state = optimizer.state_dict()
    for entries in state["state"].values():
        entries.pop("master", None)
    with torch.no_grad():
        params[0][7] = 3.0  # the model was loaded before
    twin = Twin(params)
    for i, entries in state["state"].items():
        twin.states["exp_avg"][i] = entries["exp_avg"].reshape(-1).numpy().copy()
        twin.states["exp_avg_sq"][i] = entries["exp_avg_sq"].reshape(-1).numpy().copy()
        twin.steps[i] = int(entries["step"])
    optimizer.load_state_dict(state)
    twin.assert_equals(optimizer)
    take_steps(optimizer, params, 7, twin=twin)
    twin.assert_equals(optimizer)
    assert optimizer.stats().resplit_blocks == 0
    assert not list(recwarn)


def break_state_dict():
    def edit(change):
        def broken(state):
            change(state)
            return state

        return broken

    def put(**entries):
        return edit(lambda state: state["state"][3].update(entries))

    yield "another shape", put(exp_avg=torch.zeros(3)), r"exp_avg of parameter 3 of group 0 has shape \(3,\)"
    yield "complex", put(exp_avg_sq=torch.zeros(200, dtype=torch.complex64)), "exp_avg_sq of .*complex64"
    yield "amsgrad's", put(max_exp_avg_sq=torch.zeros(200)), "holds 'max_exp_avg_sq'"
    yield "SGD's", put(momentum_buffer=torch.zeros(200)), "holds 'momentum_buffer'; AdamW has step"
    yield "half a step", put(step=torch.tensor(1.5)), "step of parameter 3 of group 0"
    yield "a negative step", put(step=-1), "whole number, 0 or more"
    yield "a step that is no number", put(step=float("nan")), "step of parameter 3|NaN"
    yield "a rounded step", put(step=torch.tensor(300, dtype=torch.bfloat16)), "bfloat16 rounds whole numbers past 256"
    yield "a rounded master", put(master=torch.ones(200).half()), "master of parameter 3 .*float16: the lower bits"
    yield "a step without end", put(step=float("inf")), "step of parameter 3|infinity"
    yield (
        "fewer parameters",
        edit(lambda state: state["param_groups"][0].update(params=[0, 1])),
        r"groups of \[2\] parameters, this optimizer of \[4\]",
    )
    yield (
        "more groups",
        edit(lambda state: state["param_groups"].append({**state["param_groups"][0], "params": []})),
        r"\[4, 0\]",
    )
    yield "amsgrad", edit(lambda state: state["param_groups"][0].update(amsgrad=True)), "amsgrad = True"
    yield "lr", edit(lambda state: state["param_groups"][0].update(lr=-3.0)), r"lr = -3\.0"


@pytest.mark.parametrize(
    ("broken", "words"), [c[1:] for c in break_state_dict()], ids=[c[0] for c in break_state_dict()]
)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_state_dict_that_does_not_fit_changes_nothing(make_adamw, device, broken, words):
    params, optimizer = trained(make_adamw, device)
    _, donor = trained(make_adamw, "cpu", steps=1, first=20)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(broken(donor.state_dict()))
    assert_same_bits(snapshot(optimizer), before)
    take_steps(optimizer, params, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adagrad", "SGD", "Muon"])
def test_masters_that_went_through_torchs_optimizer_are_refused_and_its_states_are_named(drive, name, dtype):
    """torch casts every entry but the step to the dtype of the parameter."""
    params, settings = params_of([(33, 65)] * 2, dtype), {"lr": 1e-3} | ({"momentum": 0.9} if name == "SGD" else {})
    with getattr(nvme_offload, f"Offload{name}")(params, offload=section(drive), **settings) as optimizer:
        take_steps(optimizer, params, 0, 1)
        before, torchs = optimizer.state_dict(), getattr(torch.optim, name)(params, **settings)
        torchs.load_state_dict(copy.deepcopy(before))
        cast = torchs.state_dict()
        with pytest.raises(ValueError, match=f"master of parameter 0 of group 0 is {dtype}: .* torch's optimizers"):
            optimizer.load_state_dict(cast)
        assert_same_bits(optimizer.state_dict(), before)
        for entries in cast["state"].values():
            del entries["master"]
        with pytest.warns(RuntimeWarning, match="of parameter 0 of group 0 and . further states .* 16 bits"):
            optimizer.load_state_dict(cast)
        optimizer.load_state_dict(before)
        assert_same_bits(optimizer.state_dict(), before)


def test_counts_that_fp32_would_round_survive_wherever_a_state_goes(make_adamw):
    many = 2**24 + 1
    params, optimizer = trained(make_adamw)
    set_full_optimizer_state(params[0], "step", torch.tensor(many))
    optimizer.state[params[2]]["step"] = float(many)
    torchs, state = torch.optim.AdamW(params), optimizer.state_dict()
    torchs.load_state_dict(copy.deepcopy(state))
    for number, entries in torchs.state_dict()["state"].items():
        state["state"][number]["step"] = entries["step"]
    params, other = trained(make_adamw, "cpu")
    other.load_state_dict(state)
    assert [int(other.state[p]["step"]) for p in params] == [many, 3, many, 3]
    for _ in range(2):
        other.state[params[0]]["step"] = other.state[params[0]]["step"] + 1
    assert int(get_full_optimizer_state(params[0], "step")) == many + 2


@pytest.mark.parametrize("device", ["cpu", "nvme"])
class TestEntries:
    """``optimizer.state[p]``: there from construction on, read and set through the tier."""

    def test_they_are_there_from_construction_on(self, make_adamw, device):
        params = params_of(SHAPES, *MIXED)
        params[3].requires_grad_(False)
        optimizer = make_adamw(params, device)
        assert len(optimizer.state) == 4
        assert list(optimizer.state) == params
        assert list(optimizer.state[params[0]]) == ["step", "master", "exp_avg", "exp_avg_sq"]
        assert list(optimizer.state[params[1]]) == ["step", "exp_avg", "exp_avg_sq"]
        for p in params:
            entries = optimizer.state[p]
            assert float(entries["step"]) == 0
            assert not entries["exp_avg"].any()
            assert entries["exp_avg"].shape == p.shape
            assert_same_bits(entries["master"] if "master" in entries else p.detach().float(), p.detach().float())

    def test_reading_gives_a_copy_and_setting_it_again_writes_nothing(self, make_adamw, device):
        params, optimizer = trained(make_adamw, device)
        optimizer.synchronize()
        written, before = optimizer.stats().bytes_written, snapshot(optimizer)
        for index, entries in enumerate(optimizer.state.values()):
            assert_same_bits(dict(entries), before["state"][index])
            entries["exp_avg"].zero_()
            entries.update(entries)
        optimizer.synchronize()
        assert optimizer.stats().bytes_written == written
        assert_same_bits(snapshot(optimizer), before)
        for number in (0.0, -0.0, float("nan")):
            optimizer.state[params[1]]["exp_avg"] = value = torch.full(params[1].shape, number)
            assert_same_bits(optimizer.state[params[1]]["exp_avg"], value)

    def test_setting_reaches_the_next_step(self, make_adamw, device):
        params, optimizer = trained(make_adamw, device)
        twin = Twin(params)
        for i, p in enumerate(params):
            generator = torch.Generator().manual_seed(77 + i)
            values = {name: torch.rand(p.shape, generator=generator) for name in ("exp_avg", "exp_avg_sq")}
            if p.dtype is not torch.float32:
                values["master"] = torch.randn(p.shape, generator=generator)
                twin.take_over(i, 0, p.numel(), values["master"])
            twin.states["exp_avg"][i] = values["exp_avg"].reshape(-1).numpy().copy()
            twin.states["exp_avg_sq"][i] = values["exp_avg_sq"].reshape(-1).numpy().copy()
            twin.steps[i] = 41
            optimizer.state[p].update({name: value.double() for name, value in values.items()}, step=41)
        twin.assert_equals(optimizer)  # the parameters follow their masters
        take_steps(optimizer, params, 3, twin=twin)
        twin.assert_equals(optimizer)
        assert optimizer.stats().resplit_blocks == 0

    def test_what_does_not_fit_is_refused(self, make_adamw, device):
        params, optimizer = trained(make_adamw, device)
        before = snapshot(optimizer)
        entries = optimizer.state[params[0]]
        with pytest.raises(ValueError, match="has shape"):
            entries["exp_avg"] = torch.zeros(3)
        with pytest.raises(KeyError, match=r"'momentum'.*step, master, exp_avg, exp_avg_sq"):
            entries["momentum"] = torch.zeros(3)
        with pytest.raises(KeyError):
            entries["momentum"]
        with pytest.raises(KeyError, match="master"):
            optimizer.state[params[1]]["master"] = torch.zeros(33, 65)
        with pytest.raises(TypeError, match="cannot be removed"):
            del entries["exp_avg"]
        with pytest.raises(KeyError, match="not a parameter of this optimizer"):
            optimizer.state[param((3,))]
        assert param((3,)) not in optimizer.state
        assert "exp_avg" in repr(entries)
        assert_same_bits(snapshot(optimizer), before)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_copying_is_refused_in_words(make_adamw, duplicate):
    _, optimizer = trained(make_adamw)
    with pytest.raises(TypeError, match=r"state is on a tier. Use state_dict\(\)"):
        duplicate(optimizer)


def test_loading_needs_no_second_copy_of_what_already_fits(make_adamw):
    """A state dict is as large as the training state: the entries that need no cast are read where they are."""
    from nvme_offload.optim.access.entries import _check_entry

    params, optimizer = trained(make_adamw)
    saved = torch.zeros(params[0].shape)
    assert _check_entry(optimizer.store, 0, "exp_avg", saved).data_ptr() == saved.data_ptr()
