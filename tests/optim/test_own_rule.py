"""A rule in torch operators: the tiers, clipping, loss scale and checkpoints of those with a kernel."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from nvme_offload import OffloadLion, OffloadOptimizer, State, UpdateRule, initialize
from tests.support.ranks import on_ranks
from tests.support.resuming import ResumedModel, steps_of
from tests.support.resuming import section as engine_section
from tests.support.sharded_model import assert_same, full_state
from tests.support.training import assert_same_bits, assert_same_training, params_of, section, set_grads, take_steps

SHAPES = [(251, 257), (7,), (), (65537,), (0,), (200_003,)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "maximize": False}


class TorchLion(type(OffloadLion.rule)):
    """Lion without its kernel: torch's operators in the kernel's order. (torch's square root is not always IEEE's.)"""

    name, kernel = "Lion in torch", ""

    def update(self, master, grad, states, scalars):
        assert {t.dtype for t in (master, grad, *states)} == {torch.float32}
        assert master.numel() <= 65536
        [mean], (decay, lr, beta1, beta1_complement, beta2, beta2_complement) = states, scalars
        direction = torch.sign(mean * beta1 + grad * beta1_complement)
        mean.copy_(mean * beta2 + grad * beta2_complement)
        master.copy_(master * decay - direction * lr)


class OwnLion(OffloadOptimizer):
    rule = TorchLion()

    def __init__(self, params, *, offload, norm_group=None, **settings):
        super().__init__(params, {**SETTINGS, **settings}, offload, norm_group)


class HalfMomentum(UpdateRule):
    """A state that is kept in bf16, and one that begins at 2."""

    name = "half momentum"
    states = (State("mean", dtype=torch.bfloat16), State("count", birth=2.0))

    def scalars(self, group, step):
        return (group["lr"],)

    def update(self, master, grad, states, scalars):
        mean, count = states
        mean.mul_(0.5).add_(grad)
        count.add_(1)
        master.sub_(mean * scalars[0])


class OwnHalf(OffloadOptimizer):
    rule = HalfMomentum()

    def __init__(self, params, lr=1e-2, *, offload, norm_group=None):
        super().__init__(params, {"lr": lr}, offload, norm_group)


@pytest.mark.parametrize("tier", ["nvme", "memory"])
def test_it_gives_the_bits_of_the_kernel(tier, drive):
    """With clipping, a loss scale, parameters that others change, and gradients that are missing."""
    runs = [params_of([shape for shape in SHAPES for _ in DTYPES], *DTYPES) for _ in range(2)]
    sections = section(drive if tier == "nvme" else None, buffers=2, clip=1.0), section(None, clip=1.0)
    with OwnLion(runs[0], offload=sections[0]) as own, OffloadLion(runs[1], offload=sections[1], **SETTINGS) as other:
        for step in range(5):
            for params, optimizer in zip(runs, (own, other), strict=True):
                set_grads(params, step, without=[1])
                if step == 3:
                    params[0].data[:100] = 0.5
                    with pytest.warns(RuntimeWarning, match="1 tiles of 65536 elements were changed"):
                        optimizer.try_step(loss_scale=8.0)
                else:
                    optimizer.try_step(loss_scale=8.0)
        assert own.stats().clip_coef < 1
        assert_same_training(own, other)
        assert own.stats().resplit_blocks == other.stats().resplit_blocks == 1


def test_states_of_another_dtype_and_birth(drive):
    params = params_of([(70_000,)] * 3, *DTYPES)
    again = params_of([(70_000,)] * 3, *DTYPES)
    with OwnHalf(params, offload=section(drive)) as optimizer, OwnHalf(again, offload=section()) as other:
        padded = -(-70_000 // 32) * 32
        optimizer.place()
        assert optimizer.stats().state_bytes == padded * (8 + 10 + 6)
        assert (optimizer.state[params[0]]["count"] == 2).all()
        take_steps(optimizer, params, *range(3))
        state = optimizer.state_dict()
        assert (state["state"][0]["count"] == 5).all()
        mean = state["state"][1]["mean"]
        assert mean.dtype is torch.float32
        assert torch.equal(mean, mean.bfloat16().float())
        with torch.no_grad():
            again[2].copy_(params[2])
        other.load_state_dict(state)
        assert_same_bits(other.state_dict(), state)


@pytest.mark.parametrize("own", [OwnLion, pytest.param(OwnHalf, marks=pytest.mark.slow)])
@on_ranks(2)
def test_with_the_engine_on_two_ranks_and_in_checkpoints(rank, world_size, tmp_path, drive, own):
    runs, root = [], tmp_path / "saved"
    for path in (drive, None):
        torch.manual_seed(0)
        runs.append(initialize(ResumedModel(), engine_section("bf16", path), optimizer=partial(own, lr=1e-3)))
    first, second = runs
    with first, second:
        steps_of(first, rank, range(3))
        first.save_checkpoint(root)
        second.load_checkpoint(root)
        state = full_state(first.module, first.optimizer)
        assert_same(full_state(second.module, second.optimizer), state)
        first.module.num_batches *= 0
        second.module.num_batches *= 0
        assert steps_of(first, rank, range(3, 5)) == steps_of(second, rank, range(3, 5))
        assert_same(full_state(second.module, second.optimizer), full_state(first.module, first.optimizer))
    dist.barrier()
    assert list(drive.iterdir()) == []


@pytest.mark.usefixtures("alone")
def test_the_precision_plan_counts_its_bytes(drive):
    with initialize(torch.nn.Linear(8, 8), engine_section("bf16", drive), optimizer=OwnHalf) as engine:
        assert [row["bytes_per_parameter"]["nvme"] for row in engine.precision_plan.to_dict()["parameters"]] == [8, 8]


def test_a_rule_that_says_too_little_is_named():
    class Empty(UpdateRule):
        name = "empty"

    class OwnEmpty(OffloadOptimizer):
        rule = Empty()

    class NoUpdate(Empty):
        def scalars(self, group, step):
            return ()

    params = params_of([(8,)], torch.float32)
    set_grads(params, 0)
    with OwnEmpty(params, {}, section()) as optimizer, pytest.raises(NotImplementedError, match="Empty does not say"):
        optimizer.step()
    OwnEmpty.rule = NoUpdate()
    with OwnEmpty(params, {}, section()) as optimizer, pytest.raises(NotImplementedError, match="NoUpdate has neither"):
        optimizer.step()
