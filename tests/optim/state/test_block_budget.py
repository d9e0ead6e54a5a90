"""One budget for parameters, gradients and optimizer state: the same bits, within it, and fewer bytes moved."""

import copy
from dataclasses import asdict

import pytest
import torch

from nvme_offload import ConfigError, OffloadAdamW, initialize
from nvme_offload.offload.shards.stored import ResidentShard
from nvme_offload.optim.tiers.parts import parts_of
from tests.support.ranks import be_alone
from tests.support.sharded_model import assert_same, backward, full_state, sharded_model
from tests.support.tiers import EVERYTHING, Model, loss_of, make, section, train_step

KINDS = {"parameters": "param_", "gradients": "grad_", "optimizer state": ""}
STEPS = 4
LAYERS = 4


def budgeted(path, budget, **tiers):
    """A loop goes over the micro-batches one by one, and "auto" does not know of it."""
    return {**section(path, **{**EVERYTHING, **tiers}), "host_budget": budget, "micro_batch_order": "horizontal"}


def plan_of(path, **model):
    """Everything on NVMe, as bytes: what must be in memory, and what may be, by kind."""
    with make(section(path, **EVERYTHING), **model) as engine:
        plan = engine.optimizer.tier_plan
    return plan.bytes_on("host"), {kind: plan.bytes_on("nvme", kind) for kind in KINDS}


def run(config, **model):
    """The full state, the norms, the plan, and what the last steps moved, by kind."""
    norms = []
    with make(config, num_layers=LAYERS, checkpointing=True, **model) as engine:
        for step in range(STEPS):
            if step == 2:
                engine.optimizer.synchronize()
                before = asdict(engine.optimizer.stats())
            train_step(engine, step)
            norms.append(engine.get_global_grad_norm())
        engine.optimizer.synchronize()
        stats = asdict(engine.optimizer.stats())
        moved = {
            kind: [stats[f"{prefix}bytes_{way}"] - before[f"{prefix}bytes_{way}"] for way in ("read", "written")]
            for kind, prefix in KINDS.items()
            if f"{prefix}bytes_read" in stats
        }
        return full_state(engine.module, engine.optimizer), norms, engine.optimizer.tier_plan, stats, moved


