"""The scalars of a step: numbers of fp32, each rounded once."""

import math

import numpy as np
import pytest

from tests.support.rules import CASES, NAMES

GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_scalar_is_an_fp32_number(case):
    for step in (1, 2, 1000):
        scalars = case.rule.scalars(case.settings, step)
        assert list(scalars) == [float(np.float32(value)) for value in scalars]


def test_scalars_of_adamw_are_rounded_once():
    scalars = NAMES["AdamW"].rule.scalars(GROUP, 3)
    assert scalars.decay == np.float32(1 - 1e-3 * 0.1)
    assert scalars.beta1_complement == np.float32(1 - 0.9)
    assert scalars.beta2_complement == np.float32(1 - 0.95)
    assert scalars.step_size == np.float32(1e-3 / (1 - 0.9**3))
    assert scalars.bias_correction2_sqrt == np.float32(math.sqrt(1 - 0.95**3))


def test_the_first_step_is_one():
    with pytest.raises(ValueError, match="step is 0"):
        NAMES["AdamW"].rule.scalars(GROUP, 0)
