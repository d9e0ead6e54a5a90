"""The engine around a model: real process groups, 1, 2 and 4 ranks, and one process without a launcher."""

import contextlib
import itertools
import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nvme_offload import ClosedError, ConfigError, TensorSwapper, initialize
from tests.support.interrupts import sigint_at_update
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sharded_model import GOES_ON, Model, assert_same, full_state
from tests.support.small_engine import BF16, HYPERPARAMETERS, backward, fresh_model, loss_of, section

FP32_REDUCTION = {**BF16, "communication_data_type": "fp32"}


def trained(engine, rank):
    """Train two steps; return losses and the last norm."""
    losses = []
    for step in range(2):
        losses += backward(engine, rank, step)
        engine.step()
    return losses, engine.get_global_grad_norm()


def every_stage(rank, world_size, path):
    """Train at every stage and on both tiers; return for each losses, norm, state and what this rank keeps of the
    parameters, then what stages 1 and 2 give with gradients summed in fp32, and the state of stage 0 resumed."""
    results = []
    drive = path / str(rank)
    for stage, nvme in ((0, None), (0, drive), (1, None), (1, drive), (2, None), (3, None)):
        with initialize(fresh_model(), section(stage, nvme, **BF16, gradient_clipping=0.0)) as engine:
            figures = trained(engine, rank)
            kept = sum(param.to_local().numel() for param in engine.parameters())
            results.append((*figures, full_state(engine.module, engine.optimizer), kept))
            if not results[1:]:
                engine.save_checkpoint(path / "saved")
    in_fp32 = []
    for mode, stage in itertools.product(({}, FP32_REDUCTION), (1, 2)):
        with initialize(fresh_model(), section(stage, **mode)) as engine:
            in_fp32.append(trained(engine, rank))
    with initialize(fresh_model(), section(3, **BF16)) as engine:
        engine.load_checkpoint(path / "saved")
        return results, in_fp32, full_state(engine.module, engine.optimizer)


def test_stage_0_has_the_bits_of_stage_1_and_stage_2_those_of_stage_3(tmp_path):
    numel = sum(param.numel() for param in fresh_model().parameters())
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for stages, in_fp32, resumed in run_ranks(every_stage, 2, tmp_path):
        whole, whole_nvme, part, part_nvme, second, third = stages
        assert whole[3] == whole_nvme[3] == numel, "each rank has the whole model"
        assert part[3] < 0.6 * numel
        for other in (whole_nvme, part, part_nvme):
            assert other[0] == whole[0]
            assert other[1] == pytest.approx(whole[1], rel=1e-6)
            assert_same(other[2], whole[2])
        assert_same(resumed, whole[2])
        assert second[:2] == third[:2], "they differ in what is gathered again, not in numbers"
        assert_same(second[2], third[2])
        pairs = [(whole[:2], second[:2], 1e-3), (*in_fp32[:2], 1e-6), (*in_fp32[2:], 1e-6)]
        for (losses, norm), (other_losses, other_norm), tolerance in pairs:
            assert other_losses == pytest.approx(losses, rel=tolerance)
            assert other_norm == pytest.approx(norm, rel=tolerance)


@on_ranks(2)
def test_an_overflow_on_one_rank_skips_on_all_and_moves_the_scale(rank, world_size):
    settings = {"initial_scale_power": 10, "hysteresis": 2, "loss_scale_window": 2}
    config = section(fp16={"enabled": True, **settings}, scheduler={"type": "WarmupLR"})
    seen = []
    with warnings.catch_warnings(action="error", category=RuntimeWarning), initialize(fresh_model(), config) as engine:
        for step, overflows in enumerate([False, True, True, False, False, False]):
            before, step_before = full_state(engine.module, engine.optimizer), engine.lr_scheduler.last_epoch
            backward(engine, rank, step)
            if overflows and rank == 1:
                next(p for p in engine.module.parameters() if p.grad.to_local().numel()).grad.to_local()[0] = math.inf
            engine.step()
            assert math.isfinite(engine.get_global_grad_norm()) is not overflows
            assert (engine.lr_scheduler.last_epoch == step_before) is overflows
            if overflows:
                assert_same(full_state(engine.module, engine.optimizer), before)
            seen.append((engine.loss_scale, engine.optimizer.stats().skipped_steps))
    assert seen == [(1024, 0), (1024, 1), (512, 2), (512, 2), (1024, 2), (1024, 2)]


