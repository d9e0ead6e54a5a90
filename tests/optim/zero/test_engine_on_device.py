"""The engine around a model on a device: the losses, norms and bits of the CPU, wherever gradients are kept."""

import json

import pytest

from tests.support.late_device.mutations import OF_GRADIENTS
from tests.support.training import run_child

CODE = "import runpy, sys; sys.argv[0] = ''; runpy.run_module('tests.support.late_device.engine', run_name='__main__')"
DRIVE = {"device": "nvme", "nvme_path": "DRIVE"}


def section(gradients, state="cpu", accumulation=1, **more):
    return {
        "zero_optimization": {"stage": 3, "offload_optimizer": DRIVE if state == "nvme" else {"device": "cpu"}},
        "offload_gradients": DRIVE if gradients == "nvme" else {"device": gradients},
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.05,
        **more,
    }


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 1024.0}}
SECTIONS = {
    "host memory, bf16, added up": section("cpu", accumulation=2, **BF16),
    "nvme, fp32, added up": section("nvme", "nvme", 2),
}
MORE = {
    "nothing moved, bf16": section("none", **BF16),
    "nothing moved, fp32, state on nvme": section("none", "nvme"),
    "host memory, fp32": section("cpu"),
    "host memory, fp16, state on nvme": section("cpu", "nvme", **FP16),
    "nvme, bf16, two buffers": section("nvme", **BF16) | {"offload_gradients": {**DRIVE, "buffer_count": 2}},
    "nvme, fp16, added up, checksums": section("nvme", "nvme", 3, **FP16, aio={"checksums": True}),
    "nvme with a budget, bf16": section("nvme", "nvme", 2, **BF16, host_budget="24MiB"),
    "nvme, nothing pinned": section("nvme", accumulation=2, **BF16)
    | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
}


def trained(sections, mutation=""):
    return json.loads(run_child(CODE, json.dumps(sections), mutation, timeout=280))


def assert_same(expected, found):
    assert found["losses"] == expected["losses"]
    assert found["digest"] == expected["digest"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-12)


def test_training_on_a_device_gives_the_bits_of_the_cpu():
    for expected, found in trained(list(SECTIONS.values())):
        assert_same(expected, found)
        assert found["norms"] == expected["norms"]  # the sums are the CPU's
        assert max(found["growth"]) <= 8  # a loss, but no gradient


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_mixes_of_tiers(name):
    [(expected, found)] = trained([MORE[name]])
    assert_same(expected, found)
    if name.startswith("nothing"):
        assert min(found["growth"]) > 4 * 48 * 48 * 2  # there they are


@pytest.mark.slow
@pytest.mark.parametrize("mutation", OF_GRADIENTS)
def test_a_mistake_with_gradients_on_their_way_is_found(mutation):
    mixed = section("nvme", "nvme", 3, **BF16) | {"offload_gradients": {**DRIVE, "buffer_count": 3}}
    with pytest.raises(AssertionError):  # other numbers, or an assertion in the process that trains
        assert_same(*trained([mixed], mutation)[0])
