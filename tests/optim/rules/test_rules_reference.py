"""The twins themselves, against torch and against the definition of the split."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_offload.optim.rules.adamw import AdamW
from nvme_offload.optim.rules.registry import rule_named
from tests.support.rules import CASES, VARIANTS
from tests.support.twins import join_reference, split_reference, step_reference, twin_of

GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("case", "changes"), VARIANTS, ids=str)
def test_stays_with_torch(case, changes):
    settings = {**case.settings, **changes}
    generator = torch.Generator().manual_seed(0)
    reference = torch.nn.Parameter(torch.randn(10_007, generator=generator) * 0.02)
    optimizer = case.make_torch([reference], **changes)
    rule, twin = rule_named(case.name).of(settings), twin_of(case.name)
    state = [reference.detach().numpy().copy()]
    state += [np.full(10_007, each.birth, np.float32) for each in rule.states]
    for step in range(1, 101):
        grad = torch.randn(10_007, generator=generator) * 0.01
        reference.grad = grad.clone()
        optimizer.step()
        scale = -1.0 if settings.get("maximize") else 1.0
        state = step_reference(twin, state[0], grad.numpy(), state[1:], rule.scalars(settings, step), scale)
    expected = reference.detach().double().numpy()
    difference = state[0].astype(np.float64) - expected
    assert np.linalg.norm(difference) <= 1e-6 * np.linalg.norm(expected)
    assert not case.smooth or np.abs(difference).max() <= 1e-3 * case.settings["lr"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inputs_stay_as_they_are(case):
    arrays = [np.ones(10, np.float32) for _ in range(2 + len(case.rule.states))]
    results = step_reference(
        twin_of(case.name), arrays[0], arrays[1], arrays[2:], case.rule.scalars(case.settings, 1), 0.5
    )
    assert all((array == 1).all() for array in arrays)
    assert all(result.dtype == np.float32 for result in results)
    assert len(results) == 1 + len(case.rule.states)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_scalar_is_an_fp32_number(case):
    for step in (1, 2, 1000):
        scalars = case.rule.scalars(case.settings, step)
        assert list(scalars) == [float(np.float32(value)) for value in scalars]


def test_scalars_of_adamw_are_rounded_once():
    scalars = AdamW().scalars(GROUP, 3)
    assert scalars.decay == np.float32(1 - 1e-3 * 0.1)
    assert scalars.beta1_complement == np.float32(1 - 0.9)
    assert scalars.beta2_complement == np.float32(1 - 0.95)
    assert scalars.step_size == np.float32(1e-3 / (1 - 0.9**3))
    assert scalars.bias_correction2_sqrt == np.float32(math.sqrt(1 - 0.95**3))


def test_the_first_step_is_one():
    with pytest.raises(ValueError, match="step is 0"):
        AdamW().scalars(GROUP, 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_nan_is_always_the_same_nan(case):
    grad = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    grad.view(np.uint32)[1] = 0xFFC12345
    zeros = [np.zeros(4, np.float32)] * len(case.rule.states)
    scalars = case.rule.scalars(case.settings, 1)
    for result in step_reference(twin_of(case.name), np.zeros(4, np.float32), grad, zeros, scalars):
        assert (result.view(np.uint32)[np.isnan(result)] == 0x7FC00000).all()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_split_is_the_nearest_bf16_and_lossless(patterns):
    values = np.array(patterns, np.uint32).view(np.float32)
    hi, lo = split_reference(values)
    joined = join_reference(hi, lo)
    nan = np.isnan(values)
    np.testing.assert_array_equal(joined.view(np.uint32)[~nan], values.view(np.uint32)[~nan])
    assert np.isnan(joined[nan]).all()
    assert not lo[nan].any()
    assert (hi[nan] & 0x0040).all()
    finite = values[np.isfinite(values) & (lo != 0x8000)]
    nearest = torch.from_numpy(finite).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(hi[np.isfinite(values) & (lo != 0x8000)], nearest)
