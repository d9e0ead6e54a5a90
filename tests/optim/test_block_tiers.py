"""Parameters and gradients on NVMe: the same bits as in memory, in every mix, however the blocks are used."""

import contextlib
import copy
import errno
import itertools
import os
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from aio_native import FaultSpec, Op
from offload.errors import ClosedError, ConfigError, OutOfSpaceError, StateError, SwapIOError
from offload.extent import Stripe
from offload.tier import NvmeTier
from optim import OffloadAdamW, get_full_grad, initialize, set_full_grad
from optim.sharding import default_mesh
from tests.optim.test_adamw_faults import Failing
from tests.optim.test_sharded import assert_same, backward, full_state, sharded_model
from tests.optim.test_sharded import make as make_groups
from tests.support.ranks import run_ranks
from tests.support.tiers import ACCUMULATION, Model, loss_of, make, section, train_step

STEPS = 20
MIXES = [  # parameters, gradients, optimizer state
    ("none", "none", "cpu"),
    ("cpu", "cpu", "cpu"),
    ("nvme", "nvme", "nvme"),
    ("nvme", "none", "cpu"),
    ("none", "nvme", "cpu"),
    ("nvme", "none", "nvme"),
]
CAN_GO_ON = hasattr(FSDPModule, "reset_iter_state")
"""Whether FSDP2 of this torch (2.13 and newer) can leave a pass halfway."""
EVERYTHING = {"param": "nvme", "grads": "nvme", "state": "nvme"}


BUDGETED = [0.2, 0.4, 0.7]  # of all that may be in memory; with everything else on NVMe


def train_in_mixes(rank, world_size, path):
    runs = []

    def train(config):
        norms = []
        with make(config, num_layers=3, checkpointing=True) as engine:
            for step in range(STEPS):
                train_step(engine, step, rank)
                norms.append(engine.get_global_grad_norm())
            runs.append((full_state(engine.module, engine.optimizer), norms))
            plan = engine.optimizer.tier_plan
        assert_same(runs[-1][0], runs[0][0])
        assert runs[-1][1] == runs[0][1], config
        return plan

    plans = {mix: train(section(path, *mix)) for mix in MIXES}
    on_nvme = plans["nvme", "nvme", "nvme"]
    for share in BUDGETED:
        budget = on_nvme.bytes_on("host") + int(share * on_nvme.bytes_on("nvme"))
        plan = train({**section(path, **EVERYTHING), "host_budget": budget})
        assert 0 < plan.bytes_on("nvme") < on_nvme.bytes_on("nvme")
    return runs[0][1]


def test_every_mix_gives_the_same_bits_on_one_rank(alone, tmp_path):
    assert max(train_in_mixes(0, 1, tmp_path)) > 0.5, "clipping acts"
    assert not list(tmp_path.iterdir())


def test_every_mix_gives_the_same_bits_on_two_ranks(tmp_path):
    first, second = run_ranks(train_in_mixes, 2, tmp_path)
    assert first == second, "the norm is one number for all ranks"
    assert not list(tmp_path.iterdir())


def compare(path, drive, **model):
    """Run `drive` on an engine in memory and on one with everything on NVMe; both must end with the same bits."""
    ends = []
    for tiers in ({}, EVERYTHING):
        with make(section(path, **tiers), **model) as engine:
            seen = drive(engine)
            ends.append((full_state(engine.module, engine.optimizer), seen))
    assert_same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def unused_and_used_twice(engine):
    for step, uses in enumerate(([0, 1, 2, 3, 4, 5], [2, 2, 5, 0], [5, 4, 4, 1, 0], [0, 1, 2, 3, 4, 5], [3, 3, 3])):
        engine.module.uses = uses
        train_step(engine, step)


def evaluation_and_generation(engine):
    seen = []
    for step in range(3):
        train_step(engine, step)
        engine.eval()
        with torch.no_grad():
            seen += [loss_of(engine, 50 + step, length=length).item() for length in (1, 2, 3, 9)]
        with torch.inference_mode():
            seen.append(loss_of(engine, 70 + step).item())
        engine.train()
    engine.eval()
    seen.append(loss_of(engine, 60).item())  # with a graph that nobody goes back through
    engine.train()
    train_step(engine, 4)
    return seen


def changing_batches(engine):
    for step, length in enumerate((7, 2, 11, 5)):
        train_step(engine, step, length=length)


