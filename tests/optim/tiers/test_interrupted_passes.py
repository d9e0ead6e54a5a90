"""An exception between any two instructions while FSDP2 gathers from tiers and hands gradients to them."""

import contextlib
import gc
from functools import partial

import pytest

from tests.support.drawn_runs import BASE, IN_MEMORY, engine_of, published
from tests.support.interrupts import (
    EACH,
    OURS,
    PACKAGES,
    SLOW,
    STRIKES,
    TORCH,
    Interrupt,
    Struck,
    every,
    raise_struck,
    send_sigint,
    struck,
)
from tests.support.sharded_model import GOES_ON, assert_same, full_state
from tests.support.tiers import EVERYTHING, check_buffers, loss_of, make, section, strike_each, train_step
from tests.support.training import noted

pytestmark = GOES_ON


def go_on(engine, number):
    """What is left of a step, as the engine counts its micro-batches."""
    before = engine.global_steps
    while engine.global_steps == before:
        if not engine._accumulation.has_backward:
            engine.backward(loss_of(engine, number, engine.micro_steps))
        engine.step()


def sections(path, mode):
    """Of the engine that is struck, and of its twin, which is updated inside `step()` with all in memory."""
    config = section(path, **EVERYTHING) if mode == "tiers" else section(path, state="nvme")
    twin = section(None)
    if mode in ("forward", "backward"):
        config["overlap_step"], twin["overlap_step"] = mode, "off"
    if mode == "backward":
        for each in (config, twin):
            each["gradient_clipping"], each["skip_non_finite"] = 0.0, False
    return config, twin


IN_PLACE = IN_MEMORY | {
    "rule": "AdamW",
    "precision": "bf16",
    "base": "rounded",
    "in_place": True,
    "count": 2,
    "stage": 3,
}
IN_PLACE |= {"params": "nvme", "grads": "nvme", "state": "nvme", "buffers": 3, "clip": 0.5, "checkpointing": False}
IN_PLACE |= {"aio": ("auto", 32, "64KiB")}


def makers(drive, mode):
    """Make an engine, and its twin."""
    if mode == "base in place":
        return partial(engine_of, drive, IN_PLACE, None), partial(engine_of, drive, IN_PLACE | IN_MEMORY, None)
    return [partial(make, config, num_layers=2) for config in sections(drive, mode)]


FRAMES = {"ours": OURS, "torch": TORCH}
FEW = [("tiers", "ours", 9001), ("forward", "torch", 15013), ("base in place", "ours", 15013)]
MODES = "tiers", "forward", "backward", "base in place"
MANY = [pytest.param(mode, inside, EACH, marks=SLOW) for mode in MODES for inside in FRAMES]


@STRIKES
@pytest.mark.parametrize(("mode", "inside", "stride"), [*FEW, *MANY])
def test_a_step_is_done_again_or_finished_or_refused(alone, tmp_path, mode, inside, stride, strike):
    """All its forwards, backwards and the step. What torch's own frames leave halfway is refused, never silent."""
    drive, root = tmp_path / "drive", tmp_path / "checkpoints"
    drive.mkdir()
    ours, its_twin = makers(drive, mode)
    engine = ours()
    with its_twin() as twin:

        def load(engine):
            twin.save_checkpoint(root)
            if inside == "torch":  # FSDP2 does not know any more what it has gathered
                engine.close()
                engine = ours()
            engine.load_checkpoint(root)
            return engine

        may_refuse = strike is raise_struck or inside == "torch"
        interrupts = every(stride, strike, FRAMES[inside])
        for engine, interrupt in strike_each(  # noqa: B020
            interrupts, engine, twin, train_step, go_on, load, may_refuse=may_refuse
        ):
            engine.optimizer.synchronize()
            interrupt.kept = None  # what its frames hold
            gc.collect()
            check_buffers(engine.optimizer, interrupt.place)
    engine.close()
    left = {path.name: path.read_bytes() for path in drive.iterdir()}
    assert left == ({BASE: published(IN_PLACE)} if mode == "base in place" else {})


def test_a_gather_that_is_cut_short_holds_no_buffer_that_nobody_gives_back(alone, tmp_path):
    with make(section(tmp_path, **EVERYTHING), num_layers=2) as engine:
        for number in range(3):  # from then on it is known what is used next, and read ahead
            train_step(engine, number)
        tier = engine.optimizer.store.blocks.params
        first, second = [shards[0] for shards in tier._shards.values()][:2]
        for interrupt in every(3, raise_struck):
            for shard in (first, second):
                try:
                    with interrupt:
                        tier.begin_gather(shard)
                except Struck:
                    pass
                holders = [gather for gather in tier._gathers if shard.block in gather.blocks]
                assert list(shard.block.holders) == holders, interrupt.place
            for gather in list(tier._gathers):
                tier._end(gather)
            tier._latest = None


def test_before_the_first_forward_there_is_nothing_to_forget(alone, tmp_path, monkeypatch):
    with make(section(tmp_path), num_layers=2) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.optimizer, "passing", lambda kind: raise_struck())
            with pytest.raises(Struck):
                train_step(engine, 0)
        train_step(engine, 0)
        assert engine.global_steps == 1


@pytest.mark.parametrize("tiers", [{}, EVERYTHING], ids=["memory", "nvme"])
def test_a_step_that_was_cut_off_at_its_very_end_is_done(alone, tmp_path, monkeypatch, tiers):
    ends = []
    for is_cut_off in (False, True):
        with make(section(tmp_path, **tiers) | {"overlap_step": "off"}, num_layers=2) as engine:
            if is_cut_off:
                with monkeypatch.context() as patch:
                    patch.setattr(engine.optimizer.store, "be_whole", raise_struck)
                    with pytest.raises(Struck) as caught:
                        train_step(engine, 0)
                assert caught.value.__notes__[0].startswith("Step 1 is complete")
                engine.step()
            else:
                train_step(engine, 0)
            train_step(engine, 1)
            ends.append(full_state(engine.module, engine.optimizer))
    assert_same(*ends)


IN_STEP = tuple(f"{PACKAGES[-1]}zero/{name}.py" for name in ("engine", "accumulation", "update"))


@pytest.fixture
def twins(alone):
    """Makes two engines that are alike; of one that is struck by Ctrl-C the schedule is looked at, too."""
    with contextlib.ExitStack() as on_exit:

        def make_both(strike):
            config = section(None, accumulation=1)
            if strike is send_sigint:
                config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10_000}}
            return [on_exit.enter_context(make(config, num_layers=1)) for _ in range(2)]

        yield make_both


def check_step(engine, twin, number, interrupt):
    """A step that is struck, and the next one."""
    train_step(twin, number)
    before = engine.global_steps
    engine.backward(loss_of(engine, number))
    struck(interrupt, engine.step)
    if engine.global_steps == before:
        go_on(engine, number)
    for each in (twin, engine):
        train_step(each, 10_000 + number)
    assert engine.global_steps == twin.global_steps, interrupt.place
    with noted(f"struck at {interrupt.place}"):
        assert_same(*(full_state(each.module, each.optimizer) for each in (engine, twin)))


@STRIKES
def test_an_update_is_never_taken_for_that_of_the_next_step(twins, strike):
    engine, twin = twins(strike)
    check_step(engine, twin, 0, Interrupt(lambda point: engine.global_steps == 1, strike, IN_STEP))


@pytest.mark.slow
@STRIKES
def test_the_end_of_a_step_belongs_to_that_step_alone(twins, strike):
    engine, twin = twins(strike)
    for number, interrupt in enumerate(every(EACH, strike, IN_STEP)):
        check_step(engine, twin, number, interrupt)
