"""Checkpoints of runs on any tiers and devices: written from any, read onto any, and what that takes."""

import json

import pytest

from nvme_offload import initialize
from tests.support.sharded_model import assert_same, full_state
from tests.support.small_engine import BF16, backward, fresh_model, section
from tests.support.training import run_child

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


MiB = 2**20

STREAMED = """
import json, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
from torch import nn
from nvme_offload import initialize
from nvme_offload.perf.measure.machine import peak_resident_bytes, reset_peak_resident_bytes, settled_resident_bytes

torch.set_num_threads(1)
drive, root = Path(sys.argv[1]), Path(sys.argv[2])
offload = {"device": "nvme", "nvme_path": str(drive), "staging_budget": "40MiB", "buffer_count": 4}
section = {"zero_optimization": {"sub_group_size": 2**20, "offload_optimizer": offload}, "bf16": {"enabled": True}}
model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024), *(nn.Linear(1024, 1024) for _ in range(18)))
numel = sum(p.numel() for p in model.parameters())
with initialize(model, section) as engine:
    engine.backward(engine(torch.ones(1, 1024)).float().square().mean())
    engine.step()

    def growth(action):
        engine.optimizer.synchronize()
        before, bytes_before = engine.optimizer.stats(), settled_resident_bytes()
        reset_peak_resident_bytes()
        action()
        peak = peak_resident_bytes()
        after = engine.optimizer.stats()
        moved = after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written
        return peak - bytes_before, *moved

    engine.save_checkpoint(root, "first")  # what every first call takes: modules, caches, pickles
    engine.load_checkpoint(root)
    engine.export_safetensors(root / "first", max_shard_bytes="8MiB")
    actions = {
        "save": lambda: engine.save_checkpoint(root, "second"),
        "load": lambda: engine.load_checkpoint(root),
        "export": lambda: engine.export_safetensors(root / "export", max_shard_bytes="8MiB"),
    }
    result = {name: growth(action) for name, action in actions.items()}
json.dump({"numel": numel, **result}, sys.stdout)
"""


@pytest.mark.slow
def test_memory_for_a_few_items_and_every_byte_once(tmp_path):
    (tmp_path / "drive").mkdir()
    seen = json.loads(run_child(STREAMED, tmp_path / "drive", tmp_path / "root", timeout=300))
    numel = seen["numel"]
    # 16 items. An item is a section of a subgroup in fp32, 4 MiB; a file of the export and the largest weight are two.
    most = 16 * 4 * MiB
    assert most < 3 * numel, "the model is too small for this test to show anything: it has 12 bytes per parameter"
    limits = {"save": (10.1, 0), "load": (0, 10.1), "export": (10.1, 0)}  # of state per parameter, rounded to blocks
    for action, (bytes_read, bytes_written) in limits.items():
        growth, read, written = seen[action]
        assert growth < most, f"{action} took {growth} bytes"
        assert read <= bytes_read * numel
        assert written <= bytes_written * numel
    assert min(seen["save"][1], seen["load"][2]) > 9 * numel, "it did not go through the tier"