def test_the_bits_do_not_depend_on_the_budget_and_the_traffic_falls_with_it(alone, tmp_path):
    wanted, norms, *_ = run(section(tmp_path))
    assert max(norms) > 0.5, "clipping acts"
    must, may = plan_of(tmp_path, num_layers=LAYERS)
    params, grads, state = may.values()
    written_in_all = []
    for more, whole in ((0, set()), (params + grads // 2, {"parameters"}), (params + grads + state, set(KINDS))):
        found, its_norms, plan, stats, moved = run(budgeted(tmp_path, must + more))
        assert_same(found, wanted)
        assert its_norms == norms
        resident = stats["param_host_bytes"] + stats["grad_host_bytes"] + stats["host_state_bytes"]
        assert stats["staging_bytes"] + resident <= plan.bytes_on("host") <= must + more
        assert {kind for kind in KINDS if not plan.units_on("nvme", kind)} == whole
        for kind, (read, written) in moved.items():
            on_nvme = plan.units_on("nvme", kind)
            assert written == (STEPS - 2) * sum(unit.bytes_written for unit in on_nvme), kind
            assert on_nvme or not read, kind
        written_in_all.append(sum(written for _, written in moved.values()))
    assert written_in_all == sorted(set(written_in_all), reverse=True), "less with every larger budget"
    assert written_in_all[-1] == 0
    assert not list(tmp_path.iterdir())


def test_max_in_cpu_keeps_the_first_blocks_in_memory(alone, tmp_path):
    wanted, norms, *_ = run(section(tmp_path))
    with make(section(tmp_path, param="nvme"), num_layers=LAYERS) as engine:
        numels = [sum(form.numel for form in group.forms) for group in engine.optimizer.store.blocks._numbers]
    for count in (1, len(numels)):
        config = section(tmp_path, **EVERYTHING, max_in_cpu=float(sum(numels[:count])))
        found, its_norms, plan, stats, _ = run(config)
        assert_same(found, wanted)
        assert its_norms == norms
        assert len(plan.units_on("host", "parameters")) == count
        assert len(plan.units_on("nvme", "parameters")) == len(numels) - count
        assert stats["param_host_bytes"] == plan.bytes_on("host", "parameters") > 0
    with make(config | {"host_budget": plan_of(tmp_path, num_layers=LAYERS)[0]}, num_layers=LAYERS) as engine:
        assert not engine.optimizer.tier_plan.units_on("host", "parameters"), "the budget decides"


def partly_frozen():
    torch.manual_seed(0)
    model = Model(num_layers=LAYERS, checkpointing=True)
    for layer in model.layers[:2]:
        layer.up.requires_grad_(False)
        layer.down.requires_grad_(False)
    return model


def test_a_block_may_be_on_one_tier_and_not_on_the_other(alone, tmp_path):
    """Parameters save more than their gradients; but where some of a block are frozen, only its gradients may fit."""
    with initialize(partly_frozen(), section(tmp_path, **EVERYTHING)) as engine:
        must = engine.optimizer.tier_plan.bytes_on("host")
    ends, places = [], set()
    for config in (section(tmp_path), *(budgeted(tmp_path, must + 4096 * pages) for pages in (3, 10, 15))):
        with initialize(partly_frozen(), config) as engine:
            for step in range(3):
                train_step(engine, step)
            ends.append(full_state(engine.module, engine.optimizer))
            blocks, plan = engine.optimizer.store.blocks, engine.optimizer.tier_plan
            for group, number in blocks._numbers.items():
                stored = {isinstance(parts_of(leaf).stored, ResidentShard) for leaf in group.params}
                assert stored == {number not in blocks._param_blocks}, "all of a group, or nothing"
                places.add((number in blocks._param_blocks, number in blocks._grad_blocks))
            assert len(blocks._param_blocks) == len(plan.units_on("nvme", "parameters"))
            assert len(blocks._grad_blocks) == len(plan.units_on("nvme", "gradients"))
        assert_same(ends[-1], ends[0])
    assert places == {(False, False), (False, True), (True, False), (True, True)}


def test_blocks_that_come_later_stay_within_the_budget(alone, tmp_path):
    be_alone()
    ends = []
    for budget in (None, "1200KiB"):
        model = sharded_model(torch.bfloat16)
        config = section(tmp_path) if budget is None else budgeted(tmp_path, budget)
        with OffloadAdamW(model.blocks[0].parameters(), lr=1e-2, offload=config) as optimizer:
            for step in range(5):
                if step == 2:
                    before = dict(zip(optimizer.tier_plan.units, optimizer.tier_plan.tiers, strict=True))
                    optimizer.add_param_group({"params": list(model.blocks[1].parameters())})
                    optimizer.add_param_group({"params": list(model.embedding.parameters())})
                backward(model, 0, step)
                optimizer.step()
                model.zero_grad()
            if budget is not None:
                plan = optimizer.tier_plan
                now = {unit.name: tier for unit, tier in zip(plan.units, plan.tiers, strict=True)}
                assert {unit.name: tier for unit, tier in before.items()}.items() <= now.items(), "nothing moves"
                assert plan.bytes_on("host") <= plan.budgets["host"]
            ends.append(full_state(model, optimizer))
    assert_same(*ends)


def test_a_group_for_which_the_budget_is_too_small_leaves_the_optimizer_as_it_was(alone, tmp_path):
    be_alone()
    ends, budget = [], None
    for config in (section(tmp_path, **EVERYTHING), budgeted(tmp_path, 0)):
        if budget is not None:
            config["host_budget"] = budget
        model = sharded_model(torch.bfloat16)
        with OffloadAdamW(model.embedding.parameters(), lr=1e-2, offload=config) as optimizer:
            for step in range(4):
                if step == 2 and budget is not None:
                    with pytest.raises(ConfigError, match=r"host_budget = .*staging buffers of parameters 60 KiB"):
                        optimizer.add_param_group({"params": list(model.blocks.parameters())})
                backward(model, 0, step)
                optimizer.step()
                model.zero_grad()
            staged = optimizer.tier_plan.units_on("host", "staging buffers")
            # One buffer for the one block of a kind; a budget keeps room for all that there may be.
            budget = sum(count * unit.size_bytes for count, unit in zip((3, 2, 2), staged, strict=True))
            ends.append(full_state(model, optimizer))
    assert_same(*ends)


def test_a_model_born_on_its_tiers_has_the_same_bits_at_every_budget(alone, tmp_path):
    ends = []
    must, may = plan_of(tmp_path, num_layers=LAYERS)
    for more in (None, 0, may["parameters"] // 2, may["parameters"] + may["gradients"]):
        config = section(tmp_path) if more is None else budgeted(tmp_path, must + more)
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Model(num_layers=LAYERS)
        with initialize(model, config) as engine:
            for step in range(2):
                train_step(engine, step)
            ends.append(full_state(engine.module, engine.optimizer))
        assert_same(ends[-1], ends[0])


def test_a_budget_too_small_for_the_staging_buffers_is_told_before_anything_is_built(alone, tmp_path):
    torch.manual_seed(0)
    model = Model()
    before = copy.deepcopy(model.state_dict())
    match = (
        r"host_budget = 64 KiB: the 2 staging buffers take 1\d\d KiB \(optimizer state\), staging buffers of "
        r"parameters 48 KiB, staging buffers of gradients 32 KiB; write at least 1 MiB, or a smaller buffer_count"
    )
    with pytest.raises(ConfigError, match=match):
        initialize(model, budgeted(tmp_path, "64KiB"))
    assert not any(type(module).__name__.startswith("FSDP") for module in model.modules())
    assert_same(model.state_dict(), before)
    with pytest.raises(ConfigError, match=r'"cpu" keeps all state in host memory beside staging buffers of param'):
        initialize(model, budgeted(tmp_path, "64KiB", state="cpu"))
    be_alone()
    sharded = sharded_model(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"host_budget = 64 KiB: the 2 staging buffers take .* of gradients"):
        OffloadAdamW(sharded.parameters(), offload=budgeted(tmp_path, "64KiB"))
    assert not list(tmp_path.iterdir())
    loss_of(model, 0).backward()
