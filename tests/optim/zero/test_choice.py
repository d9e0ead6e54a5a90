"""All ranks choose alike what leaves memory, from what there is, and one tells; the bits do not depend on it."""

import io
import json
from contextlib import redirect_stderr
from functools import partial

import pytest
import torch
from torch import nn

from nvme_offload import ConfigError, OffloadAdamW, OffloadConfig, TensorSwapper, initialize
from nvme_offload.optim.state.choice import Keeping, SavedSizes
from tests.support.ranks import on_ranks
from tests.support.sharded_model import GOES_ON, assert_same, full_state
from tests.support.small_llama import llama, rows

MiB, GiB = 2**20, 2**30
WIDE, LAYERS = 1024, 8  # in bf16 16 MiB of parameters, of gradients, and 80 MiB of state
NARROW = 512  # where what is kept of a forward decides


def auto(path, **state):
    drive = {"device": "nvme", "nvme_path": str(path), **state}
    zero = {"stage": 3, "sub_group_size": 2**20, "offload_optimizer": {**drive, "staging_budget": "48MiB"}}
    return {"offload": "auto", "zero_optimization": zero, "bf16": {"enabled": True}}


def model(frozen=0, width=NARROW):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).bfloat16()
    layers[:frozen].requires_grad_(False)
    return layers


def leave(monkeypatch, size_bytes):
    monkeypatch.setattr("nvme_offload.offload.host.available_memory.available_bytes", lambda: 2 * GiB + size_bytes)


def train(engine, steps=1, rows=4):
    for step in range(steps):
        shape = engine.gradient_accumulation_steps, rows, engine.module[0].in_features
        batches = torch.randn(shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        engine.accumulate(lambda batch: engine(batch).float().square().mean(), batches)
        engine.step()
    return full_state(engine.module, engine.optimizer)


def places(config):
    """Return where the section has parameters and gradients, and whether it has a budget."""
    found = config.zero_optimization.offload_param.device, config.offload_gradients.device
    return *found, config.host_budget is not None


STATE, GRADS, ALL = ("none", "none", True), ("none", "nvme", True), ("nvme", "nvme", False)
SIZES = {
    "all in memory": (512 * MiB, STATE, {"host"}, "everything fits into memory"),
    "part of the state": (120 * MiB, STATE, {"host", "nvme"}, "the optimizer state does not fit"),
    "gradients, too": (72 * MiB, GRADS, {"host", "nvme"}, "gradients do not fit into memory beside parameters"),
    "nothing is left": (MiB, ALL, {"nvme"}, "memory is scarce"),
}


@pytest.fixture(scope="module")
def expected():
    with initialize(model(width=WIDE), {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}) as engine:
        return train(engine)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", SIZES)
def test_what_memory_has_decides_and_the_bits_do_not_depend_on_it(name, expected, tmp_path, monkeypatch, capsys):
    left, chosen, tiers, why = SIZES[name]
    leave(monkeypatch, left)
    with initialize(model(width=WIDE), auto(tmp_path)) as engine:
        told = capsys.readouterr().err.splitlines()
        assert [why in line for line in told] == [True], told
        assert places(engine.config) == chosen
        assert {
            tier for tier in ("host", "nvme") if engine.optimizer.tier_plan.units_on(tier, "optimizer state")
        } == tiers
        written = json.loads(engine.config.model_dump_json(exclude_unset=True))
        assert OffloadConfig.from_dict(written) == engine.config, "what was chosen cannot be written as a section"
        assert_same(train(engine), expected)


ROWS = 128  # whose hidden states are 128 KiB, and 1 MiB in all blocks


def kept(engine):
    """Return what is kept of a forward and where, and whether anything has left memory."""
    section, moved = engine.config.activations, engine.activations and engine.activations.stats().written_bytes
    return section.device, section.keep, bool(moved)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("left", "more", "expected", "words"), [
    (MiB, {}, ("none", "boundaries", False), []),
    (-2 * GiB, {}, ("nvme", "boundaries", True), ["a forward saves 1 MiB for backward, and memory has 0 B"]),
    (-2 * GiB, {"gradient_accumulation_steps": 2}, ("nvme", "boundaries", True), ["inputs of blocks are kept"]),
    (-2 * GiB, {"activations": {"device": "none"}}, ("none", "boundaries", False), []),
    (-2 * GiB, {"frozen": 1}, ("nvme", "boundaries", True), ["inputs of blocks are kept"]),
], ids=["it fits", "one by one", "block by block", "nothing is left open", "the first block is frozen"])  # fmt: skip
def test_what_a_first_forward_saves_decides_what_is_kept(left, more, expected, words, tmp_path, monkeypatch, capsys):
    leave(monkeypatch, left)
    more = dict(more)
    made = partial(model, more.pop("frozen", 0))
    with initialize(made(), auto(tmp_path) | more) as engine:
        with torch.no_grad():
            engine(torch.zeros(ROWS, NARROW, dtype=torch.bfloat16))  # which saves nothing
        capsys.readouterr()
        chosen = train(engine, 2, ROWS)
        told = capsys.readouterr().err.splitlines()
        assert [word in line for word, line in zip(words, told, strict=True)] == [True] * len(words), told
        assert kept(engine) == expected
        printed = json.loads(engine.config.model_dump_json(exclude_unset=True))
    with initialize(made(), printed) as engine:
        assert_same(train(engine, 2, ROWS), chosen)
        assert kept(engine) == expected
    plain = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    with initialize(made(), plain | {key: more[key] for key in more if key != "activations"}) as engine:
        assert_same(train(engine, 2, ROWS), chosen)