def gradients_looked_at_and_set(engine):
    """Between micro-batches, from the last parameter to the first and back."""
    seen, params = [], engine.optimizer.param_groups[0]["params"]
    for step in range(2):
        for micro in range(ACCUMULATION):
            engine.backward(loss_of(engine, step, micro))
            for param in (params[-1], params[0], params[-1]):
                grad = get_full_grad(param)
                seen.append(grad.tolist())
                set_full_grad(param, grad * 3 + 1)
                assert torch.equal(get_full_grad(param), (grad * 3 + 1).to(param.grad.dtype).float())
            engine.step()
        assert get_full_grad(params[0]) is None
    return seen


def stopped_and_started_again(engine):
    """Gradients dropped in the middle of a step, in both ways."""
    engine.backward(loss_of(engine, 0))
    engine.optimizer.zero_grad()
    engine.micro_steps = 0
    train_step(engine, 1)
    engine.backward(loss_of(engine, 2))
    engine.optimizer.zero_grad(set_to_none=False)
    engine.micro_steps = 0
    train_step(engine, 3)


def clipped_by_hand(engine):
    norms = []
    for step in range(3):
        engine.backward(loss_of(engine, step))
        engine.step()
        engine.backward(loss_of(engine, step, 1))
        norms.append(engine.optimizer.clip_grad_norm_(0.1 + step).item())
        engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(min(norms[2], 2.1), rel=1e-5)
    return norms


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(
    "drive",
    [
        unused_and_used_twice,
        evaluation_and_generation,
        changing_batches,
        gradients_looked_at_and_set,
        stopped_and_started_again,
        clipped_by_hand,
    ],
)
def test_it_is_right_when(alone, tmp_path, drive, checkpointing):
    compare(tmp_path, drive, checkpointing=checkpointing)
    assert not list(tmp_path.iterdir())


def test_a_plain_loop_with_parameter_groups_has_the_same_bits_and_writes_each_block_once(alone, tmp_path):
    """Weights and biases of one block are in two parameter groups: the step still visits the block once."""
    default_mesh("cpu")
    ends = []
    for tiers in ({}, EVERYTHING):
        model = sharded_model(torch.bfloat16)
        with make_groups(model, section(tmp_path, **tiers)) as optimizer:
            for step in range(4):
                backward(model, 0, step)
                optimizer.synchronize()
                before = optimizer.stats()
                optimizer.step()
                optimizer.synchronize()
                written = optimizer.stats().param_bytes_written - before.param_bytes_written
                optimizer.zero_grad()
            if tiers:
                assert written == sum(block.size_bytes for block in optimizer._store.blocks.params.cache.blocks)
            ends.append(full_state(model, optimizer))
    assert_same(*ends)


def test_frozen_parameters_are_gathered_from_the_tier_and_stay(alone, tmp_path):
    ends = []
    for tiers in ({}, EVERYTHING):
        torch.manual_seed(0)
        model = Model()
        for layer in (0, 3):
            model.layers[layer].up.requires_grad_(False)
        model.layers[5].requires_grad_(False)
        wanted = model.layers[5].up.weight.detach().clone()
        with initialize(model, section(tmp_path, **tiers)) as engine:
            for step in range(4):
                train_step(engine, step)
            assert torch.equal(engine.module.layers[5].up.weight.detach().full_tensor(), wanted)
            ends.append(full_state(engine.module, engine.optimizer))
    assert_same(*ends)


def test_state_dicts_go_out_of_the_tiers_and_back(alone, tmp_path):
    with make(section(tmp_path, **EVERYTHING)) as engine, make(section(tmp_path)) as straight:
        for step in range(4):
            train_step(straight, step)
            if step < 2:
                train_step(engine, step)
        weights, state = copy.deepcopy(engine.module.state_dict()), engine.optimizer.state_dict()
        with make(section(tmp_path, **EVERYTHING)) as resumed:
            train_step(resumed, 9)
            resumed.module.load_state_dict(weights)
            resumed.optimizer.load_state_dict(state)
            assert_same(full_state(resumed.module, resumed.optimizer), full_state(engine.module, engine.optimizer))
            for step in (2, 3):
                train_step(resumed, step)
            assert_same(full_state(resumed.module, resumed.optimizer), full_state(straight.module, straight.optimizer))


