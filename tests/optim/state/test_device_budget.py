"""State that stays on a device and is updated there: the bits of the CPU's kernel, in every mix of tiers."""

import math

import numpy as np
import pytest
import torch

from nvme_offload import ConfigError, FaultSpec, OffloadConfig, OffloadMuon
from nvme_offload.optim.kernels import KernelPool, make_segment
from nvme_offload.optim.layout.master import TILE_NUMEL
from nvme_offload.optim.rules.adagrad import Adagrad
from nvme_offload.optim.rules.adam import Adam
from nvme_offload.optim.rules.adamw import AdamW
from nvme_offload.optim.rules.lion import Lion
from nvme_offload.optim.rules.sgd import SGD
from nvme_offload.optim.updates.in_torch import CHUNK_NUMEL, OnAccelerator, update_run
from nvme_offload.optim.updates.work import RunTensors, StepScalars
from tests.optim.state.test_device_mirror import DTYPES, STEPS, trained
from tests.support.training import BLOCK, assert_same_bits, faulty_drive, params_of, set_grads

HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SGD_HYPER = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": False}
RULES = {
    "AdamW": (AdamW(), HYPER),
    "AdamW, mostly of the gradient": (AdamW(), {**HYPER, "betas": (0.3, 0.9)}),
    "Adam": (Adam(), HYPER),
    "Adam without decay": (Adam(), {**HYPER, "weight_decay": 0}),
    "Lion": (Lion(), HYPER),
    "SGD with momentum": (SGD(), SGD_HYPER),
    "SGD with Nesterov's": (SGD(), {**SGD_HYPER, "dampening": 0, "nesterov": True}),
    "SGD": (SGD().of({"momentum": 0}), {**SGD_HYPER, "momentum": 0}),
    "Adagrad": (Adagrad(), {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-10}),
}
NUMEL = TILE_NUMEL + 1234
THERE = OnAccelerator()


def wild(numel, seed):
    """Numbers of every magnitude, some of any bits."""
    generator = torch.Generator().manual_seed(seed)
    any_bits = torch.randint(-(2**31), 2**31 - 1, (numel,), generator=generator, dtype=torch.int32).view(torch.float32)
    plain = torch.randn(numel, generator=generator)
    return torch.where(torch.rand(numel, generator=generator) < 0.2, any_bits, plain)


def weights(dtype, rule, pool):
    """Parameter, what is beside it, and fresh states."""
    param = torch.empty(NUMEL, dtype=dtype)
    lower = {torch.bfloat16: torch.empty(NUMEL, dtype=torch.uint16), torch.float16: torch.empty(NUMEL)}.get(dtype)
    if lower is None:
        param.copy_(wild(NUMEL, 1))
    else:
        pool.divide(wild(NUMEL, 1), param, lower)
    return param, lower, [torch.zeros(NUMEL) for _ in rule.states]


def gradient(step, dtype):
    grad = wild(NUMEL, 10 + step) * 0.1
    grad[::97], grad[5::1001], grad[7::1003], grad[9::501] = 0.0, math.inf, math.nan, 1e-40
    return grad.to(dtype)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_give_the_bits_of_the_kernel(name, dtype):
    """Also of infinities, NaNs and denormals, and where somebody else changed a tile."""
    (rule, group), pool = RULES[name], KernelPool(1)
    ours, theirs = weights(dtype, rule, pool), weights(dtype, rule, pool)
    is_half = dtype is not torch.float32
    sums, known = (THERE.tile_checksums(ours[0]), pool.tile_checksums(theirs[0])) if is_half else (None, None)
    for step, grad_dtype in enumerate((torch.bfloat16, torch.float16, torch.float32), start=1):
        if step == 2 and is_half:
            ours[0][7] = theirs[0][7] = 1.5
        grad, scalars, scale = gradient(step, grad_dtype), rule.scalars(group, step), float(np.float32(0.7))
        run = RunTensors(ours[0], grad, ours[1], ours[2], sums, StepScalars(scalars, scale))
        segment = make_segment(
            param=theirs[0], grad=grad, master=theirs[1], states=theirs[2], checksums=known, rule=rule,
            scalars=scalars, grad_scale=scale,
        )  # fmt: skip
        assert (
            int(update_run(rule.update, run, THERE, CHUNK_NUMEL))
            == sum(pool.update([segment]))
            == (step == 2 and is_half)
        )
        flat = [[part for part in (each[0], each[1], *each[2]) if part is not None] for each in (ours, theirs)]
        for one, other in zip(*flat, strict=True):
            as_int = {2: torch.int16, 4: torch.int32}[one.element_size()]
            assert torch.equal(one.view(as_int), other.view(as_int))


