"""The twin itself, against torch and against the definition of the split."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_offload.optim.rules.adamw_reference import AdamWScalars, adamw_reference, join_reference, split_reference

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def one_torch_thread():
    """torch's OpenMP threads spin while they wait, which on a busy machine costs more than they bring."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    "options",
    [{}, {"betas": (0.0, 0.99)}, {"betas": (0.3, 0.9)}, {"weight_decay": 0.0}, {"maximize": True}],
    ids=["default", "beta1=0", "beta1<0.5", "no decay", "maximize"],
)
def test_stays_with_torch_for_loop_adamw(options):
    settings = {**SETTINGS, **options}
    generator = torch.Generator().manual_seed(0)
    reference = torch.nn.Parameter(torch.randn(10_007, generator=generator) * 0.02)
    optimizer = torch.optim.AdamW([reference], foreach=False, **settings)
    state = (reference.detach().numpy().copy(), np.zeros(10_007, np.float32), np.zeros(10_007, np.float32))
    for step in range(1, 101):
        grad = torch.randn(10_007, generator=generator) * 0.01
        reference.grad = grad.clone()
        optimizer.step()
        master, exp_avg, exp_avg_sq = state
        state = adamw_reference(master, grad.numpy(), exp_avg, exp_avg_sq, AdamWScalars.at_step(step=step, **settings))
    expected = reference.detach().double().numpy()
    difference = state[0].astype(np.float64) - expected
    assert np.linalg.norm(difference) <= 1e-6 * np.linalg.norm(expected)
    assert np.abs(difference).max() <= 1e-3 * settings["lr"]


def test_inputs_stay_as_they_are():
    arrays = [np.ones(10, np.float32) for _ in range(4)]
    results = adamw_reference(*arrays, AdamWScalars.at_step(step=1, **SETTINGS))
    assert all((array == 1).all() for array in arrays)
    assert all(result.dtype == np.float32 for result in results)


def test_scalars_are_rounded_once():
    scalars = AdamWScalars.at_step(step=3, grad_scale=1 / 3, maximize=True, **SETTINGS)
    assert scalars.decay == np.float32(1 - 1e-3 * 0.1)
    assert scalars.beta1_complement == np.float32(1 - 0.9)
    assert scalars.beta2_complement == np.float32(1 - 0.95)
    assert scalars.step_size == np.float32(1e-3 / (1 - 0.9**3))
    assert scalars.bias_correction2_sqrt == np.float32(math.sqrt(1 - 0.95**3))
    assert scalars.grad_scale == -np.float32(1 / 3)


def test_the_first_step_is_one():
    with pytest.raises(ValueError, match="step is 0"):
        AdamWScalars.at_step(step=0, **SETTINGS)


def test_a_nan_is_always_the_same_nan():
    grad = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    grad.view(np.uint32)[1] = 0xFFC12345
    zeros = np.zeros(4, np.float32)
    scalars = AdamWScalars.at_step(step=1, **SETTINGS)
    for result in adamw_reference(zeros, grad, zeros, zeros, scalars):
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
