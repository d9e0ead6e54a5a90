"""Trainer makes the optimizer from a section, and the callback puts its figures into the logs."""

import json
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from nvme_offload import OffloadAdamW, OffloadLion
from nvme_offload.adapters import OffloadTrainerCallback, trainer_optimizer
from tests.support.clients import NOT_AT_ALL, WITH_A_LINE, client
from tests.support.small_llama import llama, rows
from tests.support.training import section

STEPS, ADDED = 5, "`OffloadTrainerCallback().add_to(trainer)`"
AUTO = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


class Reporter(TrainerCallback):
    """What a reporter gets to see: `report_to` puts them before the callbacks of the user."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def arguments(folder, **options):
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 2, "learning_rate": 1e-2}
    settings |= {"weight_decay": 0.1, "use_cpu": True, "report_to": "none", **options}
    return TrainingArguments(output_dir=str(folder), **settings)


def made_by_trainer(folder, optimizer, callbacks=(), **options):
    given = {"train_dataset": rows(), "optimizer_cls_and_kwargs": optimizer, "callbacks": list(callbacks)}
    return Trainer(model=llama(), args=arguments(folder, **options), **given)


@client("transformers", '`Trainer(optimizer_cls_and_kwargs=...)` from a DeepSpeed section with "auto"')
def test_trainer_makes_the_optimizer_from_a_section(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**AUTO, **section(tmp_path, clip=1.0), "host_budget": "auto"}))
    chosen, settings = trainer_optimizer(path, arguments(tmp_path))
    assert chosen is OffloadAdamW
    ours = made_by_trainer(tmp_path, (chosen, settings))
    ours.train()
    theirs = made_by_trainer(tmp_path, (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}))
    theirs.train()
    decays = [[group["weight_decay"] for group in one.optimizer.param_groups] for one in (ours, theirs)]
    assert decays == [[0.1, 0.0]] * 2
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    ours.optimizer.optimizer.close()
    lion = {"gradient_clipping": "auto", "optimizer": {"type": "Lion", "params": {"lr": 1e-2}}}
    assert trainer_optimizer({**section(tmp_path), **lion}, arguments(tmp_path))[0] is OffloadLion


@client("transformers", "figures in the logs that `Trainer` reports", WITH_A_LINE, ADDED)
@pytest.mark.parametrize("in_front", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_figures_are_in_the_logs(tmp_path, in_front):
    reporter, callback = Reporter(), OffloadTrainerCallback(all_figures=not in_front)
    optimizer = trainer_optimizer({**section(tmp_path), "gradient_clipping": "auto"}, arguments(tmp_path))
    trainer = made_by_trainer(tmp_path, optimizer, [reporter] if in_front else [reporter, callback])
    if in_front:
        callback.add_to(trainer)
    trainer.train()
    offloaded = trainer.optimizer.optimizer
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]
    assert [entry["offload/steps"] for entry in logged] == [2.0, 4.0]
    figures = [name for name in logged[1] if name.startswith("offload/")]
    assert (len(figures) == 5) is in_front
    assert in_front or logged[1]["offload/state_bytes"] == offloaded.stats().state_bytes
    assert 0 < logged[1]["offload/iteration_share_of_ideal"] <= 1
    assert all(isinstance(value, float) for name, value in logged[1].items() if name.startswith("offload/"))
    seen = [logs for logs in reporter.seen if "loss" in logs]
    assert [("offload/steps" in logs) for logs in seen] == [in_front] * 2
    assert "offload/steps" not in trainer.state.log_history[-1], "the summary of the run is not a step"
    assert offloaded.stats().updates_behind == 0, "the callback hides no step"
    offloaded.close()


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
@client(
    "transformers",
    "`TrainingArguments(deepspeed=...)`",
    NOT_AT_ALL,
    "it hands everything to DeepSpeed; `trainer_optimizer` and `initialize` take the same file",
)
def test_the_deepspeed_argument_needs_deepspeed(tmp_path):
    with pytest.raises(PackageNotFoundError, match="deepspeed"):
        arguments(tmp_path, deepspeed={"zero_optimization": {"stage": 3}})


@client("transformers", "figures in TensorBoard's files", WITH_A_LINE, ADDED)
def test_the_figures_are_in_tensorboards_files(tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="make clients has it")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    optimizer = trainer_optimizer({**section(tmp_path), "gradient_clipping": "auto"}, arguments(tmp_path))
    trainer = made_by_trainer(tmp_path, optimizer, report_to="tensorboard")
    OffloadTrainerCallback(all_figures=True).add_to(trainer)
    trainer.train()
    stats = trainer.optimizer.optimizer.stats()
    trainer.optimizer.optimizer.close()
    [folder] = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    found = events.EventAccumulator(str(folder)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/offload/steps")] == [(2, 2.0), (4, 4.0)]
    assert found.Scalars("train/offload/state_bytes")[-1].value == stats.state_bytes
