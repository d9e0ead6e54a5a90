"""torch's own cases for its optimizers (`torch.testing`'s inputs and errors), run each beside ours."""

import copy
import io
import warnings
from collections import Counter
from functools import cache

import pytest
import torch

import nvme_offload
from tests.support.build import section

REFUSED = ("amsgrad", "differentiable")  # options that are not here, and are said to be so
ACCEPTED = ("betas", "foreach")
"""torch refuses tensors as betas, and as a rate beside ``foreach``, because of its own implementations."""


@cache
def infos():
    """Return what torch knows of each optimizer that we have, too."""
    from torch.testing._internal.common_optimizers import optim_db  # it takes seconds, and only this test needs it

    by_name = {info.optim_cls.__name__: info for info in optim_db}
    return {name: info for name, info in by_name.items() if hasattr(nvme_offload, f"Offload{name}")}


class Pair:
    """torch's optimizer and ours with the same options over parameters with the same values."""

    def __init__(self, name, kwargs, grouped=lambda params: params):
        shapes = [(10, 5), (6, 5)] if name == "Muon" else [(10, 5), (10,)]
        self.made = []
        for number in range(2):
            generator = torch.Generator().manual_seed(0)
            params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
            options = {key: value.clone() if torch.is_tensor(value) else value for key, value in kwargs.items()}
            if number:
                made = getattr(nvme_offload, f"Offload{name}")(grouped(params), offload=section(), **options)
            else:
                made = infos()[name].optim_cls(grouped(params), **options)
            self.made.append((made, params))
        (self.theirs, self.their_params), (self.ours, self.our_params) = self.made

    def step(self, count):
        for made, params in self.made:
            for _ in range(count):
                made.step(lambda made=made, params=params: self.loss(made, params))
        return self

    def loss(self, made, params):
        made.zero_grad()
        loss = sum((param * param).sum() + param.sum() for param in params)
        loss.backward()
        return loss

    def check(self):
        for theirs, ours in zip(self.their_params, self.our_params, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=2e-4, atol=2e-5)


def trains(name, kwargs):
    Pair(name, kwargs).step(20).check()


def is_saved_and_loaded(name, kwargs):
    first, second = Pair(name, kwargs).step(5), Pair(name, kwargs)
    file = io.BytesIO()
    torch.save(first.ours.state_dict(), file)
    with torch.no_grad():
        for (_, before), (_, after) in zip(first.made, second.made, strict=True):
            for param, value in zip(after, before, strict=True):
                param.copy_(value)
    second.ours.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    second.theirs.load_state_dict(first.theirs.state_dict())
    second.step(5).check()


def loads_torchs_state(name, kwargs):
    pair = Pair(name, kwargs).step(3)
    pair.ours.load_state_dict(copy.deepcopy(pair.theirs.state_dict()))
    pair.step(3).check()


def loads_an_older_state(name, kwargs):
    pair = Pair(name, kwargs).step(3)
    older = pair.ours.state_dict()
    for group in older["param_groups"]:
        for key in ("maximize", "foreach", "fused", "differentiable", "capturable"):
            group.pop(key, None)
    pair.ours.load_state_dict(older)
    assert pair.ours.param_groups[0].keys() == pair.theirs.param_groups[0].keys()


def has_groups(name, kwargs):
    Pair(name, kwargs, lambda params: [{"params": params[:1], "lr": 0.01}, {"params": params[1:]}]).step(10).check()


def gets_a_group_later(name, kwargs):
    pair = Pair(name, kwargs, lambda params: params[:1]).step(3)
    for made, params in pair.made:
        made.add_param_group({"params": params[1:]})
    pair.step(3).check()


def follows_a_schedule(name, kwargs):
    pair = Pair(name, kwargs)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(made, 0.9) for made, _ in pair.made]
    for _ in range(5):
        pair.step(1)
        for schedule in schedules:
            schedule.step()
    pair.check()
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()


