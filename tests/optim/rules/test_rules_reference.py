"""The twins themselves, against torch and against the definition of the split."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_offload.optim.rules.adamw import AdamW
from tests.support.rules import CASES
from tests.support.twins import join_reference, split_reference

GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


pytestmark = pytest.mark.usefixtures("one_thread")


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
