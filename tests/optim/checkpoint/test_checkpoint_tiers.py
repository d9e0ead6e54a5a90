"""Checkpoints of a run whose parameters and gradients are on tiers too: written from any, read onto any."""

import pytest

from nvme_offload import initialize
from tests.support.sharded_model import assert_same, full_state
from tests.support.small_engine import BF16, backward, fresh_model, section

PLACES = {"everything on NVMe": ("nvme", "nvme"), "parameters on NVMe": ("nvme", "none"), "memory": ("none", "none")}


def config_of(parameters, gradients, path):
    """State is where the parameters are."""
    config = section(path=path if parameters == "nvme" else None, **BF16)
    there = {"device": "nvme", "nvme_path": str(path)}
    if parameters == "nvme":
        config["zero_optimization"]["offload_param"] = there
    return {**config, "offload_gradients": there if gradients == "nvme" else {"device": "none"}}


def steps_of(engine, steps):
    for step in steps:
        backward(engine, 0, step)
        engine.step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_parameters_whose_rule_keeps_no_state(tmp_path, precision, place):
    """Beside an fp32 parameter there is nothing then: its subgroups are empty."""
    config = {**config_of(*place, tmp_path), "bf16": {"enabled": False}, **precision}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    with initialize(fresh_model(), config) as engine, initialize(fresh_model(), config) as other:
        steps_of(engine, range(2))
        steps_of(other, range(5, 6))
        engine.save_checkpoint(tmp_path / "saved")
        other.load_checkpoint(tmp_path / "saved")
        for step in range(2, 4):
            assert_same(full_state(other.module, other.optimizer), full_state(engine.module, engine.optimizer))
            steps_of(engine, [step])
            steps_of(other, [step])