def test_a_gradient_on_the_tier_says_what_to_use_instead(alone, tmp_path):
    with make(section(tmp_path, grads="nvme")) as engine:
        engine.backward(loss_of(engine, 0))
        grad = next(engine.module.parameters()).grad
        assert grad.dtype is torch.bfloat16
        for touch in (lambda: grad + 1, grad.sum, lambda: grad.to_local().tolist()):
            with pytest.raises(StateError, match=r"gradients of .*optimizer\.clip_grad_norm_"):
                touch()
        with pytest.raises(StateError, match=r"optimizer\.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)


def test_blocks_are_read_before_they_are_needed(alone, tmp_path):
    """In forward and backward, where nothing is written: every read but those of the first step is ahead, and used."""
    with make(section(tmp_path, "nvme", accumulation=1), num_layers=9) as engine:
        for step in range(5):
            engine.optimizer.synchronize()
            before = engine.optimizer.stats()
            engine.backward(loss_of(engine, step))
            after = engine.optimizer.stats()
            engine.step()
            if step == 0:
                continue
            reads = after.param_reads - before.param_reads
            assert reads > 0
            assert after.param_uses - before.param_uses == 20  # nine layers and what is around them, twice
            assert after.param_reads_ahead - before.param_reads_ahead == reads
            assert after.param_reads_unused == before.param_reads_unused
            assert reads <= 20 + 2, "no block is read twice for one use; two may be read for the step that follows"


def test_without_read_ahead_every_read_is_waited_for(alone, tmp_path):
    with make(section(tmp_path, "nvme", read_ahead=False)) as engine:
        for step in range(3):
            train_step(engine, step)
        stats = engine.optimizer.stats()
        assert stats.param_reads > 0
        assert stats.param_reads_ahead == 0


def test_what_is_in_memory_is_the_staging_buffers(alone, tmp_path):
    """Two bytes for each element of the largest block, as often as there are buffers, whatever the number of blocks."""
    for num_layers in (4, 12):
        with make(section(tmp_path, "nvme", "nvme", "cpu"), num_layers=num_layers) as engine:
            train_step(engine, 0)
            engine.optimizer.synchronize()
            largest = sum(p.numel() for p in engine.module.layers[0].parameters())
            stats = engine.optimizer.stats()
            assert stats.staging_bytes <= (3 + 2) * (2 * largest + 4096 + 64 * 6)
            moved = num_layers * largest * 2
            assert stats.param_bytes_written >= 2 * moved  # at birth, and by the step
            assert stats.grad_bytes_written >= 2 * moved  # in both micro-batches
            for parameter in engine.module.parameters():
                assert parameter.grad is None


def test_a_block_larger_than_a_buffer_is_refused_before_anything_is_changed(alone, tmp_path):
    torch.manual_seed(0)
    model = Model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ConfigError, match=r"buffer_size = 5000: parameters of layers\.0 take 13\d\d\d bytes .*at least 6"
    ):
        initialize(model, section(tmp_path, "nvme", buffer_size=5000))
    assert not any(type(module).__name__.startswith("FSDP") for module in model.modules())
    assert_same(model.state_dict(), before)
    assert not list(tmp_path.iterdir())
    with initialize(model, section(tmp_path, "nvme", buffer_size=7000)) as engine:
        train_step(engine, 0)


@pytest.mark.parametrize("key", ["offload_param", "offload_gradients"])
def test_other_precisions_are_refused_by_key(alone, tmp_path, key):
    config = section(tmp_path, **{"param" if key == "offload_param" else "grads": "nvme"})
    config["bf16"] = {"enabled": False}
    with pytest.raises(ConfigError, match=rf'{key}\.device = "nvme": .*write bf16\.enabled = true, or "none"'):
        initialize(Model(), config)
    with pytest.raises(ConfigError, match=rf'{key}\.device = "nvme": no parameter is an fp32 shard'):
        OffloadAdamW(Model().parameters(), offload=config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tiers", [{"param": "nvme"}, {"grads": "nvme"}, EVERYTHING], ids=["p", "g", "all"])
def test_a_disk_that_is_too_small_is_said_and_nothing_stays(alone, tmp_path, monkeypatch, tiers):
    class Full:
        f_bavail, f_frsize, f_blocks = 8, 4096, 1000

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Full())
    model = Model()
    with pytest.raises(OutOfSpaceError, match=r"needed .*free 32768|needed .* free 32 KiB"):
        initialize(model, section(tmp_path, **tiers))
    assert not list(tmp_path.iterdir())
    loss_of(model, 0).backward()  # the weights are still in memory