@pytest.mark.parametrize(("room", "moving", "waiting", "expected"), [
    (8, 0, 1, Keeping("none")), (7, 0, 1, Keeping("boundaries")),
    (36, 0, 4, Keeping("none")),  # block by block all of them wait, and gradients of one more
    (8, 18, 4, Keeping("none", "horizontal")), (8, 19, 4, Keeping("boundaries")),
])  # fmt: skip
def test_the_order_is_that_which_moves_fewer_bytes(room, moving, waiting, expected):
    found = [SavedSizes(room, 1, 1, moving), SavedSizes(100, 1, 1, 0)]
    assert Keeping.of(found, 8, waiting) == expected


@pytest.mark.usefixtures("alone")
@GOES_ON
def test_micro_batches_begin_anew_where_another_order_moves_fewer_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("nvme_offload.optim.zero.keeping.Keeping.of", lambda *rest: Keeping("none", "horizontal"))
    leave(monkeypatch, MiB)
    section = auto(tmp_path) | {"gradient_accumulation_steps": 2}
    with initialize(model(), section) as engine:
        assert engine.config.goes_by_blocks
        chosen = train(engine, 2, ROWS)
        assert (engine.config.micro_batch_order, engine.activations) == ("horizontal", None)
    with initialize(model(), section | {"offload": None, "micro_batch_order": "horizontal"}) as engine:
        assert_same(train(engine, 2, ROWS), chosen)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("use_cache", "keep"), [(True, "all"), (False, "boundaries")])
def test_blocks_that_are_given_a_cache_are_not_computed_twice(use_cache, keep, tmp_path, monkeypatch):
    leave(monkeypatch, -2 * GiB)
    losses = []
    for section in auto(tmp_path) | {"activations": {"min_bytes": 0}}, {"zero_optimization": {"stage": 3}}:
        with initialize(llama(), section | {"bf16": {"enabled": True}}) as engine:
            tokens = torch.stack([row["input_ids"] for row in rows(8)])
            for _ in range(2):
                losses.append(engine(tokens, labels=tokens, use_cache=use_cache).loss)
                engine.backward(losses[-1])
                engine.step()
            if "offload" in section:
                assert kept(engine) == ("nvme", keep, True)
    assert torch.equal(torch.stack(losses[:2]), torch.stack(losses[2:]))


