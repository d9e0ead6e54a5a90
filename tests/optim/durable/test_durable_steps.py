"""Steps that last: the bits of a run that does not, what a commit holds, and going on from it in every kind of end."""

import errno
import gc
import os
import signal
import threading
import warnings
from unittest.mock import Mock

import pytest
import torch

from nvme_offload import OffloadAdamW, OffloadLion, ResumeError, StateError
from nvme_offload.offload.sync import sync_data
from nvme_offload.optim.step.norm import total_norm
from tests.support.durable_run import offload_runs
from tests.support.failing_drive import Failing, Op, flip_bit
from tests.support.killed_steps import durable_section, fork
from tests.support.training import assert_same_bits, bits, params_in, params_of, run_child, section, set_grads, snapshot

SHAPES = [(70_001,), (999,), (131_072,), (5,)]
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def fresh(path, name="run", kind=OffloadAdamW, shapes=SHAPES, **more):
    plain = section(path, sub_group_size=65536, clip=1.0, **more)
    offload = durable_section(path, name, **more) if name else plain
    return kind(params_of(shapes, *DTYPES), lr=1e-2, offload=offload)


def train(optimizer, steps, without=()):
    for step in steps:
        set_grads(params_in(optimizer), step, without=without)
        optimizer.step()


def expected(path, num_steps, **more):
    with fresh(path, None, **more) as optimizer:
        train(optimizer, range(num_steps))
        return snapshot(optimizer)


def swap_of(path, name="run"):
    return path / f"nvme-durable-{name}-rank0" / "swap"


def test_a_step_takes_its_norm_while_the_one_before_is_made_to_last(drive, monkeypatch):
    norms, second_norm, came = [], threading.Event(), []

    def norm(*args, **more):
        norms.append(total_norm(*args, **more))
        if len(norms) == 2:
            second_norm.set()
        return norms[-1]

    def sync(fd):
        came.append(second_norm.wait(10.0))
        sync_data(fd)

    with fresh(drive) as optimizer:
        monkeypatch.setattr("nvme_offload.optim.step.stepper.total_norm", norm)
        monkeypatch.setattr("nvme_offload.offload.storage.swap_space.sync_data", sync)
        train(optimizer, range(2))
    assert len(came) >= 2
    assert all(came)


def test_what_is_committed_with_a_step_comes_back_with_it(drive):
    with fresh(drive) as optimizer:
        for step in range(3):
            optimizer.client_state["position"] = {"file": "a", "at": step, "seen": torch.arange(step)}
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            train(optimizer, [step], without={step})
        torch.manual_seed(11)
        optimizer.commit()
        random = torch.rand(3)
    with fresh(drive) as optimizer:
        torch.manual_seed(12)
        step, client_state = optimizer.resume()
        assert step == 3
        assert_same_bits(client_state, {"position": {"file": "a", "at": 2, "seen": torch.arange(2)}})
        assert optimizer.param_groups[0]["lr"] == 0.1 / 3
        assert [int(optimizer.state[p]["step"]) for p in optimizer.state] == [2, 2, 2, 3]
        assert_same_bits(torch.rand(3), random)


def test_a_client_state_that_cannot_be_read_again_is_refused_by_its_place_and_the_step_is_done(drive):
    with fresh(drive) as optimizer:
        optimizer.client_state["a"] = [1, {"b": lambda: 0}]
        with pytest.raises(ValueError, match=r"client_state\['a'\]\[1\]\['b'\] is a builtins.function") as caught:
            train(optimizer, [0])
        assert "Step 1 is complete, and is not committed" in caught.value.__notes__[0]
        optimizer.client_state.clear()
        train(optimizer, [1])
        assert_same_bits(snapshot(optimizer), expected(drive, 2))
    with fresh(drive) as optimizer:
        assert optimizer.resume() == (2, {})


def test_parameters_that_were_changed_by_hand_are_in_the_next_commit(drive):
    def change(optimizer):
        with torch.no_grad():
            for param in params_in(optimizer):
                param[:3] += 1

    with fresh(drive) as optimizer:
        train(optimizer, range(2))
        change(optimizer)
        optimizer.commit()
        optimizer.commit()
    with fresh(drive) as optimizer:
        assert optimizer.resume() == (2, {})
        train(optimizer, [2])
        found = snapshot(optimizer)
    with fresh(drive, None) as optimizer:
        train(optimizer, range(2))
        change(optimizer)
        train(optimizer, [2])
        assert_same_bits(found, snapshot(optimizer))


