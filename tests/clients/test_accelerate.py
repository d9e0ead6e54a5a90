"""accelerate around an ordinary loop: clipping, accumulation, schedules, checkpoints, mixed precision."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from nvme_offload import OffloadAdamW
from tests.support.accelerated import forget
from tests.support.clients import client
from tests.support.training import section

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def train(acc, model, optimizer, schedule, steps, seed):
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        with acc.accumulate(model):
            loss = model(torch.randn(8, 16)).float().square().mean()
            acc.backward(loss)
            if acc.sync_gradients:
                acc.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def run(make, folder, **options):
    """Losses of ten steps; the last four once more from a checkpoint."""
    forget()
    acc = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = make(model.parameters())
    model, optimizer, schedule = acc.prepare(
        model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    )
    first = train(acc, model, optimizer, schedule, 6, seed=1)
    acc.save_state(folder)
    second = train(acc, model, optimizer, schedule, 4, seed=2)
    acc.load_state(folder)
    assert train(acc, model, optimizer, schedule, 4, seed=2) == second
    forget()
    return first + second


@client("accelerate", "loop with clipping, accumulation, schedule, bf16, `save_state`, `load_state`")
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"mixed_precision": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=["twice", "plain", "bf16"],
)
def test_a_loop_has_torch_adamws_losses_and_resumes(tmp_path, options):
    drive = tmp_path / "drive"
    drive.mkdir()
    made = []

    def ours(params):
        made.append(OffloadAdamW(params, **SETTINGS, offload=section(drive)))
        return made[-1]

    theirs = run(lambda params: torch.optim.AdamW(params, **SETTINGS), tmp_path / "theirs", **options)
    assert run(ours, tmp_path / "ours", **options) == pytest.approx(theirs, abs=1e-6, rel=0)
    made[0].close()
