"""What saving, loading and exporting take: memory for a few items, whatever the state's size; each byte moved once."""

import json

import pytest

from tests.support.training import run_child

MiB = 2**20

STREAMED = """
import ctypes, gc, json, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
from torch import nn
from nvme_offload import initialize
from tests.support.own_resources import resident_bytes

torch.set_num_threads(1)
drive, root, num_layers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
offload = {"device": "nvme", "nvme_path": str(drive), "staging_budget": "40MiB", "buffer_count": 4}
section = {"zero_optimization": {"sub_group_size": 2**20, "offload_optimizer": offload}, "bf16": {"enabled": True}}
model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024), *(nn.Linear(1024, 1024) for _ in range(num_layers)))
numel = sum(p.numel() for p in model.parameters())
with initialize(model, section) as engine:
    engine.backward(engine(torch.ones(1, 1024)).float().square().mean())
    engine.step()

    def growth(action):
        engine.optimizer.synchronize()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would hide what is taken now
        before, bytes_before = engine.optimizer.stats(), resident_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        action()
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        after = engine.optimizer.stats()
        moved = after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written
        return int(peak.split()[1]) * 1024 - bytes_before, *moved

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


def check(tmp_path, num_layers):
    (tmp_path / "drive").mkdir()
    seen = json.loads(run_child(STREAMED, tmp_path / "drive", tmp_path / "root", num_layers, timeout=300))
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


def test_memory_for_a_few_items_and_every_byte_once(tmp_path):
    check(tmp_path, 18)


@pytest.mark.slow
def test_memory_for_a_few_items_at_size(tmp_path):
    check(tmp_path, 64)
