"""Parameters and gradients on NVMe: the same bits as in memory, in every mix, however the blocks are used."""

import pytest
import torch

from nvme_offload import StateError, get_full_grad, set_full_grad, split_parameters
from tests.support.ranks import be_alone
from tests.support.sharded_model import assert_same, backward, full_state, sharded_model
from tests.support.sharded_model import make as make_groups
from tests.support.tiers import ACCUMULATION, EVERYTHING, loss_of, make, section, train_step


def compare(path, drive, **model):
    """Run `drive` on an engine in memory and on one with everything on NVMe; both must end with the same bits."""
    ends = []
    for tiers in ({}, EVERYTHING):
        with make(section(path, **tiers), num_layers=4, **model) as engine:
            seen = drive(engine)
            ends.append((full_state(engine.module, engine.optimizer), seen))
    assert_same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def evaluation_and_generation(engine):
    with torch.inference_mode():
        seen = [loss_of(engine, 3).item()]  # what the first forward gathers is trained later
    for step in range(2):
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
    engine.zero_grad()
    train_step(engine, 1)
    engine.backward(loss_of(engine, 2))
    engine.optimizer.zero_grad(set_to_none=False)
    engine.zero_grad()
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


@pytest.mark.parametrize(
    ("drive", "checkpointing"),
    [
        (evaluation_and_generation, True),
        (changing_batches, False),
        (gradients_looked_at_and_set, False),
        (stopped_and_started_again, True),
        (clipped_by_hand, False),
    ],
)
def test_it_is_right_when(alone, tmp_path, drive, checkpointing):
    compare(tmp_path, drive, checkpointing=checkpointing)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_plain_loop_with_parameter_groups_has_the_same_bits_and_writes_each_block_once(alone, tmp_path, dtype):
    """Weights and biases of one block are in two parameter groups: the step still visits the block once."""
    be_alone()
    ends = []
    for tiers in ({}, EVERYTHING):
        model = sharded_model(dtype, split=False)
        if tiers or dtype is torch.bfloat16:  # in memory fp16 and fp32 shards are plain tensors: the reference
            split_parameters(model, torch.float32, fp32_too=True)
        with make_groups(model, section(tmp_path, **tiers)) as optimizer:
            for step in range(3):
                backward(model, 0, step)
                optimizer.synchronize()
                before = optimizer.stats()
                optimizer.step()
                optimizer.synchronize()
                written = optimizer.stats().param_bytes_written - before.param_bytes_written
                optimizer.zero_grad()
            if tiers:
                assert written == sum(block.size_bytes for block in optimizer.store.blocks.params.cache.blocks)
            ends.append(full_state(model, optimizer))
    assert_same(
        ends[0], {name: value for name, value in ends[1].items() if dtype is not torch.float16 or "master" not in name}
    )


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
    with make(section(tmp_path, "nvme", accumulation=1), num_layers=6) as engine:
        for step in range(3):
            engine.optimizer.synchronize()
            before = engine.optimizer.stats()
            engine.backward(loss_of(engine, step))
            after = engine.optimizer.stats()
            engine.step()
            if step == 0:
                continue
            reads = after.param_reads - before.param_reads
            assert reads > 0
            assert after.param_uses - before.param_uses == 14  # six layers and what is around them, twice
            assert after.param_reads_ahead - before.param_reads_ahead == reads
            assert after.param_reads_unused == before.param_reads_unused
            assert reads <= 14 + 2, "no block is read twice for one use; two may be read for the step that follows"


def test_gradients_that_a_step_has_used_are_not_read_ahead_again(alone, tmp_path, monkeypatch):
    with make(section(tmp_path, **EVERYTHING, accumulation=1), num_layers=5) as engine:
        cache = engine.optimizer.store.blocks.grads.cache
        zero_grad, read_for_nothing = engine.optimizer.zero_grad, []

        def drop(*arguments):
            read_for_nothing.append([block.name for block in cache.blocks if block.unused])
            zero_grad(*arguments)

        monkeypatch.setattr(engine.optimizer, "zero_grad", drop)
        for step in range(3):
            train_step(engine, step)
        assert read_for_nothing == [[]] * 3
        assert cache.stats.reads_ahead > 0
        engine.backward(loss_of(engine, 3))
        engine.optimizer.step()
        engine.optimizer.step()  # with the same gradients
        engine.optimizer.synchronize()
        assert {record.steps for record in engine.optimizer.store.table} == {5}
