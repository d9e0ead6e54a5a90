"""Parameter groups of an engine: by name, pattern and parameter, in code and in the section, and what follows them."""

import json
import logging

import pytest
import torch
from torch import nn

from nvme_offload import ConfigError, ConfigWarning, OffloadConfig, initialize
from tests.support.build import section
from tests.support.ranks import on_ranks
from tests.support.sharded_model import assert_same, full_state

NO_DECAY = {"weight_decay": 0.0}
HEAD = {"lr": 3e-3, "betas": (0.8, 0.95)}
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


class LM(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed_tokens = nn.Embedding(48, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(16), nn.Linear(16, 48, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.lm_head(self.norm(x))


def fresh(tied=False):
    torch.manual_seed(0)
    return LM(tied)


def loss_of(model, step):
    tokens = torch.randint(0, 48, (4, 6), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())


def train(engine, *steps):
    for step in steps:
        engine.backward(loss_of(engine, step))
        engine.step()


def names_of(engine):
    names = {param: name for name, param in engine.named_parameters()}
    return [sorted(names[param] for param in group["params"]) for group in engine.optimizer.param_groups]


IN_SECTION = [{"match": ["*.bias", "LayerNorm"], **NO_DECAY}, {"match": ["lm_head.weight"], **HEAD}]
EXPECTED = [
    ["embed_tokens.weight", "layers.0.weight", "layers.1.weight"],
    ["layers.0.bias", "layers.1.bias", "norm.bias", "norm.weight"],
    ["lm_head.weight"],
]


def engine_of(path, *, by_section, model=None, **more):
    model, config = model or fresh(), section(path, adamw=ADAMW, clip=0.0, **more)
    if by_section:
        config["optimizer"]["groups"] = IN_SECTION
        return initialize(model, config)
    groups = [{"params": ["*.bias", "norm"], **NO_DECAY}, {"params": model.lm_head.parameters(), **HEAD}]
    return initialize(model, config, param_groups=groups)


@pytest.mark.parametrize("by_section", [False, True], ids=["code", "section"])
def test_they_train_as_torchs_groups_do(alone, tmp_path, by_section):
    twin = fresh()
    named = dict(twin.named_parameters())
    options = [{}, NO_DECAY, HEAD]
    groups = [{"params": [named[n] for n in names], **own} for names, own in zip(EXPECTED, options, strict=True)]
    reference = torch.optim.AdamW(groups, **ADAMW)
    with engine_of(tmp_path, by_section=by_section) as engine:
        assert names_of(engine) == EXPECTED
        for step in range(4):
            train(engine, step)
            reference.zero_grad()
            loss_of(twin, step).backward()
            reference.step()
        for name, param in engine.module.named_parameters():
            torch.testing.assert_close(param.full_tensor() + 0.0, named[name].detach(), rtol=1e-5, atol=1e-7)


def test_a_tied_parameter_has_all_of_its_names(alone):
    model = fresh(tied=True)
    with initialize(model, section(), param_groups=[{"params": "lm_head", "lr": 0.5}]) as engine:
        assert names_of(engine)[1] == ["embed_tokens.weight"]


BAD = {
    "nothing": ([{"params": ["head*"]}], r'param_groups\[0\]: "head\*" names no module or parameter'),
    "twice": ([{"params": "*.bias"}, {"params": "norm"}], r"param_groups\[1\]: norm.bias is in param_groups\[0\], too"),
    "foreign": ([{"params": [nn.Parameter(torch.zeros(3))]}], r"a Parameter of shape \(3,\) is no parameter of this"),
    "no group": ([{"match": ["*.bias"]}], r'param_groups\[0\]: is no parameter group; write {"params"'),
    "value": ([{"params": "*.bias", "lr": -1.0}], r"parameter group 1: lr = -1.0"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_named_and_leaves_nothing(alone, tmp_path, case):
    groups, words = BAD[case]
    with pytest.raises(ValueError, match=words):
        initialize(fresh(), section(tmp_path), param_groups=groups)
    assert not list(tmp_path.iterdir())


BAD_SECTIONS = {
    "nothing": ([{"match": ["head*"]}], r'optimizer.groups\[0\]: "head\*" names no module'),
    "no match": ([{"lr": 0.1}], r"optimizer.groups\[0\].match = .*write a list of groups"),
    "unknown": ([{"match": ["*"], "rate": 0.1}], r"optimizer.groups\[0\].rate = 0.1"),
    "value": ([{"match": ["*"], "lr": -1}], r"optimizer.groups\[0\].lr = -1"),
    "other type": ([{"match": ["*"], "momentum": 0.9}], r"no parameter momentum, which groups\[0\] sets; write match"),
}


@pytest.mark.parametrize("case", BAD_SECTIONS)
def test_so_is_what_a_section_cannot_say(alone, case):
    groups, words = BAD_SECTIONS[case]
    config = section(adamw=ADAMW)
    config["optimizer"]["groups"] = groups
    with pytest.raises(ConfigError, match=words):
        initialize(fresh(), config)


def test_a_section_with_groups_says_the_same_when_it_is_written_and_read():
    config = OffloadConfig.from_dict({"optimizer": {"groups": IN_SECTION}})
    again = OffloadConfig.from_dict(json.loads(config.model_dump_json(exclude_unset=True)))
    assert again == config
    assert hash(again) == hash(config)


SCHEDULES = {
    "WarmupLR": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.8},
    "WarmupCosineLR": {"warmup_num_steps": 4, "warmup_type": "linear", "total_num_steps": 9},
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_follows_groups_of_the_beginning_and_later_ones(alone, tmp_path, kind):
    """A rate of a group's own stays its own; a group that comes in step 2 is as far as the others."""
    schedule = {"type": kind, "params": SCHEDULES[kind]}
    with engine_of(tmp_path, by_section=True, scheduler=schedule) as engine:
        groups = engine.optimizer.param_groups
        high = [0.8 if kind == "WarmupLR" else ADAMW["lr"]] * 2 + [HEAD["lr"]]
        for step in range(6):
            if step == 2:
                bias = groups[1]["params"].pop(0)
                engine.optimizer.add_param_group({"params": [bias], "lr": 0.5})
                high.append(0.5)
            train(engine, step)
            if step < 3:
                assert [group["lr"] for group in groups] == pytest.approx([rate * (step + 1) / 4 for rate in high])
        engine.save_checkpoint(tmp_path / "saved")
        rates, state = [group["lr"] for group in groups], full_state(engine.module, engine.optimizer)
    with engine_of(tmp_path, by_section=True, scheduler=schedule) as engine:
        groups = engine.optimizer.param_groups
        engine.optimizer.add_param_group({"params": [groups[1]["params"].pop(0)], "lr": 0.5})
        engine.load_checkpoint(tmp_path / "saved")
        assert [group["lr"] for group in groups] == rates
        assert_same(full_state(engine.module, engine.optimizer), state)
        train(engine, 6)
        assert ([group["lr"] for group in groups] != rates) == (kind == "WarmupCosineLR")


def test_a_durable_run_knows_its_groups(alone, tmp_path):
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "durable": True}}
    more = {"zero_optimization": zero}
    with engine_of(None, by_section=False, **more) as engine:
        train(engine, 0, 1, 2, 3)
        expected = full_state(engine.module, engine.optimizer)
    with engine_of(None, by_section=True, **more) as engine:
        assert engine.resume() == (4, {})
        assert_same(full_state(engine.module, engine.optimizer), expected)
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0, 0.1]


def muon(**params):
    return {**section(), "optimizer": {"type": "Muon", "params": params}}


BESIDE = ["embed_tokens.weight", "layers.0.bias", "layers.1.bias", "lm_head.weight", "norm.bias", "norm.weight"]


@pytest.mark.parametrize(("tied", "given"), [(False, {"lr": 3e-4}), (True, {"eps": 1e-6})])
def test_embeddings_heads_and_what_is_no_matrix_have_adamw_beside_muon(alone, tied, given, caplog):
    with caplog.at_level(logging.INFO, "nvme_offload"), initialize(fresh(tied), muon(muon_lr=0.02, **given)) as engine:
        groups = engine.optimizer.param_groups
        assert [(group["rule"], group["lr"]) for group in groups] == [("Muon", 0.02), ("AdamW", given.get("lr", 1e-3))]
        assert groups[1]["eps"] == given.get("eps", 1e-8)
        beside = [name for name in BESIDE if not (tied and name == "lm_head.weight")]
        assert names_of(engine) == [["layers.0.weight", "layers.1.weight"], beside]
        train(engine, 0, 1)
    assert "parameter group 0 (rule Muon, lr 0.02, weight_decay 0.1): layers.0.weight, layers.1.weight" in caplog.text


def test_groups_beside_muon_are_split_unless_they_say_their_rule(alone):
    said = {"Muon": "embed_tokens", "AdamW": "norm.weight"}
    groups = [{"params": "layers.1", "lr": 0.1}, *({"params": name, "rule": rule} for rule, name in said.items())]
    with initialize(fresh(), muon(muon_lr=1e-3, adam_lr=2e-3), param_groups=groups) as engine:
        found = [(group["rule"], group["lr"]) for group in engine.optimizer.param_groups]
        each = [("Muon", 1e-3), ("AdamW", 2e-3)]
        assert found == [*each, ("Muon", 0.1), ("AdamW", 0.1), *each]
        names = ["layers.1.weight", "layers.1.bias", "embed_tokens.weight", "norm.weight"]
        assert names_of(engine)[2:] == [[name] for name in names]
        train(engine, 0, 1)


def test_one_rate_for_both_is_told_where_muons_is_of_another_kind(alone, recwarn):
    with pytest.warns(ConfigWarning, match=r"AdamW, for what is no matrix, has Muon's lr = 0.02; write adam_lr"):
        initialize(fresh(), muon(lr=0.02)).close()
    recwarn.clear()
    initialize(fresh(), muon(lr=0.02, adjust_lr_fn="match_rms_adamw")).close()
    assert not [each for each in recwarn if each.category is ConfigWarning]


@on_ranks(2)
def test_two_ranks_have_the_same_groups(rank, world_size):
    with engine_of(None, by_section=True) as engine:
        train(engine, 0, 1)
        assert names_of(engine) == EXPECTED
