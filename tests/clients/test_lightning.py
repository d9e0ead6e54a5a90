"""Lightning: its loggers, and its strategy for FSDP2."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nvme_offload import OffloadAdamW, split_parameters
from tests.support.clients import HIDES_SHARDS, UNCHANGED, WITH_A_LINE, client
from tests.support.ranks import run_ranks
from tests.support.training import section

lightning = pytest.importorskip("lightning.pytorch", reason="make clients installs it")
from lightning.pytorch import plugins, strategies  # noqa: E402

from nvme_offload.adapters import OffloadLightningCallback  # noqa: E402

STEPS = 6
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


class Module(lightning.LightningModule):
    def __init__(self, drive=None, sharded=False, clip=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.drive, self.sharded, self.clip, self.losses = drive, sharded, clip, []

    def configure_model(self):
        if self.sharded and not isinstance(self.layers[0].weight, DTensor):
            for layer in (self.layers[0], self.layers[2], self.layers):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            if self.drive is not None:
                split_parameters(self, fp32_too=True)

    def training_step(self, batch, index):
        loss = self.layers(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        if self.drive is None:
            optimizer = torch.optim.AdamW(self.parameters(), **SETTINGS)
        else:
            optimizer = OffloadAdamW(self.parameters(), **SETTINGS, offload=section(self.drive, clip=self.clip))
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)}


class Figures(lightning.loggers.logger.DummyLogger):
    def __init__(self):
        super().__init__()
        self.by_step = {}

    def log_metrics(self, metrics, step=None):
        self.by_step.setdefault(step, {}).update(metrics)


def batches():
    rows = torch.randn(STEPS * 4, 16, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(rows, batch_size=4)


def fit(module, folder, steps, *, resume=None, **options):
    off = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "use_distributed_sampler", "logger")
    settings = {"accelerator": "cpu", "gradient_clip_val": 0.5, **dict.fromkeys(off, False), **options}
    trainer = lightning.Trainer(max_steps=steps, default_root_dir=folder, **settings)
    trainer.fit(module, batches(), ckpt_path=resume)
    return trainer


@client("Lightning", "figures in its loggers", WITH_A_LINE, "`callbacks=[OffloadLightningCallback()]`")
def test_the_figures_are_in_the_loggers(tmp_path):
    figures = Figures()
    logs = {"logger": figures, "log_every_n_steps": 2, "callbacks": [OffloadLightningCallback(all_figures=True)]}
    trainer = fit(Module(tmp_path), tmp_path, 4, **logs)
    steps = {step: found["offload/steps"] for step, found in figures.by_step.items() if "offload/steps" in found}
    assert steps == {2: 2.0, 4: 4.0}
    assert figures.by_step[4]["offload/state_bytes"] == trainer.optimizers[0].stats().state_bytes
    trainer.optimizers[0].close()


@client("Lightning", "`bf16-mixed` and `16-mixed`, clipped", WITH_A_LINE, "`gradient_clipping` in the section")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_is_clipped_by_the_section(tmp_path, precision):
    def fitted(module, clip):
        plugin = plugins.MixedPrecision(precision, "cpu")  # the argument `precision` takes no fp16 on the CPU
        return fit(module, tmp_path, STEPS, plugins=[plugin], gradient_clip_val=clip)

    theirs, ours = Module(), Module(tmp_path, clip=0.05)
    fitted(theirs, 0.05)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fitted(Module(tmp_path), 0.05)
    optimizer = fitted(ours, None).optimizers[0]
    assert 0 < optimizer.stats().clip_coef < 0.9
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-6, rel=0)
    optimizer.close()


def fit_sharded(rank, world_size, folder):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size), GROUP_RANK="0", TORCHELASTIC_RUN_ID="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ROLE_RANK=str(rank))
    runs = []

    def fitted(module, resume=None):
        strategy = strategies.ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
        return fit(module, folder, STEPS, resume=resume, strategy=strategy, devices=world_size, gradient_clip_val=None)

    for path in (None, folder):
        module = Module(path, sharded=True)
        trainer = fitted(module)
        assert all(isinstance(param, DTensor) for param in module.parameters())
        trainer.save_checkpoint(os.path.join(folder, f"whole-{path is None}"))
        if path is not None:
            trainer.optimizers[0].synchronize()
            assert trainer.optimizers[0].stats().updates_behind > 0
            trainer.optimizers[0].close()
            trainer = fitted(Module(path, sharded=True), os.path.join(folder, "whole-False"))
            state = trainer.optimizers[0].state_dict()["state"]
            assert [float(entry["step"]) for entry in state.values()] == [STEPS] * len(state)
            trainer.optimizers[0].close()
        runs.append(module.losses)
    return runs


@client("Lightning", "`ModelParallelStrategy` (FSDP2), checkpoint, resume", UNCHANGED, HIDES_SHARDS)
def test_sharded_by_its_strategy(tmp_path):
    for theirs, ours in run_ranks(fit_sharded, 2, str(tmp_path)):
        assert len(ours) == STEPS
        assert ours == pytest.approx(theirs, abs=1e-6, rel=0)