def test_halves_are_those_of_the_kernel():
    values, pool = wild(1 << 18, 3), KernelPool(1)
    hi, lo = torch.empty(len(values), dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.uint16)
    expected = torch.empty_like(hi), torch.empty_like(lo)
    THERE.divide(values, hi, lo)
    pool.divide(values, *expected)
    assert torch.equal(hi.view(torch.int16), expected[0].view(torch.int16))
    assert torch.equal(lo.view(torch.int16), expected[1].view(torch.int16))
    assert torch.equal(THERE.join(hi, lo).view(torch.int32), pool.joined(*expected).view(torch.int32))


def test_a_changed_element_shows():
    param = wild(2 * TILE_NUMEL + 5, 4).bfloat16()
    before = THERE.tile_checksums(param)
    assert before.shape == (3,)
    for place in (0, TILE_NUMEL - 1, TILE_NUMEL, 2 * TILE_NUMEL + 4):
        changed = param.clone()
        changed.view(torch.int16)[place] ^= 1
        assert (THERE.tile_checksums(changed) != before).nonzero().flatten().tolist() == [place // TILE_NUMEL]
    swapped = param.clone()
    swapped[[3, 4]] = param[[4, 3]]
    assert THERE.tile_checksums(swapped)[0] != before[0]


MIXES = {
    "all on the device": {"state": "cpu", "device_budget": "1GiB"},
    "device and host": {"state": "cpu", "device_budget": "2MiB"},
    "device and nvme": {"device_budget": "2MiB"},
    "device, host and nvme": {"device_budget": "1MiB", "host_budget": "8MiB"},
}


QUICK = "device, host and nvme"


@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MIXES if name != QUICK)]
)
def test_every_mix_has_the_bits_of_the_cpu(make_adamw, late, name):
    expected, state, _ = trained(make_adamw, "cpu", state="cpu", clip=0.0)
    seen, late_state, stats = trained(make_adamw, "late", **MIXES[name])
    assert_same_bits(seen, expected)
    assert_same_bits(late_state, state)
    assert stats.steps == STEPS
    on_device, on_host = stats.device_state_bytes, stats.host_state_bytes
    assert 0 < on_device <= stats.state_bytes
    assert (on_device == stats.state_bytes) == (name == "all on the device")
    assert (on_host > 0) == ("host" in name)
    assert (stats.bytes_written > 0) == ("nvme" in name)


def on_device(make_adamw, shapes, dtypes=DTYPES, device="cpu", budget="1GiB", **more):
    """An optimizer over parameters on the stand-in, and those."""
    params = [torch.nn.Parameter(param.detach().to("late")) for param in params_of(shapes, *dtypes)]
    return make_adamw(params, device, device_budget=budget, sub_group_size=65536, **more), params


def take_steps(optimizer, params, shapes, numbers, dtypes=DTYPES):
    """With gradients from the number of the step."""
    for number in numbers:
        host = params_of(shapes, *dtypes)
        set_grads(host, number)
        for parameter, twin in zip(params, host, strict=True):
            parameter.grad = twin.grad.to(parameter.device)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in params], optimizer.state_dict()["state"]


SHAPES = [(700,), (3 * BLOCK + 5,), (257, 300)]


