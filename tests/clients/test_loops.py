"""Loops of Lightning, ignite and accelerate, and timm's schedules, with hidden steps: as torch's AdamW."""

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.accelerated import forget
from tests.support.clients import HIDES, UNCHANGED, assert_as_torch, client

ROWS, EPOCHS = 24, 4


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def batches():
    generator = torch.Generator().manual_seed(1)
    rows = torch.utils.data.TensorDataset(*(torch.randn(ROWS, size, generator=generator) for size in (16, 4)))
    return torch.utils.data.DataLoader(rows, batch_size=8)


def in_lightning(make, folder, beside):
    lightning = pytest.importorskip("lightning.pytorch", reason="make clients installs it")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = model(), []

        def training_step(self, batch, index):
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            self.log("seen", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            optimizer = make(self)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)}

    def fit(epochs, resume=None):
        module, more = Module(), list(callbacks())
        saving = lightning.callbacks.ModelCheckpoint(folder, monitor="seen", mode="max")
        quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
        limits = {"max_epochs": epochs, "num_sanity_val_steps": 0, "gradient_clip_val": 0.5}
        trainer = lightning.Trainer(accelerator="cpu", callbacks=[*more, saving], **limits, **quiet)
        trainer.fit(module, batches(), batches(), ckpt_path=resume)
        trainer.save_checkpoint(folder / "end.ckpt")
        best = torch.load(saving.best_model_path)
        return [module.losses, module.state_dict(), best["state_dict"], trainer.current_epoch]

    callbacks = {
        "averages": lambda: [lightning.callbacks.EMAWeightAveraging(decay=0.6)],
        "swa": lambda: [lightning.callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)],
        "stopped": lambda: [lightning.callbacks.EarlyStopping("seen", mode="max", patience=2)],
        "resumed": list,
    }[beside]
    if beside != "resumed":
        return fit(EPOCHS)
    return [fit(EPOCHS // 2), fit(EPOCHS, folder / "end.ckpt")]


def in_ignite(make, folder):
    """The losses fall, and the highest is the best here: that of the first evaluation; two more end the run."""
    pytest.importorskip("ignite", reason="make clients installs it")
    from ignite import engine, handlers
    from ignite.metrics import Loss

    net, losses = model(), []
    trainer = engine.create_supervised_trainer(net, make(net), nn.functional.mse_loss)
    evaluator = engine.create_supervised_evaluator(net, {"seen": Loss(nn.functional.mse_loss)})
    average = handlers.EMAHandler(net, momentum=0.4)
    average.attach(trainer)

    def seen(_):
        return evaluator.state.metrics["seen"]

    best = handlers.Checkpoint({"model": net}, handlers.DiskSaver(folder), n_saved=1, score_function=seen)
    for handler in (best, handlers.EarlyStopping(2, seen, trainer)):
        evaluator.add_event_handler(engine.Events.COMPLETED, handler)
    trainer.add_event_handler(engine.Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output))
    trainer.add_event_handler(engine.Events.EPOCH_COMPLETED, lambda: evaluator.run(batches()))
    trainer.run(batches(), max_epochs=EPOCHS)
    assert trainer.state.epoch == 3
    last = {name: value.clone() for name, value in net.state_dict().items()}
    best.load_objects({"model": net}, torch.load(best.last_checkpoint))
    return [losses, last, net.state_dict(), average.ema_model.state_dict()]


def in_accelerate(make, folder, options):
    forget()
    acc = Accelerator(cpu=True, **options)
    net = model()
    optimizer = make(net)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    net, optimizer, data, schedule = acc.prepare(net, optimizer, batches(), schedule)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.6))

    def epochs(number):
        losses = []
        for inputs, targets in (batch for _ in range(number) for batch in data):
            with acc.accumulate(net):
                loss = nn.functional.mse_loss(net(inputs).float(), targets)
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            average.update_parameters(net)
            losses.append(loss.item())
        return losses

    first = epochs(2)
    acc.save_state(folder)
    second = epochs(2)
    averaged = {name: value.clone() for name, value in average.state_dict().items()}
    acc.load_state(folder)
    assert epochs(2) == second
    forget()
    return [first, second, net.state_dict(), averaged]


def in_timm(make, folder, name, monkeypatch):
    """Only what is used of timm is imported: the rest of it needs torchvision."""
    if find_spec("timm") is None:
        pytest.skip("make clients installs it")
    for package in ("timm", "timm.utils"):
        monkeypatch.setitem(sys.modules, package, module_from_spec(find_spec(package)))
    net, losses, rates = model(), [], []
    optimizer = make(net)
    how = {"decay_epochs": 2, "decay_milestones": [1, 3], "patience_epochs": 0, "warmup_epochs": 1, "noise": [0.5]}
    schedule, _ = import_module("timm.scheduler").create_scheduler_v2(optimizer, name, EPOCHS, **how)
    average = import_module("timm.utils.model_ema").ModelEmaV3(net, decay=0.6)
    for epoch in range(EPOCHS):
        for number, (inputs, targets) in enumerate(batches()):
            loss = nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(net)
            schedule.step_update(3 * epoch + number)
            losses.append(loss.item())
        schedule.step(epoch + 1, metric=1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert name == "constant" or len(set(rates)) > 1
    return [losses, rates, net.state_dict(), average.module.state_dict()]


LIGHTNING = {
    "averages": "`EMAWeightAveraging`, which trades weights for each validation",
    "swa": "`StochasticWeightAveraging`",
    "stopped": "`EarlyStopping`, the best model by `ModelCheckpoint`",
    "resumed": "`Trainer` with clipping, schedule, checkpoint, resume",
}


@pytest.mark.parametrize(
    "beside",
    [pytest.param(beside, marks=client("Lightning", what, UNCHANGED, HIDES)) for beside, what in LIGHTNING.items()],
)
def test_lightning(tmp_path, beside):
    assert_as_torch(lambda make, folder: in_lightning(make, folder, beside), tmp_path)


@client(
    "ignite", "trainer and evaluator, `EMAHandler`, `EarlyStopping`, the best model by `Checkpoint`", UNCHANGED, HIDES
)
def test_ignite(tmp_path):
    assert_as_torch(in_ignite, tmp_path)


@client(
    "accelerate",
    "loop with clipping, accumulation, schedule, bf16, `AveragedModel`, `save_state`, `load_state`",
    UNCHANGED,
    HIDES,
)
@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 3}, {}, {"mixed_precision": "bf16"}], ids=str)
def test_accelerate(tmp_path, options):
    assert_as_torch(lambda make, folder: in_accelerate(make, folder, options), tmp_path)


@client("timm", "all of its schedules, with warmup and noise, beside `ModelEmaV3`", UNCHANGED, HIDES)
@pytest.mark.parametrize("name", ["cosine", "tanh", "step", "multistep", "plateau", "poly", "wsd", "rsqrt", "constant"])
def test_timm(tmp_path, monkeypatch, name):
    assert_as_torch(lambda make, folder: in_timm(make, folder, name, monkeypatch), tmp_path)
