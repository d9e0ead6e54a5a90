"""Parameters and gradients on NVMe when a drive, a disk or a user does what it should not: said, and nothing lost."""

import contextlib
import errno
import itertools
import os
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from nvme_offload import (
    ClosedError,
    ConfigError,
    FaultSpec,
    OffloadAdamW,
    OutOfSpaceError,
    StateError,
    SwapIOError,
    initialize,
)
from nvme_offload.offload.storage.extent import Stripe
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from tests.support.failing_drive import Failing, Op
from tests.support.ranks import be_alone, on_ranks
from tests.support.sharded_model import CAN_GO_ON, assert_same, backward, full_state, sharded_model
from tests.support.sharded_model import make as make_groups
from tests.support.tiers import ACCUMULATION, EVERYTHING, Model, loss_of, make, section, train_step

LAYERS = 4


@cache
def undisturbed(stage=3, tied=True):
    """Three steps with everything in memory."""
    with make(section(None, stage=stage), num_layers=LAYERS, tied=tied) as engine:
        for step in range(3):
            train_step(engine, step)
        return full_state(engine.module, engine.optimizer)


@pytest.mark.parametrize("key", ["offload_param", "offload_gradients"])
def test_a_plain_module_has_no_parts_that_could_move(alone, tmp_path, key):
    config = section(tmp_path, **{"param" if key == "offload_param" else "grads": "nvme"})
    wanted = rf'{key}\.device = "nvme": no parameter is a shard in parts.*split_parameters\(model, fp32_too=True\)'
    with pytest.raises(ConfigError, match=wanted):
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
    faults = FaultSpec(seed=1, short=0.3, eintr=0.2, eagain=0.2, delay=0.1, reorder=0.3, max_delay_us=2000)
    monkeypatch.setattr("nvme_offload.optim.tiers.block_tiers.NvmeTier", partial(NvmeTier, faults=faults))
    with make(section(tmp_path, **EVERYTHING), num_layers=LAYERS) as engine:
        for step in range(3):
            train_step(engine, step)
        assert_same(full_state(engine.module, engine.optimizer), undisturbed())


def refuse_second_write(tier, monkeypatch):
    start, writes, path = tier._start, itertools.count(1), tier.space.paths[0]

    def submit(op, extent, buffer, what, *more, **named):
        if op is Op.WRITE and next(writes) == 2:
            raise SwapIOError(errno.EIO, path=path, offset=0, size_bytes=1, direction="write", extent=what)
        return start(op, extent, buffer, what, *more, **named)

    monkeypatch.setattr(tier, "_start", submit)


@pytest.mark.parametrize("kind", ["state", "param"])
def test_a_placement_that_fails_leaves_nothing_behind_and_can_be_repeated(alone, tmp_path, monkeypatch, kind):
    """Layers are unfrozen, or added, in mid-training, and the second write of what moves to its tier then fails."""
    be_alone()
    ends = []
    for disturbed in (False, True):
        model = sharded_model(torch.bfloat16)
        config = section(tmp_path, param="nvme", state="nvme")
        if kind == "state":
            model.blocks.requires_grad_(False)
        known = make_groups(model, config) if kind == "state" else OffloadAdamW(model.head.parameters(), offload=config)
        with known as optimizer:
            backward(model, 0, 0)
            optimizer.step()
            model.zero_grad()
            model.blocks.requires_grad_(True)
            backward(model, 0, 1)
            late = {"params": list(model.blocks.parameters())}
            move = optimizer.step if kind == "state" else partial(optimizer.add_param_group, late)
            store = optimizer.store
            tier = store.tier if kind == "state" else store.blocks.params.cache.tier
            if disturbed:
                before, plan, bytes_taken = full_state(model, optimizer), store.plan, bytes_taken_on(tier)
                with monkeypatch.context() as patch:
                    Failing(tier, patch, Op.WRITE, 2) if kind == "state" else refuse_second_write(tier, patch)
                    with pytest.raises(SwapIOError, match=r"subgroup|parameters of"):
                        move()
                assert not optimizer.has_unfinished_step
                assert store.plan is plan
                assert bytes_taken_on(tier) == bytes_taken
                assert_same(full_state(model, optimizer), before)
            move()
            model.zero_grad()
            backward(model, 0, 2)
            optimizer.step()
            ends.append((full_state(model, optimizer), optimizer.stats().num_subgroups))
    assert_same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def bytes_taken_on(tier):
    """In each of its files."""
    return [file.ranges.end - sum(size for _, size in file.ranges._free) for file in tier.space._files]


