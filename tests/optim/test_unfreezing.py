"""Layers that are frozen when `initialize` is called and unfrozen in mid-training: they train, as with plain torch."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from nvme_offload import get_full_param, initialize, set_full_param
from tests.support.pairs import each_value_once
from tests.support.ranks import run_ranks
from tests.support.sharded_model import assert_same, full_state, loss_of
from tests.support.small_engine import BF16, FP16, backward, fresh_model, section
from tests.support.tiers import EVERYTHING, Model, train_step
from tests.support.tiers import section as section_of_tiers

STEPS, UNFROZEN_AT = 4, 1
MIXED = {**BF16, "gradient_accumulation_dtype": "fp32"}


def train(rank, config, freeze):
    """With gradients dropped in place of freezing, all layers are the optimizer's from the start: the reference."""
    model = fresh_model()
    if freeze:
        model.blocks[0].requires_grad_(False)
    norms = []
    with initialize(model, config) as engine:
        engine.module.eval()
        for step in range(STEPS):
            if freeze and step == UNFROZEN_AT:
                model.blocks[0].requires_grad_(True)
            backward(engine, rank, step)
            if not freeze and step < UNFROZEN_AT:
                for name, param in engine.module.named_parameters():
                    param.grad = None if name.startswith("blocks.0.") else param.grad
            engine.step()
            norms.append(engine.get_global_grad_norm())
            assert all(param.grad is None for param in engine.module.parameters())
        return full_state(engine.module, engine.optimizer), norms


def compare(rank, world_size, configs):
    for config in configs:
        (ours, norms), (theirs, reference) = (train(rank, config, freeze) for freeze in (True, False))
        assert norms == reference
        assert_same(ours, theirs)


@pytest.mark.parametrize(("mode", "nvme"), each_value_once([{}, BF16, FP16, MIXED], [False, True]))
def test_an_unfrozen_layer_trains_from_its_first_gradient_on(alone, tmp_path, mode, nvme):
    compare(0, 1, [section(stage, tmp_path if nvme else None, **mode) for stage in (3, 1)])


def test_two_ranks():
    run_ranks(compare, 2, [section(2, None, **MIXED)])


@pytest.mark.parametrize("stage", [3, 2, 1, 0])
@pytest.mark.parametrize("through", ["the module", "its shards"])
def test_what_is_frozen_and_unfrozen_after_an_evaluation_is_what_trains(alone, stage, through):
    """FSDP2 shows gathered copies then: of all that is not freed after a forward, as the root."""

    def run(*, evaluates):
        model = fresh_model()
        first, second = model.blocks[0], model.embedding
        first.requires_grad_(False)
        with initialize(model, section(stage, **BF16)) as engine:
            shards = {module: list(module.parameters()) for module in (first, second)}
            for step in range(STEPS):
                if step == UNFROZEN_AT:
                    if evaluates:
                        with torch.no_grad():
                            loss_of(engine, 0, step, 0)
                    for module, trains in ((first, True), (second, False)):
                        for param in shards[module] if through == "its shards" else module.parameters():
                            param.requires_grad_(trains)
                backward(engine, 0, step)
                engine.step()
            return full_state(engine.module, engine.optimizer)

    assert_same(run(evaluates=True), run(evaluates=False))


@pytest.mark.parametrize(
    ("frozen", "unfrozen"),
    [
        pytest.param("layers.2", {UNFROZEN_AT: "layers.2"}, marks=pytest.mark.slow),
        ("layers.2.up", {UNFROZEN_AT: "layers.2.up"}),
        ("layers.2", {UNFROZEN_AT: "layers.2.up", UNFROZEN_AT + 1: "layers.2"}),
    ],
    ids=["a block", "a part of a block", "one after the other"],
)
def test_parameters_and_gradients_on_tiers(alone, tmp_path, frozen, unfrozen):
    ends = []
    for tiers in ({}, EVERYTHING):
        torch.manual_seed(0)
        model = Model()
        model.get_submodule(frozen).requires_grad_(False)
        with (
            initialize(model, section_of_tiers(tmp_path, **tiers)) as engine,
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            for step in range(STEPS):
                if step in unfrozen:
                    model.get_submodule(unfrozen[step]).requires_grad_(True)
                train_step(engine, step)
            ends.append(full_state(engine.module, engine.optimizer))
        stays = [str(warning.message) for warning in told if "stay in memory" in str(warning.message)]
        assert [text.split(" have")[0] for text in stays] == (
            ["parameters of layers.2 (frozen)"] if tiers and len(unfrozen) > 1 else []
        )
    assert_same(*ends)


def test_a_frozen_layer_has_no_state_and_keeps_its_bits_when_set(alone):
    model = fresh_model()
    model.blocks[0].requires_grad_(False)
    with initialize(model, section(**BF16)) as engine:
        before = engine.optimizer.stats().state_bytes
        weight = next(iter(model.blocks[0].parameters()))
        values = torch.full(weight.shape, 1 / 3)
        set_full_param(weight, values)
        assert torch.equal(get_full_param(weight), values)
        assert engine.optimizer.stats().state_bytes == before


@pytest.mark.parametrize("again", ["before initialize", "before the load"])
def test_a_run_with_an_unfrozen_layer_is_resumed(alone, tmp_path, again):
    def run(steps, unfreeze_at, engine):
        for step in steps:
            if step == unfreeze_at:
                engine.module.blocks[0].requires_grad_(True)
            backward(engine, 0, step)
            engine.step()

    def frozen():
        model = fresh_model()
        model.blocks[0].requires_grad_(False)
        return model

    with initialize(frozen(), section(**BF16)) as straight, initialize(frozen(), section(**BF16)) as engine:
        run(range(3), 1, straight)
        run(range(2), 1, engine)
        engine.save_checkpoint(tmp_path)
        model = fresh_model() if again == "before initialize" else frozen()
        with initialize(model, section(**BF16)) as resumed:
            model.blocks[0].requires_grad_(True)
            _, states = get_state_dict(model, resumed.optimizer)
            assert states["state"].keys() == dict(model.named_parameters()).keys(), "torch loads what is in here alone"
            resumed.load_checkpoint(tmp_path)
            run(range(2, 3), None, resumed)
            assert_same(full_state(resumed.module, resumed.optimizer), full_state(straight.module, straight.optimizer))


def test_a_model_from_meta(alone):
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Model()
    model.layers[2].requires_grad_(False)
    with initialize(model, section_of_tiers(None)) as engine:
        before = {name: get_full_param(param) for name, param in engine.module.named_parameters()}
        model.layers[2].requires_grad_(True)
        train_step(engine, 0)
        moved = {
            name
            for name, param in engine.module.named_parameters()
            if not torch.equal(get_full_param(param), before[name])
        }
        assert {name for name in before if name.startswith("layers.2.")} <= moved


def test_a_parameter_that_came_later_is_refused_by_name_before_anything_moves(alone):
    with initialize(fresh_model(), section()) as engine:
        engine.module.late = nn.Linear(2, 2)
        before = full_state(engine.module.blocks, engine.optimizer)
        backward(engine, 0, 0)
        with pytest.raises(ValueError, match=r"late\.weight .*requires a gradient and would never be trained"):
            engine.step()
        assert_same(full_state(engine.module.blocks, engine.optimizer), before)
        engine.module.late.requires_grad_(False)
        engine.step()
        assert engine.optimizer.stats().steps == 1
