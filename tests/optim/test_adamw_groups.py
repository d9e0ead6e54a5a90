"""Parameter groups that come, go and change during training, and lists of parameters that cannot be optimized."""

import math
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from nvme_offload import ClosedError, ConfigError, OffloadAdamW, OffloadConfig, OffloadMuon, OutOfSpaceError
from tests.support.training import (
    BLOCK,
    SETTINGS,
    Twin,
    assert_same_bits,
    bits,
    param,
    params_of,
    section,
    set_grads,
    snapshot,
    take_steps,
)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("numel", [10, 200_003], ids=["small", "much larger"])
def test_a_group_added_in_mid_training(make_adamw, device, numel):
    params = params_of([(70_000,), (5,)], torch.bfloat16)
    twin = Twin([*params, param((numel,), seed=9)])
    twin.own_settings = {2: {"lr": 1e-2, "weight_decay": 0.0}}
    optimizer = make_adamw(params, device, clip=1.0, sub_group_size=1 << 22)
    twin.clip = 1.0
    optimizer.place()
    staging = optimizer.stats().staging_bytes
    for step in range(6):
        if step == 3:
            params.append(param((numel,), seed=9))
            optimizer.add_param_group({"params": [params[-1]], "lr": 1e-2, "weight_decay": 0.0})
        set_grads(params, step)
        twin.step([p.grad for p in params] + [None] * (3 - len(params)))
        optimizer.step()
    assert len(optimizer.param_groups) == 2
    twin.assert_equals(optimizer)
    if device == "nvme":
        assert (optimizer.stats().staging_bytes > staging) == (numel > 70_000)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_parameter_may_get_other_memory_between_steps(make_adamw, device):
    """As after `module.to(...)` and back: what is prepared for a parameter has to follow."""
    params = params_of([(70_000,), (5,), (33,)], torch.bfloat16)
    twin = Twin(params)
    optimizer = make_adamw(params, device, sub_group_size=1 << 22)
    for step in range(4):
        old = params[step % 3].data
        params[step % 3].data = old.clone()
        before = old.clone()
        take_steps(optimizer, params, step, twin=twin)
        assert_same_bits(old, before)
    twin.assert_equals(optimizer)


def refusals():
    linear = nn.Linear(4, 4)
    base = torch.zeros(100)
    shared = [nn.Parameter(base[:60]), nn.Parameter(base[50:])]
    twice = nn.Parameter(torch.zeros(5))
    yield "integers", [nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)], ValueError, "int64"
    yield "float64", [nn.Parameter(torch.zeros(3, dtype=torch.float64))], ValueError, "float64.*bfloat16"
    yield "complex", [nn.Parameter(torch.zeros(3, dtype=torch.complex64))], ValueError, "complex64"
    yield "overlap", shared, ValueError, "parameter 0 of group 0 and parameter 1 of group 0 share memory"
    yield "twice in two groups", [{"params": [twice]}, {"params": [twice]}], ValueError, "more than one parameter group"
    yield "gaps", [nn.Parameter(torch.zeros(4, 4)[:, :3])], ValueError, r"gaps in memory.*contiguous\(\)"
    yield "expanded", [nn.Parameter(torch.zeros(1).expand(4))], ValueError, "gaps in memory"
    yield "sparse", [nn.Parameter(torch.eye(3).to_sparse())], ValueError, "layout torch.sparse_coo"
    yield "meta", [nn.Parameter(torch.zeros(3, device="meta"))], ValueError, "on meta"
    yield "empty list", [], ValueError, "AdamW: params is empty.* gives its parameters once"
    yield "a set", {*linear.parameters()}, TypeError, r"params = a set: pass model.parameters\(\), or a list"
    yield "a set in a group", [{"params": frozenset(linear.parameters())}], TypeError, "ordered collections"
    yield "a module", linear, TypeError, r"params = a Linear: pass model.parameters\(\)"
    yield "a tensor", torch.zeros(3), TypeError, "iterable"
    yield "not a leaf", [linear.weight * 2], ValueError, "non-leaf"
    yield "a number", [3.0], TypeError, "Tensors"


@pytest.mark.parametrize(
    ("params", "error", "words"), [case[1:] for case in refusals()], ids=[c[0] for c in refusals()]
)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_parameters_that_cannot_be_optimized(make_adamw, device, params, error, words):
    with pytest.raises(error, match=words):
        make_adamw(params, device)


