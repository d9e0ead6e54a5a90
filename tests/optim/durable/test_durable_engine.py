"""A training engine whose steps last: schedule, loss scale, buffers and several ranks, in every precision and tier."""

import errno
import resource
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import Mock

import pytest

from nvme_offload import ResumeError, StateError, SwapIOError
from tests.support.durable_engine import TIERS, assert_goes_on_to, durable, expected, settle, whole
from tests.support.interrupts import sigint_at_update
from tests.support.ranks import on_ranks
from tests.support.resuming import steps_of
from tests.support.sharded_model import assert_same

QUICK = [("bf16", "state"), ("fp16", "state, logged"), ("bf16", "everything, logged")]
SLOW = [("bf16", tiers) for tiers in TIERS if ("bf16", tiers) not in QUICK]  # other precisions: test_drawn_runs.py
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
        if "everything" in tiers:  # whose tiers take nothing at first, which makes no step a damaged one
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, -1))
            with pytest.raises(ResumeError, match=r"is whole, and cannot go on now: .* EFBIG"):
                engine.resume()
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        assert engine.resume() == (3, {"position": 30})
        after = whole(engine)
        assert_same(after[0], before[0])
        assert after[1] == before[1]
        assert_goes_on_to(engine, mode, 3, 5, tiers)
        assert engine.optimizer.stats().failed_commits == 0
        slots = engine.optimizer.durable.commits.run.extents.slots
        assert any(slot.current.log for slot in slots) == ("logged" in tiers and mode != "fp32")


@pytest.mark.usefixtures("alone")
def test_a_loaded_checkpoint_is_committed_and_a_step_back_is_taken_with_all_of_it(drive, tmp_path):
    with durable("fp16", drive, "run") as engine:
        steps_of(engine, 0, range(3))
        engine.save_checkpoint(tmp_path / "saved", client_state={"at": 3})
        steps_of(engine, 0, range(3, 5))
        for method in ("commit", "resume", "rewind"):  # without what the engine has of the run
            with pytest.raises(StateError, match=rf"optimizer.{method}: expected engine.{method}"):
                getattr(engine.optimizer, method)()
        assert engine.rewind() == (4, {})
        engine.load_checkpoint(tmp_path / "saved")
    with durable("fp16", drive, "run") as engine:
        with pytest.raises(StateError, match="a run that was resumed"):
            steps_of(engine, 0, [0])
        engine.zero_grad()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, -1))
        with pytest.raises(SwapIOError, match="EFBIG"):
            engine.load_checkpoint(tmp_path / "saved")
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        assert engine.resume() == (3, {"at": 3})
        assert_goes_on_to(engine, "fp16", 3, 4)


@contextmanager
def failing(engine):
    """The drive keeps nothing."""
    run = engine.optimizer.durable.commits.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "commit", Mock(side_effect=OSError(errno.EIO, "it is broken")))
        yield


@pytest.mark.parametrize("tiers", [pytest.param("state", marks=pytest.mark.slow), "state, logged"])
@on_ranks(2)
def test_ranks_go_on_from_the_latest_step_that_all_of_them_have(rank, world_size, drive, tiers):
    with durable("bf16", drive, "run", tiers) as engine:
        assert engine.resume() is None
        steps_of(engine, rank, range(3))
    with durable("bf16", drive, "run", tiers) as engine:
        run = engine.optimizer.durable.commits.run
        assert [manifest.step for manifest in run.found] == [3, 2]
        if rank == 1:  # killed before this one lasted
            run.found = run.found[1:]
        assert engine.resume() == (2, {})
        assert_goes_on_to(engine, "bf16", 2, 4, rank=rank)
        with failing(engine) if rank else nullcontext(), warnings.catch_warnings(action="ignore"):
            steps_of(engine, rank, [4])
            settle(engine)
        assert engine.optimizer.stats().failed_commits == rank
        assert engine.optimizer.stats().committed_step == 4
        steps_of(engine, rank, [5])
        settle(engine)
        assert engine.optimizer.stats().committed_step == 6
        after = whole(engine)
    with durable("bf16", drive, "run", tiers) as engine:
        assert engine.resume() == (6, {})
        assert_same(whole(engine)[0], after[0])