def calls_hooks(name, kwargs):
    pair, seen = Pair(name, kwargs), []
    pair.ours.register_step_pre_hook(lambda *unused: seen.append("before"))
    pair.ours.register_step_post_hook(lambda *unused: seen.append("after"))
    pair.step(1)
    assert seen == ["before", "after"]


def does_nothing_without_gradients(name, kwargs):
    pair = Pair(name, kwargs)
    before = [param.detach().clone() for param in pair.our_params]
    pair.ours.step()
    assert all(torch.equal(*values) for values in zip(before, pair.our_params, strict=True))


WAYS = (trains, is_saved_and_loaded, loads_torchs_state, loads_an_older_state, has_groups, gets_a_group_later,
        follows_a_schedule, calls_hooks, does_nothing_without_gradients)  # fmt: skip


VERSION = ".".join(torch.__version__.split(".")[:2])
FAILS_IN_TORCH = {("2.11", "Adagrad", gets_a_group_later)}
"""Its Adagrad has no state for parameters that come later."""


def cases(name):
    """Every input in every way, and once with each of torch's implementations."""
    for each in infos()[name].optim_inputs_func("cpu"):
        for way in WAYS:
            if (VERSION, name, way) not in FAILS_IN_TORCH:
                yield way, each.kwargs
        for switch in infos()[name].supported_impls:
            yield trains, {**each.kwargs, switch: True}


REFUSED_CASES = {"Adagrad": 7, "Adam": 16, "AdamW": 16, "Muon": 0, "SGD": 9}
ACCEPTED_CASES = {"Adagrad": 0, "Adam": 4, "AdamW": 4, "Muon": 0, "SGD": 0}
PASSED_CASES = {
    "2.11": {"Adagrad": 77, "Adam": 52, "AdamW": 52, "Muon": 72, "SGD": 106},
    "2.13": {"Adagrad": 84, "Adam": 52, "AdamW": 52, "Muon": 72, "SGD": 106},
    "2.14": {"Adagrad": 84, "Adam": 52, "AdamW": 52, "Muon": 90, "SGD": 106},
    "2.15": {"Adagrad": 85, "Adam": 53, "AdamW": 53, "Muon": 91, "SGD": 107},
}
"""As docs/clients.md has them, of each version of torch."""


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED_CASES)
def test_cases_of_torch_pass_but_for_what_is_refused_by_name(name):
    counted = Counter(refused=0, accepted=0)
    for way, kwargs in cases(name):
        if refused := [key for key in REFUSED if kwargs.get(key)]:
            with pytest.raises(TypeError, match=f"{refused[0]} = True is not supported"):
                getattr(nvme_offload, f"Offload{name}")([torch.nn.Parameter(torch.ones(2, 2))], offload={}, **kwargs)
        else:
            way(name, kwargs)
        counted["refused" if refused else "passed"] += 1
    for each in infos()[name].optim_error_inputs_func("cpu", torch.float32):
        given, accepts = each.optimizer_error_input, any(key in each.error_regex for key in ACCEPTED)
        params = [torch.nn.Parameter(torch.randn(2, 2))] if given.params is None else given.params
        with warnings.catch_warnings():
            for kind in (UserWarning, FutureWarning):  # torch warns of what it will refuse, such as a set
                warnings.simplefilter("error", kind)
            if accepts:
                getattr(nvme_offload, f"Offload{name}")(params, offload=section(), **given.kwargs).close()
            else:
                with pytest.raises((each.error_type, TypeError, ValueError)):
                    getattr(nvme_offload, f"Offload{name}")(params, offload=section(), **given.kwargs)
        counted["accepted" if accepts else "passed"] += 1
    expected = {"passed": PASSED_CASES[VERSION][name], "refused": REFUSED_CASES[name], "accepted": ACCEPTED_CASES[name]}
    assert (counted, infos().keys()) == (expected, REFUSED_CASES.keys())