@pytest.mark.parametrize("kind", [OffloadAdamW, OffloadMuon])
def test_an_optimizer_without_a_section_says_what_to_write(kind):
    with pytest.raises(TypeError, match=rf"{kind.__name__}: offload= is missing: name a folder on a drive"):
        kind([param((5,))])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_the_same_parameter_twice_in_a_group_warns_as_torch_does_and_is_updated_once(make_adamw):
    p, q = param((5,)), param((5,))
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.warns(RuntimeWarning, match="group 0 has a parameter twice: a step updates it once"),
    ):
        twice = make_adamw([p, p])
    once = make_adamw([q])
    for step in range(2):
        for each, optimizer in ((p, twice), (q, once)):
            take_steps(optimizer, [each], step)
    assert torch.equal(p, q)
    assert twice.state_dict()["param_groups"][0]["params"] == [0, 0]
    twice.load_state_dict(twice.state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": float("nan")}, r"group 0: lr = nan"),
        ({"eps": float("inf")}, "eps = inf"),
        ({"betas": (0.9, 1.0)}, r"betas = \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, "betas"),
        ({"betas": 0.9}, r"group 0: betas = 0\.9: must be two numbers"),
        ({"lr": None}, r"group 0: lr = None: must be a finite number"),
        ({"lr": torch.ones(2)}, "lr = tensor"),
    ],
)
def test_hyperparameters_out_of_range(make_adamw, options, words):
    with pytest.raises(ValueError, match=words):
        make_adamw([param((5,))], **options)


def test_the_section_is_taken_in_every_form(tmp_path, drive):
    file = tmp_path / "offload.json"
    file.write_text(OffloadConfig.from_dict(section(None)).model_dump_json(exclude_unset=True))
    for form in (section(drive), OffloadConfig.from_dict(section(drive)), file, str(file), {}):
        OffloadAdamW([param((5,))], offload=form).close()
    with pytest.raises(ConfigError, match="zero_optimizatoin"):
        OffloadAdamW([param((5,))], offload={"zero_optimizatoin": {}})


def test_staging_buffers_too_small_for_a_block(drive):
    config = section(drive)
    config["zero_optimization"]["offload_optimizer"]["staging_budget"] = "1MiB"
    with pytest.raises(ConfigError, match=r"staging_budget = .*4 staging buffers.*write at least 3 MiB"):
        OffloadAdamW([param((5,))], offload=config)
    config["zero_optimization"]["offload_optimizer"]["staging_budget"] = "3MiB"
    OffloadAdamW([param((5 * BLOCK,))], offload=config).close()


def test_a_group_that_finds_no_space_leaves_nothing_behind(make_adamw, monkeypatch):
    params = params_of([(300,)], torch.bfloat16)
    optimizer = make_adamw(params)
    take_steps(optimizer, params, 0)
    before = snapshot(optimizer)
    full = Mock(side_effect=OutOfSpaceError(path="swap", needed_bytes=1, free_bytes=0))
    late = param((70_000,))
    with monkeypatch.context() as patch:
        patch.setattr(optimizer.store.tier.space, "allocate_all", full)
        with pytest.raises(OutOfSpaceError):
            optimizer.add_param_group({"params": [late]})
    assert late not in optimizer.state
    assert len(optimizer.param_groups) == 1
    assert_same_bits(snapshot(optimizer), before)
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert float(optimizer.state[late]["step"]) == 1


def bad_gradients():
    yield "sparse", lambda p: torch.zeros_like(p).to_sparse(), "is sparse.*SparseAdam"
    yield "float64", lambda p: torch.zeros_like(p, dtype=torch.float64), "float64: it must be float32, bfloat16"
    yield "complex", lambda p: torch.zeros_like(p, dtype=torch.complex64), "complex64"


@pytest.mark.parametrize(("grad_of", "words"), [c[1:] for c in bad_gradients()], ids=[c[0] for c in bad_gradients()])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_gradients_that_cannot_be_used_change_nothing(make_adamw, device, grad_of, words):
    params = params_of([(70_000,), (3, 4)], torch.float32)
    params[1].grad_dtype = None
    optimizer = make_adamw(params, device)
    take_steps(optimizer, params, 0)
    before = snapshot(optimizer)
    set_grads(params, 1)
    params[1].grad = grad_of(params[1])
    with pytest.raises(ValueError, match=f"gradient of parameter 1 of group 0 is.*{words.removeprefix('is ')}"):
        optimizer.step()
    assert_same_bits(snapshot(optimizer), before)
    take_steps(optimizer, params, 1)
    assert optimizer.stats().steps == 2


