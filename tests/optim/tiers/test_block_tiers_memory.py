"""Memory by formula: with everything on NVMe no structure holds all parameters or all gradients."""

import json

import pytest

from tests.support.training import run_child

CODE = """
import gc, json, sys
import torch
from nvme_offload import initialize
from nvme_offload.perf.measure.training import layered_model

LAYERS, WIDTH = 10, 1024

def resident(field="VmRSS"):
    gc.collect()
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
config = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {**nvme, "buffer_count": 2, "staging_budget": "32MiB"},
        "offload_param": {**nvme, "buffer_count": 2},
    },
    "offload_gradients": {**nvme, "buffer_count": 2},
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
}

def train(engine, steps, width=WIDTH):
    for _ in range(2 * steps):
        engine.backward(engine(torch.randn(8, width)).float().square().mean())
        engine.step()

with initialize(layered_model(2, 16), config) as engine:
    train(engine, 1, 16)  # what torch takes once and for all
before = resident()
model = layered_model(LAYERS, WIDTH)
numel = sum(parameter.numel() for parameter in model.parameters())
with initialize(model, config) as engine:
    del model
    after = resident()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    train(engine, 3)
    peak = resident("VmHWM")
    staging = engine.optimizer.stats().staging_bytes
print(json.dumps({"numel": numel, "layer": numel // LAYERS, "staging": staging, "taken": after - before,
                  "peak": peak - before}))
"""


@pytest.mark.slow
def test_memory_is_the_staging_buffers_and_the_group_at_work(tmp_path):
    # Without the threshold, malloc keeps freed memory of this size for later.
    prefix = ("env", "MALLOC_MMAP_THRESHOLD_=65536", "OMP_NUM_THREADS=2")
    seen = json.loads(run_child(CODE, tmp_path, timeout=900, prefix=prefix).splitlines()[-1])
    slack = 24 << 20
    assert seen["taken"] <= seen["staging"] + slack, seen
    assert seen["peak"] <= seen["staging"] + 14 * seen["layer"] + slack, seen
    assert 2 * seen["numel"] > 14 * seen["layer"] + slack, "the upper halves alone would show"