@pytest.mark.parametrize("there", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_state_dicts_go_from_any_mix_to_any_other(make_adamw, late, there):
    """Saved by one and loaded by the other: the same bits, then and in the next step."""
    host = params_of(SHAPES, *DTYPES)
    mixed, params = on_device(make_adamw, SHAPES, device="nvme", budget="2MiB")
    plain = make_adamw(host, "cpu")
    source, target = ((mixed, params), (plain, host)) if there else ((plain, host), (mixed, params))
    take_steps(*source, SHAPES, range(2))
    saved = source[0].state_dict()
    take_steps(*target, SHAPES, [7])
    with torch.no_grad():
        for parameter, twin in zip(target[1], source[1], strict=True):
            parameter.copy_(twin)
    target[0].load_state_dict(saved)
    assert_same_bits(target[0].state_dict()["state"], saved["state"])
    assert_same_bits(take_steps(*target, SHAPES, [2, 3]), take_steps(*source, SHAPES, [2, 3]))
    assert 0 < mixed.stats().device_state_bytes < mixed.stats().state_bytes


def test_weights_that_somebody_changed_count_as_on_the_cpu(make_adamw, late):
    dtypes, counted, found = (torch.bfloat16, torch.float16, torch.float32), [], []
    mixed, params = on_device(make_adamw, SHAPES)
    host = params_of(SHAPES, *dtypes)
    for optimizer, its_params in ((mixed, params), (make_adamw(host, "cpu"), host)):
        take_steps(optimizer, its_params, SHAPES, [0])
        its_params[0].data[3] = 0.25
        its_params[1].data[[5, 2 * BLOCK]] = -0.5
        before = optimizer.state_dict()["state"]
        with pytest.warns(RuntimeWarning, match="3 tiles of 65536 elements were changed"):
            found.append((before, take_steps(optimizer, its_params, SHAPES, [1, 2])))
        counted.append(optimizer.stats().resplit_blocks)
    assert counted == [3, 3]
    assert_same_bits(*found)


@pytest.mark.slow
def test_a_step_that_stops_halfway_is_finished(make_adamw, late):
    expected, _, _ = trained(make_adamw, "cpu")
    with faulty_drive(FaultSpec(seed=3, eio=0.04)):
        seen, _, _ = trained(make_adamw, "late", device_budget="1MiB")
    assert_same_bits(seen, expected)


def test_the_host_waits_no_more_for_more_subgroups(make_adamw, late):
    """Once for the norm, and once for what was found changed."""
    counted = []
    for blocks in (1, 4):
        optimizer, params = on_device(make_adamw, [(blocks * BLOCK,)], DTYPES[:1], clip=1.0)
        grad = params_of([(blocks * BLOCK,)], torch.bfloat16)[0].detach()
        for _ in range(2):
            params[0].grad = grad.to("late")
            late.waits.clear()
            optimizer.step()
        counted.append(late.waits.total())
        assert not optimizer.store.mirror.is_in_use
    assert counted == [2, 2]


def test_gradients_that_have_left_the_device_come_back(make_adamw, late):
    """As with `offload_gradients`: the update takes them from the host."""
    rule, pool = AdamW(), KernelPool(1)
    param, lower, states = weights(torch.bfloat16, rule, pool)
    there = [tensor.to("late") for tensor in (param, lower, *states)]
    scalars, grad = StepScalars(rule.scalars(HYPER, 1), 0.5), gradient(1, torch.bfloat16)
    for tensors in ((param, lower, states), (there[0], there[1], there[2:])):
        run = RunTensors(tensors[0], grad, tensors[1], tensors[2], THERE.tile_checksums(tensors[0]), scalars)
        update_run(rule.update, run, THERE, CHUNK_NUMEL)
    assert torch.equal(there[0].cpu().view(torch.int16), param.view(torch.int16))
    assert torch.equal(there[1].cpu().view(torch.int16), lower.view(torch.int16))


def test_whole_matrices_stay_with_the_host(late):
    matrix, rest = (torch.nn.Parameter(torch.randn(shape).to("late")) for shape in ((64, 64), (64,)))
    section = {"device_budget": "1GiB", "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    groups = [{"params": [matrix]}, {"params": [rest], "rule": "AdamW"}]
    with OffloadMuon(groups, offload=section) as optimizer:
        optimizer.place()
        assert [slot.home.on_device for slot in optimizer.store.slots] == [False, True]
        assert 0 < optimizer.stats().device_state_bytes < optimizer.stats().host_state_bytes


def test_where_it_cannot_be_it_is_refused(make_adamw):
    optimizer = make_adamw(params_of([(100,)], torch.bfloat16), "cpu", device_budget="1GiB")
    with pytest.raises(ConfigError, match=r"device_budget = 1 GiB: the parameters are on the CPU"):
        optimizer.place()
    drive = {"device": "nvme", "nvme_path": "."}
    for more, words in (
        ({"offload_param": drive}, 'offload_param.device = "nvme" takes it from there'),
        ({"offload_optimizer": {**drive, "durable": True}}, "a durable run writes all of it"),
    ):
        with pytest.raises(ConfigError, match=words):
            OffloadConfig.from_dict({"zero_optimization": {"stage": 3, **more}, "device_budget": "1GiB"})
