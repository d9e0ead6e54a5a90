"""The engine around a model on a GPU: upper halves and gradients stay there, lower halves and moments go to tiers."""

import pytest
import torch
from torch import nn

from nvme_offload import initialize
from tests.support.sharded_model import VOCABULARY, assert_same, full_state
from tests.support.small_engine import BF16, FP16, fresh_model, section

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("alone"),
]
STEPS = 4


def step_of(engine, step):
    """The losses; the same numbers on every device."""
    device, losses = next(engine.module.parameters()).device, []
    for micro in range(engine.gradient_accumulation_steps):
        generator = torch.Generator().manual_seed(10 * step + micro)
        tokens = torch.randint(0, VOCABULARY, (3, 7), generator=generator).to(device)
        logits = engine(tokens).float().flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, (tokens * 7 + 3).flatten() % VOCABULARY)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained(config, model, folder=None):
    """Losses, norms and the whole state on the CPU; with a folder also after a checkpoint was loaded again."""
    losses, norms = [], []
    with initialize(model, config) as engine:
        assert {param.device.type for param in engine.module.parameters()} == {"cuda"}
        for step in range(STEPS):
            losses += step_of(engine, step)
            norms.append(engine.get_global_grad_norm())
        state = {name: value.cpu() for name, value in full_state(engine.module, engine.optimizer).items()}
        if folder is not None:
            engine.save_checkpoint(folder)
            step_of(engine, 9)
            engine.load_checkpoint(folder)
            loaded = {name: value.cpu() for name, value in full_state(engine.module, engine.optimizer).items()}
            assert_same(loaded, state)
        return losses, norms, state


@pytest.mark.parametrize("mode", [{}, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_nvme_and_memory_give_the_same_bits(mode, tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir()
    nvme = trained(section(3, drive, **mode), fresh_model().cuda(), tmp_path / "checkpoint")
    cpu = trained(section(3, **mode), fresh_model().cuda())
    assert nvme[:2] == cpu[:2]
    assert_same(nvme[2], cpu[2])
    assert not list(drive.iterdir())


def test_it_follows_the_run_on_the_cpu():
    ours = trained(section(3, **BF16), fresh_model().cuda())
    with initialize(fresh_model(), section(3, **BF16)) as engine:
        for step in range(STEPS):
            step_of(engine, step)
        theirs = full_state(engine.module, engine.optimizer)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[2][name], value, rtol=0.1, atol=5e-3)
