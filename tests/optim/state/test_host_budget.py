"""Optimizer state split between host memory and NVMe by a budget: the same bits, within it, and fewer bytes moved."""

import pytest
import torch
from torch import nn

from nvme_offload import ConfigError, ConfigWarning, OffloadAdamW, initialize
from nvme_offload.offload.host import available_memory
from nvme_offload.offload.host import proc as system_files
from nvme_offload.offload.units import GiB, MiB, format_bytes
from tests.support.pairs import each_value_once
from tests.support.training import (
    BLOCK,
    MILLION,
    SETTINGS,
    Twin,
    assert_same_bits,
    param,
    params_of,
    section,
    set_grads,
    snapshot,
    storage_io,
    take_steps,
)

SHAPES = [(3 * BLOCK,), (5,), (2 * BLOCK + 1,), (70_001,), (2 * BLOCK,)]
MIXED = (torch.bfloat16, torch.float32, torch.float16)
STAGING = 2 * 12 * BLOCK  # two staging buffers, each for the widest state of a block
STATE = 5 * MiB // 2  # about half of the state of SHAPES


def train(optimizer, params, first=0, steps=5):
    for step in range(first, first + steps):
        take_steps(optimizer, params, step, without=[step % 5])


@pytest.fixture(scope="module")
def expected():
    """All of it in host memory, after 5 steps, and after 3 more."""
    params = params_of(SHAPES, *MIXED)
    with OffloadAdamW(params, offload=section(clip=1.0), **SETTINGS) as optimizer:
        train(optimizer, params)
        first = snapshot(optimizer)
        train(optimizer, params, 5, 3)
        return first, snapshot(optimizer)


def kinds_of_slots(optimizer):
    return {slot.home.tier for slot in optimizer.store.slots}


BUDGETS = {
    "staging only": (STAGING, {"nvme"}),
    "one subgroup": (STAGING + MiB, {"host", "nvme"}),
    "half": (STAGING + STATE, {"host", "nvme"}),
    "all": (GiB, {"host"}),
    "auto": ("auto", {"host"}),
}


@pytest.mark.parametrize(("name", "buffers"), each_value_once([*BUDGETS], [2, 3]))
def test_the_bits_do_not_depend_on_the_budget(make_adamw, expected, monkeypatch, name, buffers):
    monkeypatch.setattr(available_memory, "available_bytes", lambda: 8 * GiB)
    budget, kinds = BUDGETS[name]
    budget = budget if budget == "auto" else budget + (buffers - 2) * STAGING // 2
    params = params_of(SHAPES, *MIXED)
    options = {"clip": 1.0, "buffers": buffers, "checksums": buffers == 3, "host_budget": budget}
    optimizer = make_adamw(params, **options)
    optimizer.place()
    assert kinds_of_slots(optimizer) == kinds
    train(optimizer, params)
    assert_same_bits(snapshot(optimizer), expected[0])
    train(optimizer, params, 5, 3)
    assert_same_bits(snapshot(optimizer), expected[1])

    stats = optimizer.stats()
    on_nvme = sum(slot.subgroup.size_bytes for slot in optimizer.store.slots if slot.home.is_visited)
    assert stats.host_state_bytes + on_nvme == stats.state_bytes
    assert (stats.bytes_written == 0) == (stats.staging_bytes < 65536) == (kinds == {"host"})
    if budget != "auto":
        assert stats.staging_bytes + stats.host_state_bytes <= budget
    plan = optimizer.tier_plan
    assert len(plan.units_on("nvme")) == sum(slot.home.is_visited for slot in optimizer.store.slots)
    assert "optimizer state" in str(plan)


def test_staging_buffers_leave_most_of_a_budget_to_the_state(make_adamw):
    optimizer = make_adamw([param((24 * MILLION,))], host_budget=160 * MiB)
    optimizer.place()
    stats = optimizer.stats()
    assert stats.staging_bytes <= 64 * MiB
    assert 64 * MiB < stats.host_state_bytes <= 160 * MiB - stats.staging_bytes


