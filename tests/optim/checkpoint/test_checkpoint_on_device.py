"""Checkpoints of a run on a device: the files of one on the CPU, byte for byte; each goes on from the other's."""

import json

import pytest

from tests.support.training import run_child

MODULE = "tests.support.late_device.checkpoints"
CODE = f"import runpy, sys; sys.argv[0] = ''; runpy.run_module({MODULE!r}, run_name='__main__')"
BF16 = {"bf16": {"enabled": True}}


def section(durable=None, **more):
    kept = {"device": "nvme", "nvme_path": "DRIVE", "buffer_count": 2, **(durable or {})}
    return {
        "zero_optimization": {"stage": 3, "offload_optimizer": kept, "sub_group_size": 65536},
        "gradient_clipping": 0.05,
        **more,
    }


def everywhere(host_budget, **more):
    """State on the device, in host memory and on NVMe."""
    return section(device_budget="1500KiB", host_budget=host_budget, **more)


def runs_of(tmp_path, config):
    [found] = json.loads(run_child(CODE, str(tmp_path), json.dumps([config]), timeout=280))
    return found


def assert_all_same(runs):
    expected = runs["cpu from None"]
    assert len(expected["files"]) >= 7
    for run in runs.values():
        assert run["digest"] == expected["digest"]
        assert run["files"] == expected["files"]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(everywhere("5MiB", **BF16), id="bf16"),
        pytest.param(everywhere("3MiB"), id="fp32", marks=pytest.mark.slow),
        pytest.param(everywhere("3MiB", overlap_step="off"), id="inside the step", marks=pytest.mark.slow),
    ],
)
def test_state_on_the_device_in_memory_and_on_nvme(tmp_path, config):
    runs = runs_of(tmp_path, config)
    assert_all_same(runs)
    for name, run in runs.items():
        on_device, in_memory, in_all = run["kept"]
        assert (on_device > 0) == name.startswith("late")
        assert 0 < in_memory < in_all - on_device, "the rest is on NVMe"


@pytest.mark.slow
@pytest.mark.parametrize("more", [BF16, {}], ids=["bf16", "fp32"])
@pytest.mark.parametrize("log", [{}, {"rewrite_every": 3}], ids=["in turns", "a log"])
def test_in_the_background(tmp_path, more, log):
    """Of a durable run, whose state is on NVMe alone, while the next step is taken."""
    assert_all_same(runs_of(tmp_path, section({"durable": True, **log}, **more)))