def test_what_a_drive_does_in_a_bad_hour_changes_nothing(alone, tmp_path, monkeypatch):
    """Short transfers, interruptions, delays and completions out of order, on all tiers."""
    ends = []
    for seed in (None, 1, 2):
        faults = FaultSpec(seed=seed or 0, short=0.3, eintr=0.2, eagain=0.2, delay=0.1, reorder=0.3, max_delay_us=2000)

        class FaultyTier(NvmeTier):
            def __init__(self, config, *, paths=None, faults=faults):
                super().__init__(config, paths=paths, faults=faults)

        with monkeypatch.context() as patch:
            if seed is not None:
                patch.setattr("optim.block_tiers.NvmeTier", FaultyTier)
            with make(section(tmp_path, **EVERYTHING)) as engine:
                for step in range(3):
                    train_step(engine, step)
                ends.append(full_state(engine.module, engine.optimizer))
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


def refuse_second_write(tier, monkeypatch):
    start, writes, path = tier._start, itertools.count(1), tier.space.paths[0]

    def submit(op, extent, buffer, what, kind, size_bytes):
        if op is Op.WRITE and next(writes) == 2:
            raise SwapIOError(errno.EIO, path=path, offset=0, size_bytes=1, direction="write", extent=what)
        return start(op, extent, buffer, what, kind, size_bytes)

    monkeypatch.setattr(tier, "_start", submit)


@pytest.mark.parametrize("kind", ["state", "param"])
def test_a_placement_that_fails_leaves_nothing_behind_and_can_be_repeated(alone, tmp_path, monkeypatch, kind):
    """Layers are unfrozen in mid-training, and the second write of what moves to its tier then fails."""
    default_mesh("cpu")
    ends = []
    for disturbed in (False, True):
        model = sharded_model(torch.bfloat16)
        model.blocks.requires_grad_(False)
        with make_groups(model, section(tmp_path, param="nvme", state="nvme")) as optimizer:
            backward(model, 0, 0)
            optimizer.step()
            optimizer.zero_grad()
            model.blocks.requires_grad_(True)
            backward(model, 0, 1)
            store = optimizer._store
            tier = store.tier if kind == "state" else store.blocks.params.cache.tier
            if disturbed:
                before, plan, bytes_taken = full_state(model, optimizer), store.plan, bytes_taken_on(tier)
                with monkeypatch.context() as patch:
                    Failing(tier, patch, Op.WRITE, 2) if kind == "state" else refuse_second_write(tier, patch)
                    with pytest.raises(SwapIOError, match=r"subgroup|parameters of"):
                        optimizer.step()
                assert not optimizer.has_unfinished_step
                assert store.plan is plan
                assert bytes_taken_on(tier) == bytes_taken
                assert_same(full_state(model, optimizer), before)
            optimizer.step()
            optimizer.zero_grad()
            backward(model, 0, 2)
            optimizer.step()
            ends.append((full_state(model, optimizer), optimizer.stats().num_subgroups))
    assert_same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def bytes_taken_on(tier):
    """In each of its files."""
    return [file._free.end - sum(size for _, size in file._free._free) for file in tier.space._files]


@contextlib.contextmanager
def unreadable(engine, kind):
    """What is on a tier of layer 3 alone, in a file whose first page cannot be read: EIO, from the kernel."""
    engine.optimizer.synchronize()
    cache = getattr(engine.optimizer._store.blocks, kind).cache
    drop_copies(cache)
    block = next(block for block in cache.blocks if block.name.endswith("layers.3"))
    good = block.extent
    with open("/proc/self/mem", "rb") as broken:
        block.extent = replace(good, stripes=(Stripe(broken.fileno(), 0, good.size_bytes),))
        yield
        for other in cache.blocks:
            if other.transfer is not None:
                other.transfer.operation.wait()
        block.extent = good


def fail_in_a_pass(engine, kind, moment):
    if moment.startswith("second"):
        engine.backward(loss_of(engine, 1))
        engine.step()
    loss = None if moment.endswith("forward") else loss_of(engine, 1, 1)
    with unreadable(engine, kind), pytest.raises(SwapIOError, match=r"of layers\.3.* failed: EIO") as caught:
        loss_of(engine, 1) if loss is None else engine.backward(loss)
    if CAN_GO_ON:
        assert "do it again from its first micro-batch" in caught.value.__notes__[-1]
        assert engine.micro_steps == 0
    else:
        assert "make a new engine, load a checkpoint" in caught.value.__notes__[-1]