@on_ranks(2)
def test_what_two_ranks_cannot_do_is_refused_by_key(rank, world_size):
    half = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage = 0: .*dp_replicate has .* or write 1"):
        initialize(fresh_model(), section(0), mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")))
    initialize(fresh_model(), section(0), mesh=half).close()
    sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}
    with pytest.raises(ConfigError, match=r"train_batch_size = 12: .* is 16; write 16"):
        initialize(fresh_model(), section(**sizes))


@pytest.fixture
def make_engine(alone):
    """``make_engine(model=None, **section)`` for one process."""
    with contextlib.ExitStack() as on_exit:

        def make(model=None, *, stage=3, **more):
            return on_exit.enter_context(initialize(model or fresh_model(), section(stage, **more)))

        yield make


def step_of(engine, step):
    losses = backward(engine, 0, step)
    engine.step()
    return losses


def test_a_scale_that_is_too_large_comes_down_until_steps_are_taken(make_engine):
    engine = make_engine(fp16={"enabled": True, "initial_scale_power": 28, "hysteresis": 1})
    losses = [sum(step_of(engine, 0)) for _ in range(24)]
    skipped = engine.optimizer.stats().skipped_steps
    assert 0 < skipped < 20
    assert engine.loss_scale == 2.0 ** (28 - skipped)
    assert losses[-1] < losses[0]


@GOES_ON
def test_calls_in_the_wrong_order_are_said(make_engine):
    engine = make_engine()
    with pytest.raises(RuntimeError, match=r"engine\.step was called before engine\.backward"):
        engine.step()
    with pytest.raises(TypeError, match=r"the loss itself, not dict: .* outputs\.loss"):
        engine.backward({"loss": torch.ones((), requires_grad=True)})
    with pytest.raises(ValueError, match=r"scalar loss, not one of shape \(3,\)"):
        engine.backward(torch.ones(3, requires_grad=True))
    loss = loss_of(engine, 0, 0, 0)
    engine.backward(loss)
    with pytest.raises(RuntimeError, match="a second time") as raised:
        engine.backward(loss)
    assert any("engine.backward once for each micro-batch" in note for note in raised.value.__notes__)
    step_of(engine, 0)
    assert engine.global_steps == 1
    assert math.isfinite(engine.get_global_grad_norm())
    engine.close()
    with pytest.raises(ClosedError):
        engine.step()


@pytest.mark.parametrize("mode", [{}, BF16], ids=["fp32", "bf16"])
def test_an_evaluation_between_backward_and_step_leaves_no_old_weights(make_engine, mode):
    engine = make_engine(stage=2, **mode)
    backward(engine, 0, 0)
    with torch.no_grad():
        before = loss_of(engine, 0, 99, 0).item()
    engine.step()
    with torch.no_grad():
        now = loss_of(engine, 0, 99, 0).item()
    fresh = Model()
    fresh.load_state_dict({name: value.full_tensor() for name, value in engine.module.state_dict().items()})
    assert now != before
    assert now == pytest.approx(loss_of(fresh, 0, 99, 0).item(), rel=2e-2 if mode else 1e-6)