def test_a_run_that_was_found_takes_no_step_before_somebody_says_what_becomes_of_it(drive):
    with fresh(drive) as optimizer:
        train(optimizer, range(2))
        state = optimizer.state_dict()
    with fresh(drive) as optimizer:
        before = [bits(param).copy() for param in params_in(optimizer)]
        with pytest.raises(StateError, match=r"durable run 'run'.*resume\(\).*begin anew under another name"):
            train(optimizer, [0])
        assert all((bits(param) == was).all() for param, was in zip(params_in(optimizer), before, strict=True))
        with pytest.raises(StateError, match="a run that was resumed"):
            optimizer.state_dict()
    with fresh(drive) as optimizer:
        optimizer.load_state_dict(state)
        train(optimizer, [2])
    with fresh(drive) as optimizer:
        step, _ = optimizer.resume()
        assert step == 1, "a load begins another training"


def test_of_another_model_nothing_is_taken_up_and_the_difference_is_named(drive):
    with fresh(drive) as optimizer:
        train(optimizer, [0])
    numel = sum(param.numel() for param in params_in(optimizer))
    listed = " ".join(offload_runs(drive)[1].split())
    assert f"{numel:,} parameters in bfloat16 and float16 and float32, OffloadAdamW" in listed
    with (
        fresh(drive, shapes=[*SHAPES[:-1], (6,)]) as optimizer,
        pytest.raises(ResumeError, match=r"is of another run.*shape\[0\]: 5 was committed, 6 is here"),
    ):
        optimizer.resume()
    with (
        fresh(drive, kind=OffloadLion) as optimizer,
        pytest.raises(ResumeError, match=r'"OffloadAdamW" was committed, "OffloadLion" is here'),
    ):
        optimizer.resume()
    optimizer = fresh(drive)
    optimizer.add_param_group({"params": []})
    with optimizer, pytest.raises(ResumeError, match="1 parameter groups were committed, 2 are here"):
        optimizer.resume()
    with fresh(drive) as optimizer:
        assert optimizer.resume() == (1, {})


def test_state_that_came_later_gets_its_place_later_again_before_a_run_is_resumed(drive):
    for done in (0, 2):
        with fresh(drive) as optimizer:
            late = params_in(optimizer)[0].requires_grad_(False)
            optimizer.place()
            late.requires_grad_(True)
            assert (optimizer.resume() or (0, {})) == (done, {})
            train(optimizer, range(done, done + 2))
    with fresh(drive) as optimizer, pytest.raises(ResumeError, match=r"of another run than this: .*subgroups"):
        optimizer.resume()


@pytest.mark.parametrize("what", ["manifest", "extent"])
def test_where_the_newest_step_is_damaged_the_one_before_it_is_taken(drive, what):
    with fresh(drive) as optimizer:
        train(optimizer, range(3))
        optimizer.durable.commits.settle()
        newest = optimizer.durable.commits.run.committed[0]
        stripe = optimizer.store.slots[0].extent.stripes[0]
    swap = swap_of(drive)
    if what == "manifest":
        [file] = [f for f in swap.parent.glob("manifest.*") if newest.encode()[:64] == f.read_bytes()[:64]]
        flip_bit(file, 200)
    else:
        flip_bit(swap, stripe.offset + 12345)
    with fresh(drive) as optimizer, warnings.catch_warnings(action="ignore"):
        assert optimizer.resume() == (2, {})
        train(optimizer, [2])
        assert_same_bits(snapshot(optimizer), expected(drive, 3))


def test_where_both_steps_are_damaged_the_subgroup_is_named_and_a_load_leads_on(drive):
    with fresh(drive) as optimizer:
        train(optimizer, range(2))
        train(optimizer, [2, 3], without=range(1, 4))
        state = optimizer.state_dict()
        extent = optimizer.store.slots[-1].extent
    flip_bit(swap_of(drive), extent.stripes[0].offset)
    with fresh(drive) as optimizer, warnings.catch_warnings(action="ignore"):
        with pytest.raises(ResumeError, match=r"step 4: .*subgroup 5.*step 3: .*subgroup 5"):
            optimizer.resume()
        optimizer.load_state_dict(state)
        train(optimizer, [4])
    with fresh(drive) as optimizer:
        assert optimizer.resume() == (1, {})


