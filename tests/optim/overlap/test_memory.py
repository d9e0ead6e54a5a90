"""Memory of steps whose updates go on behind them: in backward no more than with the plain order."""

import json

import pytest

from tests.support.training import run_child

CODE = """
import gc, json, sys
import torch
from torch import nn
from nvme_offload import initialize
from nvme_offload.perf.measure.training import layered_model

LAYERS, WIDTH = 12, 512

def resident(field="VmRSS"):
    gc.collect()
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
config = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {**nvme, "buffer_count": 3, "staging_budget": "64MiB"}},
    "bf16": {"enabled": True},
    "overlap_step": sys.argv[2],
}
if sys.argv[2] == "backward":
    config |= {"skip_non_finite": False}
model = layered_model(LAYERS, WIDTH)
numel = sum(parameter.numel() for parameter in model.parameters())
with initialize(model, config) as engine:
    del model
    peaks = []
    for step in range(5):
        loss = engine(torch.randn(8, WIDTH)).float().square().mean()
        before = resident()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        engine.backward(loss)
        peaks.append(resident("VmHWM"))
        del loss
        engine.step()
    engine.optimizer.synchronize()
    print(json.dumps({"peak": peaks[-1], "staging": engine.optimizer.stats().staging_bytes, "numel": numel}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_the_peak_in_backward_is_that_of_the_plain_order(tmp_path, mode):
    prefix = ("env", "MALLOC_MMAP_THRESHOLD_=65536", "OMP_NUM_THREADS=1")
    plain, ours = (
        json.loads(run_child(CODE, tmp_path, name, timeout=300, prefix=prefix).splitlines()[-1])
        for name in ("off", mode)
    )
    assert ours["staging"] == plain["staging"]
    all_gradients = 2 * ours["numel"]
    assert all_gradients > 40 << 20, "the gradients of the step before would show"
    assert ours["peak"] <= plain["peak"] + (12 << 20), (ours, plain)