def fail_in_the_step(engine, kind):
    for micro in range(ACCUMULATION):
        engine.step() if micro else None
        engine.backward(loss_of(engine, 1, micro))
    with unreadable(engine, kind), pytest.raises(SwapIOError, match=r"of layers\.3.* failed: EIO") as caught:
        engine.step()
    assert "step 2 stopped after" in caught.value.__notes__[-1]
    engine.step()


@pytest.mark.parametrize(
    ("kind", "moment", "stage", "tied"),
    [
        ("params", "forward", 3, True),
        ("params", "backward", 3, True),
        ("params", "backward", 3, False),  # the head, which comes first in it, has its gradient by then
        ("params", "second forward", 1, True),  # the first micro-batch's gradients are not reduced yet
        ("params", "step", 3, True),
        ("grads", "second micro-batch", 3, True),
        ("grads", "step", 3, True),
    ],
)
def test_an_unreadable_block_is_named_and_the_training_goes_on(alone, tmp_path, kind, moment, stage, tied):
    ends = []
    for broken in (False, True):
        config = section(tmp_path, **EVERYTHING, stage=stage)
        config["aio"]["engine"] = "aiofiles"
        with make(config, tied=tied) as engine:
            train_step(engine, 0)
            if not broken:
                train_step(engine, 1)
            elif moment == "step":
                fail_in_the_step(engine, kind)
            else:
                fail_in_a_pass(engine, kind, moment)
                if not CAN_GO_ON:
                    return
                train_step(engine, 1)
            train_step(engine, 2)
            ends.append(full_state(engine.module, engine.optimizer))
    assert_same(*ends)


def cannot_read_its_shard(rank, world_size, path):
    """On both ranks at once: one alone would leave the other in a collective."""
    config = section(path, **EVERYTHING)
    config["aio"]["engine"] = "aiofiles"
    with make(config) as engine:
        train_step(engine, 0, rank)
        with unreadable(engine, "params"), pytest.raises(SwapIOError, match=r"of layers\.3.* failed: EIO") as caught:
            loss_of(engine, 1)
        assert "end them all" in caught.value.__notes__[-1]
        with pytest.raises(StateError, match=r"cut off, actual one\..* end them all"):
            loss_of(engine, 1)


def test_an_unreadable_block_on_several_ranks_ends_the_training(tmp_path):
    run_ranks(cannot_read_its_shard, 2, tmp_path)


def test_a_step_is_finished_with_the_gradients_it_began_with(alone, tmp_path):
    ends = []
    for broken in (False, True):
        config = section(tmp_path, **EVERYTHING, accumulation=1)
        config["aio"]["engine"] = "aiofiles"
        with make(config) as engine:
            engine.backward(loss_of(engine, 0))
            if broken:
                with unreadable(engine, "params"), pytest.raises(SwapIOError):
                    engine.optimizer.step()
                engine.optimizer.zero_grad()
                engine.optimizer.finish_step()
            else:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            ends.append(full_state(engine.module, engine.optimizer))
            loss_of(engine, 1).backward()
            with unreadable(engine, "params"), pytest.raises(SwapIOError):
                engine.optimizer.step()
            engine.optimizer.zero_grad()
            loss_of(engine, 2).backward()
            with pytest.raises(StateError, match="gradients that have changed since"):
                engine.optimizer.finish_step()
    assert_same(*ends)


def drop_copies(cache):
    """Everything is on the tier alone."""
    cache.on_pressure()
    for block in list(cache._resident):
        if not block.holds:
            while block.transfer:
                cache._await_completion()
                cache._settle_finished()
            if block.buffer is not None:
                cache._give_up_buffer(block)


def test_a_path_that_is_missing_leaves_the_others_empty(alone, tmp_path):
    config = section(tmp_path, **EVERYTHING)
    config["offload_gradients"]["nvme_path"] = str(tmp_path / "missing")
    with pytest.raises(SwapIOError, match="missing"):
        initialize(Model(), config)
    assert not list(tmp_path.iterdir())


def test_use_after_close_is_said(alone, tmp_path):
    engine = make(section(tmp_path, **EVERYTHING))
    train_step(engine, 0)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError, match="the parameter tier, which holds the weights, is closed"):
        loss_of(engine, 1)
    assert not list(tmp_path.iterdir())