KILLED_IN_A_STEP = """
import os, signal, sys
from pathlib import Path
from tests.optim.durable.test_durable_steps import fresh, train
optimizer = fresh(Path(sys.argv[1]))
train(optimizer, range(3))
optimizer.durable.commits.settle()
optimizer.store.durability.run.commit = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
train(optimizer, [3])
optimizer.durable.commits.settle()
"""


def test_a_step_that_a_killed_life_has_written_over_is_not_gone_back_to_and_nothing_changes(drive):
    """Without steps in reserve, the next step is written in the place of the one before the latest."""
    with pytest.raises(AssertionError, match=f"exit status -{signal.SIGKILL:d}\n"):
        run_child(KILLED_IN_A_STEP, drive)
    with fresh(drive) as optimizer:
        assert optimizer.resume() == (3, {})
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.client_state["note"] = "not committed"
        generator = torch.get_rng_state()
        with pytest.raises(StateError, match=r"a committed step 2 that is whole, actual .*checksum"):
            optimizer.rewind()
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert optimizer.client_state == {"note": "not committed"}
        assert torch.equal(torch.get_rng_state(), generator)
        optimizer.param_groups[0]["lr"] = 1e-2
        optimizer.client_state.clear()
        assert_same_bits(snapshot(optimizer), expected(drive, 3))
        train(optimizer, [3, 4])
        assert_same_bits(snapshot(optimizer), expected(drive, 5))
    with fresh(drive) as optimizer:
        assert optimizer.resume() == (5, {})


@pytest.mark.parametrize(("steps", "period"), [(2, 1), (3, 1), (2, 3), (3, 3)])
def test_going_back_several_steps_that_were_reserved_gives_the_bits_of_the_run_stopped_there(drive, steps, period):
    with fresh(drive, rewind_steps=3, rewrite_every=period) as optimizer:
        train(optimizer, range(3))
        train(optimizer, [3], without=[0, 3])
        train(optimizer, range(4, 6))
        with pytest.raises(
            StateError, match=r"rewind\(4\): .* 4 steps before the latest, actual commits of steps 6, 5, 4, 3 alone"
        ):
            optimizer.rewind(4)
        assert optimizer.rewind(steps) == (6 - steps, {})
        taken = snapshot(optimizer)
        train(optimizer, [10, 11])
        went_on = snapshot(optimizer)
        assert optimizer.rewind(2) == (6 - steps, {})
        assert_same_bits(snapshot(optimizer), taken)
        train(optimizer, [10, 11])
        assert_same_bits(snapshot(optimizer), went_on)
    with fresh(drive, None) as optimizer:
        train(optimizer, range(3))
        train(optimizer, [3] if steps == 2 else [], without=[0, 3])
        assert_same_bits(snapshot(optimizer), taken)
        train(optimizer, [10, 11])
        assert_same_bits(snapshot(optimizer), went_on)
    with fresh(drive, rewind_steps=2, rewrite_every=period) as optimizer:
        assert optimizer.resume() == (8 - steps, {})
        assert optimizer.rewind(2) == (6 - steps, {})
        assert_same_bits(snapshot(optimizer), taken)


@pytest.mark.parametrize("period", [1, 3])
def test_a_snapshot_is_gone_back_to_from_later_steps_and_from_another_process(drive, period):
    with fresh(drive, rewrite_every=period) as optimizer:
        train(optimizer, range(2))
        optimizer.synchronize()
        written = optimizer.stats().bytes_written
        assert optimizer.snapshot("good") == 2
        assert optimizer.stats().bytes_written == written
        with pytest.raises(ValueError, match="'good' cannot name a snapshot"):
            optimizer.snapshot("good")
        train(optimizer, range(2, 5))
        assert optimizer.resume("good") == (2, {})
        assert_same_bits(snapshot(optimizer), expected(drive, 2))
        train(optimizer, range(2, 4))
        assert_same_bits(snapshot(optimizer), expected(drive, 4))
    with fresh(drive, rewrite_every=period) as optimizer:
        with pytest.raises(KeyError, match="no snapshot 'bad'; there are: good"):
            optimizer.resume("bad")
        assert optimizer.resume() == (4, {})
        assert_same_bits(snapshot(optimizer), expected(drive, 4))
    with fresh(drive, rewrite_every=period) as optimizer:
        assert optimizer.resume("good") == (2, {})
        assert_same_bits(snapshot(optimizer), expected(drive, 2))
        optimizer.remove_snapshot("good")
        train(optimizer, range(2, 6))
        assert_same_bits(snapshot(optimizer), expected(drive, 6))
    with fresh(drive, rewrite_every=period) as optimizer:
        assert optimizer.resume() == (6, {})


