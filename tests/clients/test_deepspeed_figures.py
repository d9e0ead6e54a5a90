"""Learning rates and loss scales of the door, beside those that DeepSpeed's own classes gave."""

import json
from pathlib import Path

import nvme_offload.deepspeed.runtime.lr_schedules as lr_schedules
import pytest
import torch
from torch import nn

import nvme_offload
import nvme_offload.deepspeed as deepspeed
from nvme_offload import ConfigError, OffloadConfig
from nvme_offload.deepspeed.loss_scale import DynamicLossScaler
from nvme_offload.deepspeed.schedules import schedule_of
from tests.support.build import section
from tests.support.pairs import each_value_once

FIGURES = json.loads(Path(__file__).with_name("deepspeed_figures.json").read_text())


def two_groups():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return model, [{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters()], "lr": 0.3}]


@pytest.mark.parametrize("figures", FIGURES["schedules"], ids=lambda figures: figures["type"])
def test_rates_are_deepspeeds_before_every_step(figures):
    optimizer = torch.optim.AdamW(two_groups()[1], lr=0.5)
    schedule = schedule_of({"type": figures["type"], "params": figures["params"]})(optimizer)
    betas = figures.get("first_beta", [0.9] * len(figures["rates"]))
    for rates, beta in zip(figures["rates"], betas, strict=True):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates, rel=1e-8)
        assert optimizer.param_groups[0]["betas"][0] == pytest.approx(beta)
        schedule.step()


@pytest.mark.parametrize(("number", "stage"), each_value_once([3, 12, 26, 29, 31], [0, 1, 2, 3]))
def test_an_engine_trains_with_them_and_goes_on_with_them(alone, tmp_path, stage, number):
    figures, batch = FIGURES["schedules"][number], torch.ones(1, 2)
    config = {**section(tmp_path, stage=stage, adamw={"lr": 0.5}), "scheduler": figures}
    config["scheduler"] = {key: figures[key] for key in ("type", "params")}
    found = []
    for part in range(2):
        model, groups = two_groups()
        engine, _, _, schedule = deepspeed.initialize(model=model, model_parameters=groups, config=config)
        assert type(schedule) is getattr(lr_schedules, figures["type"])
        if part:
            engine.load_checkpoint(tmp_path / "saved")
        for _ in range(7):
            found.append(engine.get_lr())
            engine.backward(engine(batch).sum())
            engine.step()
        assert schedule.get_last_lr() == engine.get_lr()
        engine.save_checkpoint(tmp_path / "saved")
        engine.destroy()
    assert found == [pytest.approx(rates, rel=1e-8) for rates in figures["rates"]]


@pytest.mark.parametrize("figures", FIGURES["loss_scales"], ids=lambda figures: figures["overflows"][:12])
def test_loss_scales_are_deepspeeds_before_every_step(figures):
    scaler = DynamicLossScaler.of_stage(OffloadConfig.from_dict({"fp16": figures["section"]}).fp16, stage=2)
    for event, scale in zip(figures["overflows"], figures["scales"], strict=True):
        assert scaler.cur_scale == scale
        scaler.update(found_inf=event == "x")


def rates_of(lr, steps, kind, **params):
    optimizer, scheduler, rates = {"type": "SGD", "params": {"lr": lr}}, {"type": kind, "params": params}, []
    with nvme_offload.initialize(nn.Linear(1, 1), {"optimizer": optimizer, "scheduler": scheduler}) as engine:
        for _ in range(steps):
            rates.append(engine.optimizer.param_groups[0]["lr"])
            engine.optimizer.step()
            engine.lr_scheduler.step()
    return rates


OF_SECTIONS = [
    each
    for each in FIGURES["schedules"]
    if isinstance(each["params"].get("warmup_max_lr", each["params"].get("warmup_min_ratio")), float)
]


@pytest.mark.parametrize("figures", OF_SECTIONS, ids=lambda figures: f"{figures['type']}-{len(figures['rates'])}")
def test_rates_of_initialize_are_deepspeeds_of_the_step_that_follows(alone, figures):
    """Without `warmup_max_lr` those of WarmupLR go up to the optimizer's own."""
    kind, params, expected = figures["type"], figures["params"], [first for first, _ in figures["rates"][1:]]
    assert rates_of(0.5, len(expected), kind, **params) == pytest.approx(expected, rel=1e-8)
    if kind == "WarmupLR":
        less = {name: value for name, value in params.items() if name != "warmup_max_lr"}
        assert rates_of(params["warmup_max_lr"], len(expected), kind, **less) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("kind", "steps"), [("linear", 1), ("log", 0)])
def test_a_warmup_of_hardly_a_step_and_a_learning_rate_of_zero_are_no_trouble(alone, kind, steps):
    half = 0.5 if kind == "linear" else 1.0  # less than two steps count as two, as in DeepSpeed
    assert rates_of(1.0, 3, "WarmupLR", warmup_num_steps=steps, warmup_type=kind) == [0, half, 1]
    assert rates_of(0.0, 3, "WarmupLR", warmup_num_steps=1, warmup_type=kind) == [0, 0, 0]


def test_initialize_counts_as_torch_and_the_door_as_deepspeed(alone, tmp_path):
    figures = FIGURES["schedules"][3]  # a warm-up of ten steps
    config = section(tmp_path, adamw={"lr": 0.5}, scheduler={key: figures[key] for key in ("type", "params")})
    config["fp16"] = {"enabled": True, "loss_scale_window": 2, "initial_scale_power": 4}
    rates, scales = {}, {}
    for kind in ("ours", "door"):
        model = nn.Linear(2, 1)
        ours = kind == "ours"
        engine = nvme_offload.initialize(model, config) if ours else deepspeed.initialize(model=model, config=config)[0]
        rates[kind], scales[kind] = [], []
        for _ in range(5):
            rates[kind].append(engine.optimizer.param_groups[0]["lr"])
            scales[kind].append(engine.loss_scaler.loss_scale)
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
        (engine.close if ours else engine.destroy)()
    assert rates["door"] == pytest.approx([rates["ours"][0], *rates["ours"][:-1]])
    assert (scales["ours"], scales["door"]) == ([16, 16, 32, 32, 64], [16, 16, 16, 32, 32])


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        ({"type": "WarmupL"}, 'scheduler.type = "WarmupL": write one of LRRangeTest, OneCycle'),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0}}, "cycle_max_lr = missing"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, "has no such parameter; write warmup_num_steps"),
        ([], "is not a section"),
    ],
)
def test_a_schedule_that_there_is_not_is_refused_by_its_keys(scheduler, said):
    with pytest.raises(ConfigError, match=said):
        schedule_of(scheduler)


def test_schedules_of_torch_are_taken_by_name():
    optimizer = torch.optim.AdamW(two_groups()[1], lr=0.5)
    made = schedule_of({"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}})(optimizer)
    assert isinstance(made, torch.optim.lr_scheduler.StepLR)