@on_ranks(2)
def test_ranks_keep_alike_what_a_first_forward_saves(rank, world_size, tmp_path):
    leave(pytest.MonkeyPatch(), GiB if rank else -2 * GiB)
    told = io.StringIO()
    for more in {}, {"gradient_accumulation_steps": 2}:
        with redirect_stderr(told), initialize(model(), auto(tmp_path) | more) as engine:
            chosen = train(engine, 1, ROWS)
            assert kept(engine) == ("nvme", "boundaries", not rank), "each has what its own memory has room for"
        with initialize(model(), {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}} | more) as engine:
            assert_same(train(engine, 1, ROWS), chosen)
    assert told.getvalue().count("inputs of blocks are kept") == 2 * (rank == 0)


@on_ranks(2)
def test_ranks_with_different_memory_choose_alike_and_one_tells(rank, world_size, tmp_path):
    leave(pytest.MonkeyPatch(), GiB if rank else world_size * MiB)
    told = io.StringIO()
    with redirect_stderr(told), initialize(model(), auto(tmp_path)) as engine:
        train(engine)
        assert places(engine.config) == ALL
    assert told.getvalue().count("memory is scarce") == (rank == 0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("first", "chosen"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((GiB, STATE), (72 * MiB, GRADS), (MiB, ALL))),
        (-2 * GiB, ALL),
    ],
)
def test_a_durable_run_goes_on_with_what_it_began_with(first, chosen, tmp_path, monkeypatch):
    leave(monkeypatch, first)
    section = auto(tmp_path, durable=True)
    with initialize(model(width=WIDE), section) as engine:
        assert engine.config.zero_optimization.offload_optimizer.rewrite_every == "auto"
        train(engine, 1, ROWS)
        began = kept(engine)
        assert began[0] == ("nvme" if first < 0 else "none")
    leave(monkeypatch, 120 * MiB if first == GiB else GiB)
    with initialize(model(width=WIDE), section) as engine:
        assert (places(engine.config), engine.config.activations.device) == (chosen, began[0])
        assert bool(engine.activations) == (first < 0), "it was chosen once"
        assert engine.resume() == (1, {})
        resumed = train(engine, 1, ROWS)
    with initialize(model(width=WIDE), {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}) as engine:
        train(engine, 1, ROWS)
        assert_same(resumed, train(engine, 1, ROWS))


def test_an_optimizer_alone_keeps_of_its_state_what_memory_holds(tmp_path, monkeypatch, capsys):
    leave(monkeypatch, 100 * MiB)
    section = {key: value for key, value in auto(tmp_path).items() if key != "bf16"}
    with OffloadAdamW(model(width=WIDE).parameters(), offload=section) as optimizer:
        plan, told = optimizer.tier_plan, capsys.readouterr().err
        assert plan.units_on("host", "optimizer state")
        assert plan.units_on("nvme", "optimizer state")
        assert told.count("\n") == 1
        assert "the optimizer state does not fit into memory" in told


def test_a_swapper_has_nothing_to_choose(tmp_path, capsys):
    with TensorSwapper(auto(tmp_path)):
        assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("zero", "more", "told"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, {}, 'offload = "auto": chooses what goes to NVMe; write'),
        ({"offload_param": {"device": "cpu"}}, {}, 'offload_param.device = "cpu": offload = "auto" chooses it'),
        ({}, {"offload_gradients": {"device": "cpu"}}, 'offload_gradients.device = "cpu": offload = "auto" chooses it'),
        ({}, {"offload": "fast"}, 'offload = "fast"'),
    ],
)
def test_what_leaves_nothing_to_choose_is_refused(zero, more, told, tmp_path):
    section = {**auto(tmp_path), **more}
    section["zero_optimization"] |= zero
    with pytest.raises(ConfigError, match=told):
        OffloadConfig.of(section)