@on_ranks(2)
def test_ranks_begin_anew_where_only_the_first_commit_of_all_was_under_way(rank, world_size, drive):
    def end_after(num_steps):
        with durable("bf16", drive, "run") as engine:
            assert engine.resume() is None
            steps_of(engine, rank, range(num_steps))
            settle(engine)

    def lose_all():
        with durable("bf16", drive, "run") as engine:
            if rank == 1:
                engine.optimizer.durable.commits.run.forget_commits()

    end_after(1)
    lose_all()
    with durable("bf16", drive, "run") as engine:
        assert engine.resume() is None
        assert_goes_on_to(engine, "bf16", 0, 3, rank=rank)
        settle(engine)
    lose_all()
    with durable("bf16", drive, "run") as engine, pytest.raises(ResumeError, match="rank 1 has nothing"):
        engine.resume()


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_is_loaded_over_a_run_of_one_commit(drive, tmp_path):
    with durable("bf16", drive, None) as engine:
        steps_of(engine, 0, range(2))
        engine.save_checkpoint(tmp_path / "saved")
    with durable("bf16", drive, "run") as engine:
        steps_of(engine, 0, [7])
    with durable("bf16", drive, "run") as engine:
        engine.load_checkpoint(tmp_path / "saved")
    with durable("bf16", drive, "run") as engine:
        assert engine.resume() == (2, {})
        assert_goes_on_to(engine, "bf16", 2, 4)


@on_ranks(2)
def test_a_rank_whose_updates_stop_before_the_first_commit_keeps_no_other_waiting(rank, world_size, drive):
    with durable("bf16", drive, "run") as engine:
        engine.optimizer.place()
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000 if rank else -1, -1))  # inside a block
        steps_of(engine, rank, [0])
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        if rank == 1:
            with pytest.raises(SwapIOError, match="EFBIG"):
                engine.optimizer.synchronize()
            engine.optimizer.finish_step()
        steps_of(engine, rank, range(1, 3))
        assert_same(whole(engine)[0], expected("bf16", 3, rank=rank)[0])
    with durable("bf16", drive, "run") as engine:
        assert engine.resume()[0] == 3


@pytest.mark.parametrize("starts_again", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_a_rewind_that_a_drive_stops_is_resumed_in_the_same_process_and_in_another(
    rank, world_size, drive, starts_again
):
    last = 4 if world_size == 1 else 3  # the other one has destroyed what is newer
    with ExitStack() as life:
        engine = life.enter_context(durable("bf16", drive, "run"))
        steps_of(engine, rank, range(4))
        settle(engine)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if rank == world_size - 1 else -1, -1))
        with pytest.raises((SwapIOError, StateError)) as caught:
            engine.rewind()
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        assert "call resume() to go on from the latest committed step, or load" in caught.value.__notes__[-1]
        with pytest.raises(StateError, match=r"a load stopped halfway: .* call resume\(\)"):
            engine.commit()
        if starts_again:
            life.close()
            engine = life.enter_context(durable("bf16", drive, "run"))
        assert engine.resume() == (last, {})
        assert_goes_on_to(engine, "bf16", last, 6, rank=rank)
        assert engine.rewind() == (5, {})
        assert_goes_on_to(engine, "bf16", 5, 6, rank=rank)


SLOW_LOSS = pytest.param(2, "unclipped, logged", 2, marks=pytest.mark.slow)
LOSSES = [(1, "off", 0), (1, "unclipped, logged", 2), (2, "off", 2), SLOW_LOSS]


@pytest.mark.parametrize(("world_size", "tiers", "first"), LOSSES)
@on_ranks("world_size")
def test_a_step_that_cannot_be_finished_is_gone_back_from_in_the_same_process(rank, world_size, drive, tiers, first):
    """A second Ctrl-C cuts an update off. Later a drive stops a step, which could be finished, and is given up."""
    is_last = rank == world_size - 1
    with durable("bf16", drive, "run", tiers) as engine:
        steps_of(engine, rank, range(first))
        with ExitStack() as within:
            if is_last:
                within.enter_context(sigint_at_update(2, 2))
                within.enter_context(pytest.raises(KeyboardInterrupt))
            steps_of(engine, rank, [first])
        if first == 0:
            with pytest.raises(ResumeError, match="no committed step yet"):
                engine.resume()
            return
        if is_last:
            with pytest.raises(StateError, match=r"it cannot be finished: call resume\(\)"):
                engine.step()
        assert engine.resume() == (first, {})
        assert_goes_on_to(engine, "bf16", first, first + 2, tiers, rank=rank)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if is_last else -1, -1))
        with pytest.raises(SwapIOError, match="EFBIG") if is_last else nullcontext():
            steps_of(engine, rank, [first + 2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        engine.zero_grad()
        assert engine.resume() == (first + 2, {})
        assert_goes_on_to(engine, "bf16", first + 2, first + 4, tiers, rank=rank)