@contextlib.contextmanager
def unreadable(engine, kind):
    """What is on a tier of layer 3 alone, in a file whose first page cannot be read: EIO, from the kernel."""
    engine.optimizer.synchronize()
    cache = getattr(engine.optimizer.store.blocks, kind).cache
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

    def update():
        engine.step()
        loss_of(engine, 2)  # behind a step this does it

    with unreadable(engine, kind), pytest.raises(SwapIOError, match=r"of layers\.3.* failed: EIO") as caught:
        update()
    assert any("step 2 stopped after" in note for note in caught.value.__notes__)
    engine.step() if engine.config.overlap_step == "off" else engine.optimizer.finish_step()


@pytest.mark.parametrize(
    ("kind", "moment", "stage", "tied"),
    [
        ("params", "forward", 3, True),
        pytest.param("params", "backward", 3, True, marks=pytest.mark.slow),
        ("params", "backward", 3, False),  # the head, which comes first in it, has its gradient by then
        ("params", "second forward", 1, True),  # the first micro-batch's gradients are not reduced yet
        pytest.param("params", "step", 3, True, marks=pytest.mark.slow),
        ("params", "behind", 3, True),
        ("grads", "second micro-batch", 3, True),
        ("grads", "step", 3, True),
        pytest.param("grads", "behind", 3, True, marks=pytest.mark.slow),
    ],
)
def test_an_unreadable_block_is_named_and_the_training_goes_on(alone, tmp_path, kind, moment, stage, tied):
    config = section(tmp_path, **EVERYTHING, stage=stage)
    config["aio"]["engine"] = "aiofiles"
    config |= {"overlap_step": "off"} if moment == "step" else {}
    if moment == "behind" and not CAN_GO_ON:
        return
    with make(config, num_layers=LAYERS, tied=tied) as engine:
        train_step(engine, 0)
        if moment in ("step", "behind"):
            fail_in_the_step(engine, kind)
        else:
            fail_in_a_pass(engine, kind, moment)
            if not CAN_GO_ON:
                return
            train_step(engine, 1)
        train_step(engine, 2)
        assert_same(full_state(engine.module, engine.optimizer), undisturbed(stage, tied))


@on_ranks(2)
def test_an_unreadable_block_on_several_ranks_ends_the_training(rank, world_size, tmp_path):
    """On both ranks at once: one alone would leave the other in a collective."""
    config = section(tmp_path, **EVERYTHING)
    config["aio"]["engine"] = "aiofiles"
    with make(config, num_layers=LAYERS) as engine:
        train_step(engine, 0, rank)
        with unreadable(engine, "params"), pytest.raises(SwapIOError, match=r"of layers\.3.* failed: EIO") as caught:
            loss_of(engine, 1)
        assert "end them all" in caught.value.__notes__[-1]
        with pytest.raises(StateError, match=r"cut off, actual one\..* end them all"):
            loss_of(engine, 1)


def test_a_step_is_finished_with_the_gradients_it_began_with(alone, tmp_path):
    ends = []
    for broken in (False, True):
        config = section(tmp_path, **EVERYTHING, accumulation=1) | {"overlap_step": "off"}
        config["aio"]["engine"] = "aiofiles"
        with make(config, num_layers=LAYERS) as engine:
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
    cache._on_pressure()
    for block in list(cache.residents):
        if not block.holds:
            while block.transfer:
                cache.wait()
                cache.settle_finished(report_writes=False)
            if block.buffer is not None:
                cache._evict(block)


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