def test_parameters_that_come_later_stay_within_the_budget(make_adamw):
    params = params_of(SHAPES, *MIXED)
    budget = STAGING + STATE
    optimizer = make_adamw(params[:2], buffers=2, clip=1.0, host_budget=budget)
    twin = Twin(params, clip=1.0)
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": params[2:4]})
        if step == 4:
            before = [slot.home.tier for slot in optimizer.store.slots]
            optimizer.add_param_group({"params": params[4:]})
            assert [slot.home.tier for slot in optimizer.store.slots][: len(before)] == before
        present = [p for group in optimizer.param_groups for p in group["params"]]
        set_grads(params, step)
        for p in params[len(present) :]:
            p.grad = None
        twin.step([p.grad for p in params])
        optimizer.step()
        stats = optimizer.stats()
        assert stats.staging_bytes + stats.host_state_bytes <= budget
    assert kinds_of_slots(optimizer) == {"host", "nvme"}
    twin.assert_equals(optimizer)


def test_half_of_the_state_in_memory_halves_the_traffic(make_adamw):
    """By the kernel's counters. The state is large against the staging buffers, whose contents a step need not read."""
    numel, written, read = 16 * MILLION, [], []
    for share in (0, 0.5):
        staging = 2 * 10 * 2 * BLOCK
        budget = staging + int(share * 10 * numel)
        p = torch.nn.Parameter(torch.full((numel,), 0.01, dtype=torch.bfloat16))
        options = {"sub_group_size": 2 * BLOCK, "buffers": 2, "host_budget": budget}
        optimizer = make_adamw([p], **options)
        p.grad = torch.full_like(p, 0.02)
        optimizer.step()
        optimizer.synchronize()
        before = storage_io()
        for _ in range(2):
            optimizer.step()
            optimizer.synchronize()
        after = storage_io()
        plan = optimizer.tier_plan
        assert 2 * (plan.bytes_read - staging) <= after[0] - before[0] <= 2 * plan.bytes_read
        assert after[1] - before[1] == pytest.approx(2 * plan.bytes_written, rel=0.01)
        read.append(after[0] - before[0])
        written.append(after[1] - before[1])
        optimizer.close()
    assert read[1] / read[0] == pytest.approx(0.5, rel=0.03)
    assert written[1] / written[0] == pytest.approx(0.5, rel=0.03)


