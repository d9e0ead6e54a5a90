"""A torch profile of a step reads itself: its parts have names."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from nvme_offload import initialize


def test_the_parts_of_a_step_are_named(alone, tmp_path):
    section = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
        "bf16": {"enabled": True},
        "overlap_step": "off",  # a profile is of the threads that it was begun in
    }
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with initialize(model, section) as engine, profile(activities=[ProfilerActivity.CPU]) as profiled:
        engine.backward(engine(torch.ones(2, 64)).float().sum())
        engine.step()
    names = {event.key for event in profiled.key_averages() if event.key.startswith("nvme_offload: ")}
    assert names == {f"nvme_offload: {part}" for part in ("gather", "norm", "read", "update", "write")}
