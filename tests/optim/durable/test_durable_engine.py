"""A training engine whose steps last: schedule, loss scale, buffers and several ranks, in every precision and tier."""

import errno
import os
import random
import signal
import threading
import warnings
from contextlib import contextmanager, nullcontext, suppress

import pytest

from nvme_offload.offload.errors import ConfigWarning, StateError
from tests.support.ranks import run_ranks
from tests.support.resuming import fresh_engine, scalars_of, section, steps_of
from tests.support.sharded_model import assert_same, full_state

TIERS = {
    "state": {},
    "everything": {
        "zero_optimization": {"offload_param": {"device": "nvme"}},
        "offload_gradients": {"device": "nvme"},
    },
    "in memory too": {"host_budget": "8MiB"},
    "off": {"overlap_step": "off"},
    "backward": {"overlap_step": "backward", "gradient_clipping": 0.0, "skip_non_finite": False},
}
TIERS |= {f"{name}, logged": {**more, "rewrite_every": 3} for name, more in TIERS.items()}


def durable(mode, path, name, tiers="state"):
    """An engine with this name of its run; None: one that ends with its process."""
    more = {key: dict(value) if isinstance(value, dict) else value for key, value in TIERS[tiers].items()}
    made = section(mode, path)
    zero = made["zero_optimization"] | more.pop("zero_optimization", {})
    period = more.pop("rewrite_every", 1)
    if name:
        zero["offload_optimizer"] |= {"durable": name, "rewrite_every": period}
    if period > 1:
        zero["offload_optimizer"]["staging_budget"] = "6MiB"
    for part in (zero.get("offload_param"), more.get("offload_gradients")):
        if part:
            part["nvme_path"] = str(path)
    return fresh_engine(mode, path, zero_optimization=zero, **more)


def settle(engine):
    """Have the latest step last, or be said to have failed, on all ranks."""
    engine.optimizer.synchronize()
    engine.optimizer.commits.settle()


def whole(engine):
    return full_state(engine.module, engine.optimizer), scalars_of(engine)


def expected(mode, path, num_steps, tiers="state", rank=0):
    with durable(mode, path, None, tiers) as engine:
        losses = steps_of(engine, rank, range(num_steps))
        return *whole(engine), losses


def assert_goes_on_to(engine, mode, path, done, num_steps, tiers="state", rank=0):
    losses = steps_of(engine, rank, range(done, num_steps))
    state, scalars, all_losses = expected(mode, path, num_steps, tiers, rank)
    found, found_scalars = whole(engine)
    assert losses == all_losses[done:]
    assert found_scalars == scalars
    assert_same(found, state)


QUICK = [("bf16", "state"), ("fp16", "state, logged"), ("bf16", "everything, logged")]
SLOW = [("fp16", "state"), ("fp32", "state"), ("fp32", "everything"), ("fp32", "everything, logged")]
SLOW += [("bf16", tiers) for tiers in TIERS if ("bf16", tiers) not in QUICK]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("mode", "tiers"), CASES)
def test_an_engine_goes_on_where_another_ended(drive, mode, tiers):
    with durable(mode, drive, "run", tiers) as engine:
        assert engine.resume() is None
        for step in range(3):
            engine.client_state["position"] = step + 1
            steps_of(engine, 0, [step])
        engine.module.num_batches += 100
        engine.client_state["position"] = 30
        engine.commit()
        engine.module.num_batches -= 100
        engine.commit()
        before = whole(engine)
    with durable(mode, drive, "run", tiers) as engine:
        assert engine.resume() == (3, {"position": 30})
        after = whole(engine)
        assert_same(after[0], before[0])
        assert after[1] == before[1]
        assert_goes_on_to(engine, mode, drive, 3, 5, tiers)
        assert engine.optimizer.stats().failed_commits == 0
        slots = engine.optimizer.commits.run.extents.slots
        assert any(slot.current.log for slot in slots) == ("logged" in tiers and mode != "fp32")