@pytest.mark.parametrize("period", [1, 3])
def test_a_commit_that_fails_is_told_and_counted_and_the_run_goes_on(drive, monkeypatch, period):
    """Its sync fails; of a manifest that is not written see test_full_disk.py."""
    full = Mock(side_effect=OSError(errno.ENOSPC, "no space is left"))
    with fresh(drive, rewrite_every=period) as optimizer:
        train(optimizer, range(2))
        optimizer.durable.commits.settle()
        with monkeypatch.context() as patch:
            patch.setattr("nvme_offload.offload.storage.swap_space.sync_data", full)
            train(optimizer, [2])
            with pytest.warns(RuntimeWarning, match=r"training goes on \(step 2 lasts\)"):
                optimizer.durable.commits.settle()
        found = optimizer.stats()
        assert (found.failed_commits, found.committed_step) == (1, 2)
        train(optimizer, [3], without=[2])
        optimizer.durable.commits.settle()
        assert optimizer.stats().committed_step == 4
        after = snapshot(optimizer)
    with fresh(drive, rewrite_every=period) as optimizer:
        assert optimizer.resume() == (4, {})
        assert_same_bits(snapshot(optimizer), after)


def test_a_step_that_the_drive_did_not_take_is_committed_when_it_is_finished(drive, monkeypatch):
    with fresh(drive) as optimizer, warnings.catch_warnings(action="ignore"):
        train(optimizer, [0])
        optimizer.synchronize()
        drive_failing = Failing(optimizer.store.tier, monkeypatch, Op.WRITE, first=2)
        with pytest.raises(OSError, match="subgroup"):
            train(optimizer, [1, 1, 1])
        drive_failing.healthy = True
        if optimizer.has_unfinished_step:
            optimizer.finish_step()
        optimizer.synchronize()
        Failing(optimizer.store.tier, monkeypatch, Op.WRITE, first=len(optimizer.store.slots), number=1)
        train(optimizer, [2])  # its last write fails, behind it
        optimizer.commit()
        after, step = snapshot(optimizer), optimizer.durable.commits.step
    with fresh(drive) as optimizer:
        assert optimizer.resume() == (step, {})
        assert_same_bits(snapshot(optimizer), after)


def test_an_optimizer_that_nobody_closed_lets_go_of_its_run_when_it_is_gone(drive):
    optimizer = fresh(drive)
    train(optimizer, range(2))
    optimizer.durable.commits.settle()
    del optimizer
    gc.collect()
    with fresh(drive) as optimizer:
        assert optimizer.resume() == (2, {})


def test_steps_without_a_gradient_commit_nothing_before_there_is_state(drive):
    with fresh(drive) as optimizer:
        optimizer.step()
        assert optimizer.stats().commits == 0
        train(optimizer, [0])
        optimizer.zero_grad()
        optimizer.step()
        optimizer.durable.commits.settle()
        assert optimizer.stats().committed_step == 3
    with fresh(drive) as optimizer:
        assert optimizer.resume() == (3, {})


def test_without_durable_there_is_nothing_to_resume(drive):
    with fresh(drive, None) as optimizer, pytest.raises(StateError, match=r"durable.*offload_optimizer"):
        optimizer.resume()


def test_steps_that_a_parent_made_are_not_those_of_a_forked_child(drive):
    with fresh(drive) as optimizer:
        train(optimizer, [0])
        assert os.waitpid(fork(optimizer.close), 0)[1] == 0
        train(optimizer, [1])
    with fresh(drive) as optimizer:
        assert optimizer.resume() == (2, {})
