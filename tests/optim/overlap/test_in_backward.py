"""Updates that begin in backward: the same bits, and an error where they would not be."""

from contextlib import nullcontext

import pytest
import torch

from nvme_offload import StateError, SwapIOError
from tests.support.failing_drive import Failing, Op
from tests.support.interrupts import Struck, raise_struck, send_sigint
from tests.support.sharded_model import GOES_ON, assert_same, full_state
from tests.support.tiers import loss_of, make, section, train_step

LAYERS = 4


def config_of(path, mode, accumulation=1, **more):
    config = section(path, state="nvme", accumulation=accumulation)
    return {**config, "gradient_clipping": 0.0, "skip_non_finite": False, "overlap_step": mode, **more}


def model(config, **more):
    return make(config, num_layers=LAYERS, width=129, tied=False, **more)


def with_all_buffers(path, mode):
    """A buffer for each subgroup, so that whichever is ready in backward can be updated there."""
    config = config_of(path, mode)
    config["zero_optimization"]["offload_optimizer"] |= {"buffer_count": 8, "staging_budget": "16MiB"}
    return config


def begun(engine, step=1):
    """Backward of a step, with at least one subgroup updated in it; before it the first one."""
    if not engine.global_steps:
        train_step(engine, 0)
        engine.optimizer.synchronize()
    engine.backward(loss_of(engine, step))
    optimizer = engine.optimizer
    optimizer.store.worker.wait_until(lambda: optimizer.store.worker.failure is not None or optimizer.store.record.done)
    assert optimizer.store.worker.failure is not None or optimizer.stats().updates_in_backward > 0
    return optimizer


def goes_on_with_the_same_bits(path, act, config=config_of):
    """Three steps in both orders; in the second one `act` is done, which ends it, where it begins in backward."""
    ends = []
    for mode in ("off", "backward"):
        with model(config(path, mode)) as engine:
            train_step(engine, 0)
            engine.optimizer.synchronize()
            (train_step if mode == "off" else act)(engine, 1)
            train_step(engine, 2)
            ends.append(full_state(engine.module, engine.optimizer))
    assert_same(*ends)


def test_a_learning_rate_that_changes_after_backward_is_an_error(alone, tmp_path):
    def change(engine, step):
        optimizer = begun(engine, step)
        [group] = optimizer.param_groups
        group["lr"] = 0.5
        with pytest.raises(StateError, match=r"lr of group 0 .*0\.01.*Set it back and call step"):
            optimizer.step()
        group["lr"] = 1e-2
        engine.step()

    goes_on_with_the_same_bits(tmp_path, change)


@pytest.mark.parametrize("in_place", [True, False], ids=["changed", "exchanged"])
def test_a_gradient_that_is_changed_after_backward_is_an_error(alone, tmp_path, in_place):
    with model(config_of(tmp_path, "backward")) as engine:
        optimizer = begun(engine)
        weight = engine.module.head.weight
        weight.grad = weight.grad.mul_(0.5) if in_place else weight.grad * 0.5
        with pytest.raises(StateError, match="gradients that have changed since") as caught:
            optimizer.step()
        assert "call step() while the gradients are still as they were" in caught.value.__notes__[0]


@pytest.mark.parametrize("has_begun", [True, False])
def test_nobody_reads_between_backward_and_step(alone, tmp_path, has_begun):
    """Also before the worker has looked at a gradient that is final."""
    with model(config_of(tmp_path, "backward")) as engine:
        optimizer = engine.optimizer
        train_step(engine, 0)
        optimizer.synchronize()
        with nullcontext() if has_begun else optimizer.store.worker.kept_away():
            if has_begun:
                begun(engine)
            else:
                engine.backward(loss_of(engine, 1))
            for read in (optimizer.state_dict, next(engine.module.parameters()).clone, optimizer.synchronize):
                with pytest.raises(StateError, match="call step"):
                    read()
            with pytest.raises(StateError, match="used once more before step"):
                loss_of(engine.module, 2)
        engine.step()
        optimizer.state_dict()