@pytest.mark.usefixtures("alone")
def test_a_loaded_checkpoint_is_committed_and_a_step_back_is_taken_with_all_of_it(drive, tmp_path):
    with durable("fp16", drive, "run") as engine:
        steps_of(engine, 0, range(3))
        engine.save_checkpoint(tmp_path / "saved", client_state={"at": 3})
        steps_of(engine, 0, range(3, 5))
        assert engine.rewind() == (4, {})
        engine.load_checkpoint(tmp_path / "saved")
    with durable("fp16", drive, "run") as engine:
        with pytest.raises(StateError, match="a run that was resumed"):
            steps_of(engine, 0, [0])
        engine.zero_grad()
        assert engine.resume() == (3, {"at": 3})
        assert_goes_on_to(engine, "fp16", drive, 3, 4)


@contextmanager
def failing(engine):
    """The drive keeps nothing."""

    def fail(*_):
        raise OSError(errno.EIO, "it is broken")

    run = engine.optimizer.commits.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "commit", fail)
        yield


def go_on_with_one_rank_behind(rank, world_size, path, tiers):
    with durable("bf16", path, "run", tiers) as engine:
        assert engine.resume() is None
        steps_of(engine, rank, range(3))
    with durable("bf16", path, "run", tiers) as engine:
        run = engine.optimizer.commits.run
        assert [manifest.step for manifest in run.found] == [3, 2]
        if rank == 1:  # killed before this one lasted
            run.found = run.found[1:]
        assert engine.resume() == (2, {})
        assert_goes_on_to(engine, "bf16", path, 2, 4, rank=rank)
        with failing(engine) if rank else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps_of(engine, rank, [4])
            settle(engine)
        assert engine.optimizer.stats().failed_commits == rank
        assert engine.optimizer.stats().committed_step == 4
        steps_of(engine, rank, [5])
        settle(engine)
        assert engine.optimizer.stats().committed_step == 6
        after = whole(engine)
    with durable("bf16", path, "run", tiers) as engine:
        assert engine.resume() == (6, {})
        assert_same(whole(engine)[0], after[0])


@pytest.mark.parametrize("tiers", [pytest.param("state", marks=pytest.mark.slow), "state, logged"])
def test_ranks_go_on_from_the_latest_step_that_all_of_them_have(drive, tiers):
    run_ranks(go_on_with_one_rank_behind, 2, drive, tiers)


def refuse_backward(rank, world_size, path):
    with pytest.warns(ConfigWarning, match="agree in step"):
        engine = durable("bf16", path, "run", "backward")
    with engine:
        steps_of(engine, rank, range(2))
        assert engine.optimizer.stats().updates_in_backward == 0
        assert engine.optimizer.stats().updates_behind > 0


@pytest.mark.slow
def test_several_ranks_begin_no_update_in_backward_and_say_so(drive):
    run_ranks(refuse_backward, 2, drive)


NUM_STEPS = 12


def live_until_killed(rank, world_size, path, tiers, seconds):
    """Train to the end; where there are `seconds`, this process is killed after so many."""
    if seconds is not None:
        threading.Timer(seconds[rank], os.kill, (os.getpid(), signal.SIGKILL)).start()
    with durable("bf16", path, "run", tiers) as engine:
        step, _ = engine.resume() or (0, {})
        for number in range(step, NUM_STEPS):
            steps_of(engine, rank, [number])
            (path / f"rank{rank}.done").write_text(str(number + 1))
        return step, *whole(engine)


def live_unharmed(rank, world_size, path):
    return expected("bf16", path, NUM_STEPS, rank=rank)[:2]


def finished(path):
    return min((int(file.read_text() or 0) for file in path.glob("rank?.done")), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["state", "state, logged"])
@pytest.mark.parametrize("seed", range(3))
def test_two_ranks_that_are_killed_at_any_moment_go_on_together_and_end_with_the_same_bits(drive, seed, tiers):
    chance, resumed = random.Random(seed), []
    unharmed = run_ranks(live_unharmed, 2, drive)
    for _ in range(8):
        done, begun = finished(drive), chance.uniform(0.5, 6)
        with suppress(AssertionError):  # which says how each rank ended
            run_ranks(live_until_killed, 2, drive, tiers, [begun, begun + chance.choice([0, 0.01, 0.5])])
        resumed.append(done)
    done = finished(drive)
    first, second = run_ranks(live_until_killed, 2, drive, tiers, None)
    assert first[0] == second[0] >= done - 1
    for (state, scalars), (_, found, found_scalars) in zip(unharmed, (first, second), strict=True):
        assert found_scalars == scalars
        assert_same(found, state)
    assert max(resumed) > 0, "no life came to a step"
