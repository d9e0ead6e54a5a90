"""The section with which DeepSpeed tests its NVMe offload, as it stands there: trains, saves, and goes on as it was."""

import warnings

import pytest
import torch
from torch import nn

from nvme_offload import initialize

HIDDEN, LAYERS, STEPS = 512, 2, 2


class SimpleModel(nn.Module):
    """Linears one after the other; the output is a classification."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))

    def forward(self, hidden, target):
        for linear in self.linears:
            hidden = linear(hidden)
        return nn.functional.cross_entropy(hidden, target)


def section(param_device, optimizer_device, folder):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param_device, "nvme_path": str(folder)},
            "offload_optimizer": {"device": optimizer_device, "nvme_path": str(folder)},
            "sub_group_size": 100,
            "stage3_max_live_parameters": 100,
            "stage3_param_persistence_threshold": 0,
        },
        "aio": {"block_size": 1048576},
    }


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.rand(1, HIDDEN, generator=generator).half(), torch.randint(HIDDEN, (1,), generator=generator)


def train(engine, numbers):
    for number in numbers:
        engine.backward(engine(*batch(number)))
        engine.step()


@pytest.mark.parametrize(
    "devices", [pytest.param(("cpu", "nvme"), marks=pytest.mark.slow), ("nvme", "nvme")], ids="-".join
)
def test_it_trains_saves_and_goes_on(alone, tmp_path, devices):
    losses = []
    (tmp_path / "zero").mkdir()  # DeepSpeed makes it; here a missing folder may be a drive that is not mounted
    for again in (False, True):
        torch.manual_seed(123)
        with warnings.catch_warnings(action="ignore"):  # of keys that have no meaning here
            engine = initialize(SimpleModel(), section(*devices, tmp_path / "zero"))
        with engine:
            if again:
                engine.load_checkpoint(tmp_path / "checkpoint")
            else:
                train(engine, range(STEPS))
                engine.save_checkpoint(tmp_path / "checkpoint")
            train(engine, range(STEPS, 2 * STEPS))
            assert engine.optimizer.stats().steps + engine.optimizer.stats().skipped_steps == (2 if again else 4)
            losses.append(engine(*batch(99)).item())
    assert losses[0] == losses[1]