def test_a_second_backward_is_an_error(alone, tmp_path):
    with model(config_of(tmp_path, "backward")) as engine:
        loss = loss_of(engine.module, 0), loss_of(engine.module, 1)
        loss[0].backward()
        assert engine.optimizer.store.record is None, "another backward is to come, as FSDP2 knows"
        loss[1].backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def test_gradients_that_are_dropped_after_updates_leave_a_step_that_cannot_be_finished(alone, tmp_path):
    with model(config_of(tmp_path, "backward")) as engine:
        optimizer = begun(engine)
        optimizer.zero_grad()
        assert optimizer.has_unfinished_step
        for call in (optimizer.step, optimizer.finish_step, lambda: loss_of(engine.module, 2)):
            with pytest.raises(StateError, match="load a checkpoint"):
                call()


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_gradient_that_is_not_finite_is_an_error_until_it_is_dropped(alone, tmp_path, is_heard):
    def trained(mode):
        with model(config_of(tmp_path, mode)) as engine:
            train_step(engine, 0)
            loss, worker = loss_of(engine, 1) * torch.inf, engine.optimizer.store.worker
            with pytest.raises(ValueError, match=r"gradient (norm is|of parameter)") if is_heard else nullcontext():
                with nullcontext() if is_heard else worker.kept_away():
                    engine.backward(loss)  # where a gather comes after it
                worker.wait_until(lambda: mode == "off" or worker.failure is not None)  # else the step sees it first
                engine.step() if is_heard else engine.zero_grad()
            engine.zero_grad()
            train_step(engine, 2)
            return full_state(engine.module, engine.optimizer)

    assert_same(trained("off"), trained("backward"))


def strike_after_an_update(engine, strike):
    """In the next backward, before that of the first layer."""
    optimizer = engine.optimizer

    def on_gradient(_):
        optimizer.store.worker.wait_until(lambda: optimizer.store.record.done)
        strike()

    def on_forward(module, inputs, output):
        output.register_hook(on_gradient)

    return engine.module.layers[0].register_forward_hook(on_forward)


def test_ctrl_c_after_an_update_comes_when_backward_is_complete(alone, tmp_path):
    def interrupt(engine, step):
        with strike_after_an_update(engine, send_sigint), pytest.raises(KeyboardInterrupt) as caught:
            engine.backward(loss_of(engine, step))
        assert not hasattr(caught.value, "__notes__")
        engine.step()

    goes_on_with_the_same_bits(tmp_path, interrupt, with_all_buffers)


@GOES_ON
def test_what_else_ends_a_backward_after_an_update_says_that_a_checkpoint_leads_on(alone, tmp_path):
    with model(with_all_buffers(tmp_path, "backward")) as engine:
        train_step(engine, 0)
        with strike_after_an_update(engine, raise_struck), pytest.raises(Struck) as caught:
            engine.backward(loss_of(engine, 1))
        assert (
            "Gradients or parameters that it needs are gone, so that it cannot be finished: load a"
            in caught.value.__notes__[0]
        )
        with pytest.raises(StateError, match="load a checkpoint"):
            loss_of(engine, 1)
        with pytest.raises(StateError, match=r"expected a finished step.*load a checkpoint"):
            engine.step()


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=lambda op: op.name)
def test_an_error_in_backward_is_said_and_can_be_made_good(alone, tmp_path, monkeypatch, op):
    def fail(engine, step):
        optimizer = engine.optimizer
        drive = Failing(optimizer.store.tier, monkeypatch, op)
        engine.backward(loss_of(engine, step))
        with pytest.raises(SwapIOError, match="optimizer state of subgroup"):  # noqa: PT012
            engine.step()
            loss_of(engine, step + 1)  # where the step had returned before
        drive.healthy = True
        if optimizer.has_unfinished_step:
            optimizer.finish_step()
        if engine.global_steps == 1:
            engine.step()

    goes_on_with_the_same_bits(tmp_path, fail)


def test_what_is_left_when_backward_ends_is_updated_in_the_order_of_the_next_forward(alone, tmp_path, monkeypatch):
    with model(config_of(tmp_path, "backward")) as engine:
        optimizer, store = engine.optimizer, engine.optimizer.store
        for step in range(2):
            train_step(engine, step)
        optimizer.synchronize()
        windows = []
        advance = store.pipeline.advance
        with monkeypatch.context() as patch:
            patch.setattr(store.pipeline, "advance", lambda ahead: (windows.append(list(ahead)), advance(ahead)))
            patch.setattr(store.pipeline, "is_here", lambda slot: False)  # nothing is updated
            engine.backward(loss_of(engine, 2))
            worker = store.worker
            worker.wait_until(lambda: worker.failure or len(store.record.begun) == len(store.table))
            with worker.kept_away():
                engine.step()
                pending = list(store.record.pending)
        uses = store.uses.ranks
        assert pending == sorted(
            store.slots, key=lambda slot: min(uses.get(run.param, 99) for run in slot.subgroup.runs)
        )
        in_backward = windows[-1]
        num_early = in_backward.index(pending[0])
        assert in_backward[:num_early] == pending[: -num_early - 1 : -1], "the last layers first"
        assert in_backward[num_early:] == pending[: len(pending) - num_early], "then what the forward needs first"