def test_a_step_that_stopped_halfway_is_completed_by_the_next_call(make_engine, monkeypatch):
    states = []
    for disturbed in ("", "engine.step", "finish_step"):
        engine = make_engine(**BF16)
        backward(engine, 0, 0)
        if disturbed:
            pipeline = engine.optimizer.store.pipeline
            with monkeypatch.context() as patch:
                patch.setattr(pipeline, "acquire", lambda *arguments, **more: 1 / 0)
                with pytest.raises(ZeroDivisionError) as caught:
                    engine.step()
            assert "engine.step() finishes the step, too" in caught.value.__notes__[-1]
            assert engine.global_steps == 0
        if disturbed == "finish_step":
            engine.optimizer.finish_step()
            assert engine.global_steps == 0
        engine.step()
        assert engine.optimizer.stats().steps == 1
        step_of(engine, 1)
        assert engine.global_steps == 2
        states.append(full_state(engine.module, engine.optimizer))
    for state in states[1:]:
        assert_same(state, states[0])


@pytest.mark.parametrize("then", ["step", "save_checkpoint"])
def test_an_update_that_is_done_is_not_done_again(make_engine, tmp_path, then):
    """Ctrl-C in the last subgroup is raised when the update is done."""
    states = []
    for disturbed in (False, True):
        engine = make_engine(**BF16)
        backward(engine, 0, 0)
        if disturbed:
            with sigint_at_update(1), pytest.raises(KeyboardInterrupt) as caught:
                engine.step()
            assert "The update of this step is done" in caught.value.__notes__[-1]
        engine.save_checkpoint(tmp_path) if disturbed and then == "save_checkpoint" else engine.step()
        assert (engine.global_steps, engine.micro_steps, engine.optimizer.stats().steps) == (1, 0, 1)
        step_of(engine, 1)
        states.append(full_state(engine.module, engine.optimizer))
    assert_same(*states)


def test_an_overflow_is_counted_once_where_its_warning_is_an_error(make_engine):
    engine = make_engine(**BF16)
    backward(engine, 0, 0)
    for parameter in engine.module.parameters():
        parameter.grad.to_local().fill_(torch.inf)
    with warnings.catch_warnings(action="error"), pytest.raises(RuntimeWarning, match="step skipped"):
        engine.step()
    engine.step()
    assert (engine.global_steps, engine.optimizer.stats().skipped_steps) == (1, 1)


def test_a_scheduler_that_raises_leaves_a_step_that_is_done(alone, tmp_path):
    one_cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-3, total_steps=2)
    with initialize(fresh_model(), section(**BF16), lr_scheduler=one_cycle) as engine:
        step_of(engine, 0)
        step_of(engine, 1)
        with pytest.raises(ValueError, match="Tried to step 3 times"):
            step_of(engine, 2)
        assert (engine.global_steps, engine.micro_steps, engine.optimizer.stats().steps) == (3, 0, 3)
        assert all(parameter.grad is None for parameter in engine.module.parameters())
        engine.save_checkpoint(tmp_path)
        with pytest.raises(RuntimeError, match="was called before"):
            engine.step()


def test_fp32_weights_reach_their_masters_and_16_bit_ones_become_fp32(make_engine):
    model, wanted = fresh_model(), fresh_model()
    engine = make_engine(model, **BF16)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value.full_tensor(), wanted.state_dict()[name])
    engine = make_engine(fresh_model().half(), **BF16)
    assert engine.module.head.weight is engine.module.embedding.weight
    for name, value in engine.module.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.equal(value.full_tensor(), wanted.state_dict()[name].half().float())


def test_blocks_can_be_named(alone):
    with pytest.raises(ValueError, match=r"'embedding\.weight' is 'head\.weight', too, and a parameter is gathered"):
        initialize(fresh_model(), section(), blocks=["head"])
    model = fresh_model()
    model.head = nn.Linear(37, 61)
    with initialize(model, section(), blocks=["head"]) as engine:
        assert type(engine.module.head).__name__ == "FSDPLinear"
        assert not any(type(block).__name__.startswith("FSDP") for block in engine.module.blocks)


