"""Ctrl-C in the middle of a step, and the ways on from there."""

import contextlib
import errno
import itertools
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import nvme_offload.optim.state.store
from nvme_offload import StateError, SwapIOError
from nvme_offload.aio_native.faults import FaultSpec
from nvme_offload.optim.state.pipeline import StepPipeline
from tests.support.interrupts import sigint_at_update
from tests.support.pairs import each_value_once
from tests.support.training import (
    BLOCK,
    assert_same_bits,
    assert_same_training,
    faulty_drive,
    params_of,
    set_grads,
    snapshot,
    take_steps,
)

SHAPES = [(3 * BLOCK,), (100,), (4 * BLOCK + 1,), (2 * BLOCK,)]
MIXED = (torch.bfloat16, torch.float32, torch.float16)


def started(make_adamw, device="nvme", *, steps=2, **options):
    """Some steps are done, and the gradients of the next are there."""
    params = params_of(SHAPES, *MIXED)
    optimizer = make_adamw(params, device, clip=1.0, **options)
    take_steps(optimizer, params, *range(steps))
    set_grads(params, steps)
    return params, optimizer


@pytest.fixture
def interrupt_after():
    """Ctrl-C comes inside the n-th kernel call from now."""
    with contextlib.ExitStack() as on_exit:
        yield lambda number, signals=1: on_exit.enter_context(sigint_at_update(number, signals))


@pytest.mark.parametrize(("device", "steps", "number"), each_value_once(["nvme", "cpu"], [0, 1, 2], [1, 4, 9]))
def test_the_step_stops_between_subgroups_and_can_be_finished(make_adamw, interrupt_after, device, steps, number):
    _, uninterrupted = started(make_adamw, "cpu", steps=steps)
    uninterrupted.step()
    params, optimizer = started(make_adamw, device, steps=steps, buffers=2)
    before = signal.getsignal(signal.SIGINT)
    interrupt_after(number)
    with pytest.raises(KeyboardInterrupt) as caught:
        optimizer.step()
    num_subgroups = optimizer.stats().num_subgroups
    (note,) = caught.value.__notes__
    assert f"step {steps + 1} stopped after {number} of {num_subgroups} subgroups" in note
    assert "finish_step()" in note
    assert signal.getsignal(signal.SIGINT) is before
    assert optimizer.stats().steps == steps
    for refused in (optimizer.step, optimizer.state_dict, lambda: optimizer.state[params[0]]["exp_avg"]):
        with pytest.raises(StateError, match=rf"stopped after {number} of {num_subgroups}.*finish_step\(\)"):
            refused()
    optimizer.synchronize()
    if number > 1:
        optimizer.zero_grad()  # the tensors themselves are as they were, and the step keeps them
    optimizer.finish_step()
    assert_same_training(optimizer, uninterrupted)
    with pytest.raises(StateError, match="no such step"):
        optimizer.finish_step()


def test_a_step_that_was_all_but_done_is_done(make_adamw, interrupt_after):
    """The signal came with the last subgroup: nothing is left to finish, and waiting afterwards is not disturbed."""
    _, uninterrupted = started(make_adamw, "cpu", steps=0)
    uninterrupted.step()
    with faulty_drive(FaultSpec(seed=1, delay=1.0, max_delay_us=300_000)):
        _, optimizer = started(make_adamw, steps=0)
        optimizer.place()
    interrupt_after(optimizer.stats().num_subgroups)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.synchronize()  # its waits are longer than the time between two looks at pending signals
    assert_same_training(optimizer, uninterrupted)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_handler_that_does_not_raise_lets_the_step_finish(make_adamw, interrupt_after, device, ignored):
    """Trainers set a flag on SIGINT and save a checkpoint after the step: it has to be a whole step."""
    _, uninterrupted = started(make_adamw, "cpu")
    uninterrupted.step()
    _, optimizer = started(make_adamw, device)
    seen = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else lambda number, frame: seen.append(number))
    try:
        interrupt_after(3)
        optimizer.step()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ([] if ignored else [signal.SIGINT])
    assert_same_training(optimizer, uninterrupted)


