"""What saving, loading and exporting take: memory for a few items, whatever the state's size; each byte moved once."""

import json

import pytest

from tests.support.training import run_child

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