def test_blocks_may_be_called_before_the_model_and_a_graph_of_gradients_is_refused(alone):
    with initialize(fresh_model(), section(torch_autocast={"enabled": True, "dtype": "bf16"})) as engine:
        engine.module.blocks[0](torch.ones(2, 37)).sum()
        with pytest.raises(RuntimeError, match=r"create_graph=True: .*offload_param none"):
            loss_of(engine, 0, 0, 0).backward(create_graph=True)
        backward(engine, 0, 0)
        engine.step()


def fail(*_):
    raise ZeroDivisionError


@GOES_ON
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_an_exception_that_is_caught_leaves_nothing_of_its_pass(rank, world_size):
    """A forward or a backward ends in one, all ranks catch it, and somebody changes the weights."""
    ends = []
    for register in (None, "register_forward_pre_hook", "register_full_backward_hook"):
        with initialize(fresh_model(), section(2, **BF16)) as engine:
            if register is not None:
                handle = getattr(engine.module.blocks[0], register)(fail)
                with pytest.raises(ZeroDivisionError):
                    backward(engine, rank, 0)
                handle.remove()
            with torch.no_grad():
                for param in engine.module.parameters():
                    param.mul_(1.5)
            backward(engine, rank, 1)
            engine.step()
            ends.append(full_state(engine.module, engine.optimizer))
    for end in ends[1:]:
        assert_same(end, ends[0])


@pytest.mark.filterwarnings("error")
def test_a_folder_stands_for_a_section(alone, drive):
    """A bf16 model is trained in bf16; state that fits stays in memory; swapped tensors are in the folder."""
    with initialize(nn.Linear(8, 8).bfloat16(), drive) as engine:
        assert engine.config.bf16.enabled
        engine.backward(engine(torch.ones(2, 8)).float().sum())
        engine.step()
        stats = engine.optimizer.stats()
        assert 0 < stats.host_state_bytes == stats.state_bytes
    with TensorSwapper(drive) as swapper:
        swapper.swap_out("ones", torch.ones(4096)).wait()
        assert swapper.swap_in("ones").wait().sum() == 4096


def test_models_that_cannot_be_used_are_refused(alone, make_engine):
    with pytest.raises(ValueError, match="the model has no parameters"):
        initialize(nn.ReLU(), section())
    with pytest.raises(ValueError, match=r"all parameters are without dimensions, .* train them with OffloadAdamW"):
        initialize(nn.ParameterList([nn.Parameter(torch.tensor(1.0))]), section())
    with pytest.raises(ValueError, match=r"'weight' is not contiguous, .* model\.get_parameter\('weight'\); param\."):
        initialize(nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), section())
    with pytest.raises(ValueError, match="is on cpu, meta"):
        initialize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), section())
    for option in ("weights", "init"):
        with pytest.raises(ValueError, match=f"{option}= is for a model on the meta device"):
            initialize(nn.Linear(2, 2), section(), **{option: print})
    sharded = make_engine().module
    assert isinstance(next(sharded.parameters()), DTensor)
    with pytest.raises(ValueError, match="sharded already"):
        initialize(sharded, section())


def test_a_scheduler_that_cannot_be_made_leaves_nothing_behind(alone, tmp_path):
    with pytest.raises(ZeroDivisionError):
        initialize(fresh_model(), section(path=tmp_path), lr_scheduler=lambda optimizer: 1 / 0)
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau needs a metric.*call its step\(metric\) yourself"):
        initialize(fresh_model(), section(path=tmp_path), lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert not list(tmp_path.iterdir())


def test_the_schedule_moves_the_learning_rate_once_per_step(alone):
    """One of the caller's own, before that of the section, which zero/test_param_groups.py follows."""
    halve = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    with initialize(fresh_model(), section(scheduler={"type": "WarmupLR"}), lr_scheduler=halve) as engine:
        step_of(engine, 0)
        assert engine.optimizer.param_groups[0]["lr"] == HYPERPARAMETERS["lr"] / 2