BAD = [
    ({"host_budget": MiB}, r"host_budget = 1 MiB: the 4 staging buffers take 2.5 MiB; write at least 3 MiB"),
    ({"device": "cpu", "host_budget": "auto"}, r'host_budget = 0 B \("auto" found 0 B\): device = "cpu" keeps'),
    ({"device": "cpu", "host_budget": MiB}, r'host_budget = 1 MiB: device = "cpu" keeps .* at least 5 MiB, or .*nvme'),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_a_budget_that_is_too_small_is_told_with_what_is_needed(make_adamw, monkeypatch, drive, options, message):
    monkeypatch.setattr(available_memory, "available_bytes", lambda: GiB)
    with pytest.raises(ConfigError, match=message):
        make_adamw([param((8 * BLOCK,))], **options)
    assert not list(drive.iterdir())


def test_auto_takes_the_least_staging_on_a_machine_that_is_full(make_adamw, monkeypatch):
    monkeypatch.setattr(available_memory, "available_bytes", lambda: GiB)
    params = [param((8 * BLOCK,))]
    with pytest.warns(ConfigWarning, match=r'"auto" found 0 B .* 64 MiB are taken'):
        optimizer = make_adamw(params, host_budget="auto")
    take_steps(optimizer, params, 0)
    assert budget_of(optimizer) == 64 * MiB


def test_a_later_group_that_needs_larger_buffers_than_are_left_is_refused(make_adamw):
    """One small parameter at first, so small buffers, and a budget filled by what stays."""
    first = [param((64,), seed=i) for i in range(3)]
    optimizer = make_adamw([{"params": [p]} for p in first], buffers=2, host_budget=MiB)
    optimizer.place()
    assert kinds_of_slots(optimizer) == {"host"}
    with pytest.raises(ConfigError, match=r"the 2 staging buffers take 1.5 MiB beside 12 KiB .* at least 2 MiB"):
        optimizer.add_param_group({"params": [param((BLOCK,), torch.float16)]})
    assert len(optimizer.param_groups) == 3
    take_steps(optimizer, first, 0)


def test_auto_is_this_ranks_share_of_what_is_left(tmp_path, monkeypatch):
    proc = tmp_path / "proc"
    proc.mkdir()
    for module in (available_memory, system_files):
        monkeypatch.setattr(module, "PROC", proc)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def budget_of(available):
        (proc / "meminfo").write_text(f"MemTotal: {64 * MiB} kB\nMemAvailable: {available // 1024} kB\n")
        return available_memory.auto_host_budget()

    assert budget_of(40 * GiB) == 30 * GiB, "a quarter is left"
    assert budget_of(4 * GiB) == 2 * GiB, "and never less than 2 GiB"
    assert budget_of(GiB) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert format_bytes(budget_of(40 * GiB)) == "7.5 GiB"


@pytest.mark.parametrize(("num_ranks", "share"), [(2, 4), (4, 2), (16, 1)])
def test_a_rank_works_with_its_share_of_the_processors(num_ranks, share, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    assert available_memory.num_processors_of_rank() == share


LEFT = 128 * MiB
WIDTH, LAYERS = 256, 4
NUMEL = LAYERS * WIDTH * (WIDTH + 1)


@pytest.fixture
def machine(monkeypatch):
    """A machine on which a reserve leaves 128 MiB."""
    monkeypatch.setattr(available_memory, "available_bytes", lambda: 2 * GiB + LEFT)


def layers(device="cpu"):
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def of_engine(path, *, blocks=False, **more):
    drive = {"device": "nvme", "nvme_path": str(path)}
    zero = {"stage": 3, "offload_optimizer": drive, **({"offload_param": drive} if blocks else {})}
    return {"zero_optimization": zero, "offload_gradients": drive if blocks else {"device": "none"}, **more}


def budget_of(optimizer):
    return optimizer.tier_plan.budgets["host"]


@pytest.mark.usefixtures("machine", "alone")
@pytest.mark.parametrize(("device", "to_come"), [("cpu", 4), ("meta", 8)])
def test_a_budget_that_is_found_leaves_room_for_what_no_budget_covers(device, to_come, tmp_path):
    """Gradients of 4 bytes a parameter; of a model without values its parameters, too."""
    with initialize(layers(device), of_engine(tmp_path, host_budget="auto")) as engine:
        assert budget_of(engine.optimizer) == LEFT - to_come * NUMEL


@pytest.mark.usefixtures("machine")
@pytest.mark.filterwarnings("ignore:.*does not honour these keys")
@pytest.mark.parametrize("have_grads", [False, True])
def test_gradients_that_there_are_need_no_more_room(have_grads, tmp_path):
    model = layers()
    if have_grads:
        model(torch.ones(1, WIDTH)).sum().backward()
    with OffloadAdamW(model.parameters(), offload=of_engine(tmp_path, host_budget="auto")) as optimizer:
        assert budget_of(optimizer) == LEFT - (0 if have_grads else 4 * NUMEL)


@pytest.mark.parametrize("sub_group_size", [NUMEL, NUMEL // 2])
def test_no_more_staging_buffers_than_subgroups_that_visit_them(sub_group_size, tmp_path, alone):
    config = of_engine(tmp_path)
    config["zero_optimization"]["sub_group_size"] = sub_group_size
    with initialize(layers(), config) as engine:
        found = engine.optimizer.stats()
        assert found.num_subgroups == -(-NUMEL // sub_group_size)
        assert found.staging_bytes <= found.state_bytes + found.num_subgroups * 4096


def test_no_more_staging_buffers_than_blocks_and_more_when_more_blocks_come(tmp_path, alone):
    with initialize(layers(), of_engine(tmp_path, blocks=True)) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(1, WIDTH)).sum())
            engine.step()
        staged = {unit.name: unit.size_bytes for unit in engine.optimizer.tier_plan.units_on("host", "staging buffers")}
        moved = sum(unit.size_bytes for unit in engine.optimizer.tier_plan.units_on("nvme", "parameters"))
        assert 0 < staged["staging buffers of parameters"] <= moved
