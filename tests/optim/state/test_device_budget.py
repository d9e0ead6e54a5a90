"""State that stays on a device and is updated there: the bits of the CPU's kernel, in every mix of tiers."""

import math

import numpy as np
import pytest
import torch

from nvme_offload.optim.device_tiles import join, split, tile_sums, update_on_device
from nvme_offload.optim.kernels import KernelPool, make_segment
from nvme_offload.optim.layout.master import TILE_NUMEL
from nvme_offload.optim.rules.adagrad import Adagrad
from nvme_offload.optim.rules.adam import Adam
from nvme_offload.optim.rules.adamw import AdamW
from nvme_offload.optim.rules.lion import Lion
from nvme_offload.optim.rules.sgd import SGD
from nvme_offload.optim.tiles import RunTensors, StepScalars
from tests.optim.state.test_device_mirror import DTYPES, STEPS, trained
from tests.support.training import assert_same_bits

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
    sums, known = (tile_sums(ours[0]), pool.tile_checksums(theirs[0])) if is_half else (None, None)
    for step, grad_dtype in enumerate((torch.bfloat16, torch.float16, torch.float32), start=1):
        if step == 2 and is_half:
            ours[0][7] = theirs[0][7] = 1.5
        grad, scalars, scale = gradient(step, grad_dtype), rule.scalars(group, step), float(np.float32(0.7))
        run = RunTensors(ours[0], grad, ours[1], ours[2], sums, StepScalars(scalars, scale))
        segment = make_segment(
            param=theirs[0], grad=grad, master=theirs[1], states=theirs[2], checksums=known, rule=rule,
            scalars=scalars, grad_scale=scale,
        )  # fmt: skip
        assert int(update_on_device(rule, run)) == sum(pool.update([segment])) == (step == 2 and is_half)
        flat = [[part for part in (each[0], each[1], *each[2]) if part is not None] for each in (ours, theirs)]
        for one, other in zip(*flat, strict=True):
            as_int = {2: torch.int16, 4: torch.int32}[one.element_size()]
            assert torch.equal(one.view(as_int), other.view(as_int))


def test_halves_are_those_of_the_kernel():
    values, pool = wild(1 << 18, 3), KernelPool(1)
    hi, lo = torch.empty(len(values), dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.uint16)
    expected = torch.empty_like(hi), torch.empty_like(lo)
    split(values, hi, lo)
    pool.divide(values, *expected)
    assert torch.equal(hi.view(torch.int16), expected[0].view(torch.int16))
    assert torch.equal(lo.view(torch.int16), expected[1].view(torch.int16))
    assert torch.equal(join(hi, lo).view(torch.int32), pool.joined(*expected).view(torch.int32))


def test_a_changed_element_shows():
    param = wild(2 * TILE_NUMEL + 5, 4).bfloat16()
    before = tile_sums(param)
    assert before.shape == (3,)
    for place in (0, TILE_NUMEL - 1, TILE_NUMEL, 2 * TILE_NUMEL + 4):
        changed = param.clone()
        changed.view(torch.int16)[place] ^= 1
        assert (tile_sums(changed) != before).nonzero().flatten().tolist() == [place // TILE_NUMEL]
    swapped = param.clone()
    swapped[[3, 4]] = param[[4, 3]]
    assert tile_sums(swapped)[0] != before[0]


MIXES = {
    "all on the device": {"state": "cpu", "device_budget": "1GiB"},
    "device and host": {"state": "cpu", "device_budget": "2MiB"},
    "device and nvme": {"device_budget": "2MiB"},
    "device, host and nvme": {"device_budget": "1MiB", "host_budget": "8MiB"},
}


@pytest.mark.parametrize("name", MIXES)
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