def test_a_second_ctrl_c_does_not_wait(make_adamw, interrupt_after):
    """It lands inside an update: nobody knows how far that got, so only a checkpoint helps."""
    _, optimizer = started(make_adamw)
    _, other = started(make_adamw, "cpu")
    checkpoint = other.state_dict()
    interrupt_after(3, signals=2)
    with pytest.raises(KeyboardInterrupt) as caught:
        optimizer.step()
    assert "cut off inside an update, so that it cannot be finished" in caught.value.__notes__[0]
    with pytest.raises(StateError, match=r"cannot be finished: load a checkpoint with load_state_dict"):
        optimizer.finish_step()
    optimizer.load_state_dict(checkpoint)
    assert_same_bits(optimizer.state_dict()["state"], checkpoint["state"])
    optimizer.step()


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("change", ["zero_grad", "mul_", "another backward"])
def test_changed_gradients_cannot_finish_it_and_a_load_recovers(make_adamw, interrupt_after, device, change):
    params, optimizer = started(make_adamw, device)
    checkpoint = snapshot(optimizer)
    interrupt_after(2)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    if change == "zero_grad":
        optimizer.zero_grad(set_to_none=False)
    elif change == "mul_":
        params[0].grad.mul_(0.5)
    else:
        (params[0] * 2).sum().backward()
    with pytest.raises(StateError, match=r"gradients that have changed since.*load_state_dict"):
        optimizer.finish_step()
    optimizer.load_state_dict({"state": checkpoint["state"], "param_groups": checkpoint["param_groups"]})
    for p, saved in zip(params, checkpoint["params"], strict=True):
        if p.dtype is torch.float32:
            p.data.copy_(saved)
    assert_same_bits(snapshot(optimizer), checkpoint)
    with pytest.raises(StateError, match="no such step"):
        optimizer.finish_step()


def test_a_checkpoint_can_be_loaded_while_subgroups_without_state_hold_every_buffer(make_adamw, monkeypatch):
    """The second step goes backwards and gives all buffers to subgroups without state; it breaks before the first."""
    params = params_of([(BLOCK,)] * 8, torch.bfloat16)
    optimizer = make_adamw(params, buffers=4)
    take_steps(optimizer, params, 0, without=range(2, 8))
    checkpoint = optimizer.state_dict()
    set_grads(params, 1)
    with monkeypatch.context() as patch:
        patch.setattr(nvme_offload.optim.state.store, "give_birth", Mock(side_effect=ArithmeticError("a bug")))
        with pytest.raises(ArithmeticError):
            optimizer.step()
    assert [slot.residency.value for slot in optimizer.store.pipeline.residents] == ["unborn"] * 4
    optimizer.load_state_dict(checkpoint)
    assert_same_bits(optimizer.state_dict()["state"], checkpoint["state"])
    assert optimizer.store.pool.num_free + len(optimizer.store.pipeline.residents) == 4


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("name", ["exp_avg", "master"])
def test_an_entry_that_was_set_in_part_is_refused_until_a_load(make_adamw, monkeypatch, device, name):
    """The second of its subgroups cannot be had. Where the first, or the old entry, cannot be had, nothing changed."""
    params, optimizer = started(make_adamw, device, sub_group_size=1)
    before = snapshot(optimizer)
    acquire = StepPipeline.acquire
    for number in (3, 4, 5):
        calls = itertools.count(1)

        def failing(*arguments, calls=calls, number=number, **options):
            if next(calls) == number:
                raise SwapIOError(errno.EIO, path=Path("swap"), offset=0, size_bytes=1, direction="read", extent="it")
            return acquire(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(StepPipeline, "acquire", failing)
            with pytest.raises(SwapIOError):
                optimizer.state[params[0]][name] = torch.full(SHAPES[0], 7.0)
        if number < 5:
            assert_same_bits(snapshot(optimizer), before)
    for refused in (optimizer.step, optimizer.state_dict, lambda: optimizer.state[params[0]][name]):
        with pytest.raises(StateError, match="stopped halfway: part of the state is new and part is old"):
            refused()
    optimizer.load_state_dict({"state": before["state"], "param_groups": before["param_groups"]})
    assert_same_bits(snapshot(optimizer), before)