def test_a_gradient_of_another_shape(make_adamw):
    p = param((3, 4), torch.float32)
    optimizer = make_adamw([p])
    p.grad = torch.zeros(3, 4)
    p.grad.data = torch.zeros(12)
    with pytest.raises(ValueError, match=r"gradient of parameter 0 of group 0 has shape \(12,\).*\(3, 4\)"):
        optimizer.step()


@pytest.mark.parametrize(
    "convert",
    [
        lambda p: p.detach().to(memory_format=torch.channels_last),
        lambda p: p.detach().to(torch.bfloat16),
        lambda p: p.detach()[:1].clone(),
        lambda p: p.detach().flatten(),
    ],
    ids=["order of memory", "dtype", "number of elements", "shape"],
)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_parameter_converted_after_construction_is_refused_before_anything_changes(make_adamw, device, convert):
    """Its state was laid out for what it was: used with what it is, moments would silently meet other weights."""
    params = [param((300,), torch.float32), param((2, 3, 4, 5), torch.float32)]
    optimizer = make_adamw(params, device)
    take_steps(optimizer, params, 0)
    before = params[0].detach().clone()
    optimizer.zero_grad()
    params[1].data = convert(params[1])
    set_grads(params, 1)
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 .*after"):
        optimizer.step()
    assert_same_bits(params[0].detach(), before)


def test_use_after_close(drive):
    params = params_of([(300,)], torch.bfloat16)
    optimizer = OffloadAdamW(params, offload=section(drive), **SETTINGS)
    take_steps(optimizer, params, 0)
    state = optimizer.state_dict()
    optimizer.close()
    optimizer.close()
    assert list(drive.iterdir()) == []
    for call in (
        optimizer.step,
        optimizer.finish_step,
        optimizer.synchronize,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(state),
        lambda: optimizer.add_param_group({"params": [param((3,))]}),
        lambda: optimizer.state[params[0]]["exp_avg"],
        lambda: optimizer.state[params[0]].update(exp_avg=torch.zeros(300)),
    ):
        with pytest.raises(ClosedError, match="OffloadAdamW is closed"):
            call()
    assert optimizer.stats().steps == 1
    optimizer.zero_grad()


def test_two_optimizers_of_one_parameter_are_refused_while_both_are_open(drive):
    def trained(path):
        optimizer = OffloadAdamW([("own", param((5,))), ("shared", shared)], offload=section(path), **SETTINGS)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)  # which holds the optimizer, and the other way round
        take_steps(optimizer, [shared], 0)
        scheduler.step()
        return optimizer

    shared = param((7,))
    first = trained(drive)
    before = shared.clone()
    with pytest.raises(ValueError, match="shared is trained by another OffloadAdamW, which is still open"):
        trained(drive)
    assert torch.equal(shared, before)
    first.step()
    first.close()
    trained(None)  # which nobody closes
    trained(drive).close()
    first = trained(drive)
    other = OffloadAdamW([shared], offload=section(None), **SETTINGS)
    with pytest.raises(ValueError, match="parameter 0 of group 0 is trained by another OffloadAdamW"):
        other.place()
    with other:
        first.close()
        other.step()
        assert float(other.state[shared]["step"]) == 1


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


@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"betas": 0.9}, {"params": [nn.Parameter(torch.zeros(3, dtype=torch.int32), False)]}]
)
def test_a_refused_group_leaves_nothing_behind_of_what_is_new_in_it_and_of_what_comes_back(make_adamw, bad):
    params, late = params_of(SHAPES, torch.bfloat16), param((4,))
    optimizer, twin = make_adamw(one_by_one(params)), Twin([*params, late])
    optimizer.place()
    optimizer.param_groups.pop()
    refused = {**bad, "params": [params[2], *bad.get("params", [late])]}
    with pytest.raises(ValueError, match="group 2"):
        optimizer.add_param_group(refused)
    assert len(optimizer.param_groups) == 2
    assert len(optimizer.state) == 3
    optimizer.add_param_group({"params": [params[2], late]})
    take_steps(optimizer, [*params, late], 0, twin=twin)
    twin.assert_equals(optimizer)


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
