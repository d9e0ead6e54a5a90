"""Updates behind a step: the same bits as inside it, whoever reads what, whenever; never a stale weight."""

import random
import warnings
import weakref
from pkgutil import resolve_name

import pytest
import torch

from nvme_offload import ConfigWarning, OffloadAdamW, StateError, SwapIOError, get_full_param, set_full_param
from tests.support.failing_drive import STANDS_IN_FOR, Failing, Op, paced_drive
from tests.support.pairs import each_value_once
from tests.support.sharded_model import GOES_ON, assert_same, full_state, whole
from tests.support.tiers import PRECISIONS, loss_of, make, section, train_step

StepJob = resolve_name("nvme_offload.optim.step.job:StepJob")

LAYERS = 4


def config_of(path, mode, state="nvme", clip=0.5, accumulation=2, **more):
    config = section(path, state=state, accumulation=accumulation)
    return {**config, "gradient_clipping": clip, "overlap_step": mode, **more}


def test_weights_of_fp32_outlive_their_optimizer(alone, tmp_path):
    engine = make(config_of(tmp_path, None, accumulation=1, **PRECISIONS["fp32"]), num_layers=2, width=129)
    train_step(engine, 0)
    weights = {name: p.full_tensor().clone() for name, p in engine.module.named_parameters()}
    engine.close()
    assert_same({name: p.full_tensor() for name, p in engine.module.named_parameters()}, weights)
    loss_of(engine.module, 1)


READERS = {
    "full_tensor": lambda engine, p, _: p.full_tensor(),
    "local": lambda engine, p, _: p.detach().to_local().clone(),
    "get_full_param": lambda engine, p, _: get_full_param(p),
    "state": lambda engine, p, _: engine.optimizer.state[p]["exp_avg"],
    "step": lambda engine, p, _: engine.optimizer.state[p]["step"],
    "state_dict": lambda engine, p, _: list(list(engine.optimizer.state_dict()["state"].values())[-1].values())[-1],
    "model_state_dict": lambda engine, p, _: list(engine.module.state_dict().values())[-1],
    "ema": lambda engine, p, _: [torch.empty(q.shape).copy_(q.full_tensor()) for q in engine.module.parameters()][1],
    "evaluation": lambda engine, p, step: loss_of(engine.eval().module, 99, step).detach(),
    "save": lambda engine, p, _: p.full_tensor(),
    "set": lambda engine, p, _: set_full_param(p, torch.full(p.shape, 0.25)),
    "zero": lambda engine, p, _: engine.optimizer.zero_grad(set_to_none=False),
}


def read_at_random(config, path, seed):
    random_ = random.Random(seed)
    seen = []
    with make(config, num_layers=LAYERS, width=129) as engine:
        for step in range(8):
            train_step(engine, step)
            for name in random_.sample(sorted(READERS), random_.choice([0, 1, 1, 3])):
                if name == "save":
                    engine.save_checkpoint(path / "checkpoints", "tag")
                    engine.load_checkpoint(path / "checkpoints")
                    engine.export_safetensors(path / "exported", dtype="bf16")
                    seen.append((path / "exported" / "model.safetensors").read_bytes())
                p = random_.choice(list(engine.optimizer.param_groups[0]["params"]))
                value = whole(READERS[name](engine, p, step))
                seen.append(value.clone() if isinstance(value, torch.Tensor) else value)
                engine.train()
                engine._drop_gathered()
    return seen


@pytest.mark.parametrize(
    "precision", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in list(PRECISIONS)[1:])]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_whoever_reads_finds_the_latest_step(alone, tmp_path, seed, precision):
    keys = PRECISIONS[precision]
    off, lazy = (read_at_random(config_of(tmp_path, mode, **keys), tmp_path, seed) for mode in ("off", None))
    assert len(off) == len(lazy) > 5
    for one, other in zip(off, lazy, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def engine_and_twin(path):
    """After a step: one that updates behind its steps, and one that does not."""
    pair = [make(config_of(path, mode, accumulation=1), num_layers=LAYERS, width=129) for mode in (None, "off")]
    for one in pair:
        train_step(one, 0)
        one.optimizer.synchronize()
    return pair


def test_step_returns_before_the_updates_which_keep_the_gradients(alone, tmp_path):
    engine, twin = engine_and_twin(tmp_path)
    optimizer = engine.optimizer
    with engine, twin:
        before = optimizer.stats()
        for one in (engine, twin):
            one.backward(loss_of(one, 1))
        with optimizer.store.worker.kept_away():
            engine.step()
            grads = {id(grad): weakref.ref(grad) for grad in optimizer.store.record.inputs.grads.values()}
            assert optimizer.stats().updates_behind == before.updates_behind
            assert optimizer.stats().steps == 2
            assert not optimizer.has_unfinished_step
            assert all(p.grad is None for p in engine.module.parameters())
            assert grads
        loss_of(engine, 2)  # the next forward: whatever it gathers is updated
        assert not [grad for grad in grads.values() if grad() is not None], "no gradient is kept when backward begins"
        twin.step()
        assert_same(full_state(engine.module, optimizer), full_state(twin.module, twin.optimizer))


def test_nobody_goes_through_what_comes_later_where_nothing_is_read(alone, tmp_path, monkeypatch):
    upcoming = "nvme_offload.optim.step.schedule.Behind.upcoming"
    looked_at, all_of = [], resolve_name(upcoming)
    monkeypatch.setattr(upcoming, lambda *own: (looked_at.append(it) or it for it in all_of(*own)))
    with make(config_of(tmp_path, "forward", state="cpu", accumulation=1), num_layers=8, width=129) as engine:
        train_step(engine, 0)
        engine.optimizer.synchronize()
        assert 0 < len(looked_at) < 4 * engine.optimizer.stats().updates_behind


def test_reads_go_first_and_in_the_end_everything_is_written(alone, tmp_path, monkeypatch):
    config = config_of(tmp_path, None, accumulation=1, aio={"engine": STANDS_IN_FOR})
    config["zero_optimization"]["offload_optimizer"] |= {"buffer_count": 6, "staging_budget": "6MiB"}
    with paced_drive() as pace, make(config, num_layers=LAYERS, width=129) as engine:
        train_step(engine, 0)
        optimizer, store = engine.optimizer, engine.optimizer.store
        optimizer.synchronize()
        engine.backward(loss_of(engine, 1))
        pace.rate = 2e8  # some milliseconds each: nothing is done by the time that the next one begins
        start, under_way = store.tier._start, []

        def counting(op, *more):
            if op is Op.WRITE and store.record is not None and store.record.pending:
                under_way.append(sum(slot.transfer is not None for slot in store.pipeline.residents))
            return start(op, *more)

        monkeypatch.setattr(store.tier, "_start", counting)
        engine.step()
        store.worker.wait_until(lambda: store.is_whole)
        assert len(under_way) > LAYERS
        assert max(under_way) == 1, "writes beside the one transfer that keeps the drive busy"
        assert not [slot for slot in store.pipeline.residents if slot.residency.name == "DIRTY"]


def test_who_waits_for_a_buffer_has_written_what_let_reads_go_first(alone, tmp_path):
    """Two reads are under way when the third buffer is changed; when they have ended, nothing else begins its write."""
    config = config_of(tmp_path, None, accumulation=1)
    config["zero_optimization"]["offload_optimizer"] |= {"buffer_count": 3, "staging_budget": "3MiB"}
    with make(config, num_layers=LAYERS, width=129) as engine:
        train_step(engine, 0)
        optimizer, pipeline = engine.optimizer, engine.optimizer.store.pipeline
        optimizer.synchronize()
        with optimizer.store.worker.kept_away():
            changed, *ahead, wanted = optimizer.store.slots[:4]
            pipeline.drop_copies()
            pipeline.acquire([changed], 0)
            with pipeline.reads_first():
                pipeline.acquire([changed, *ahead], 0)
                pipeline.will_change(changed)
                pipeline.release(changed)
                pipeline.acquire([wanted, *ahead], 0)
            assert len(pipeline.residents) == pipeline.pool.num_buffers, "no buffer beside those of the pool"


def test_what_an_earlier_step_could_not_write_yet_is_not_ready_for_the_next_update(alone, tmp_path):
    with make(config_of(tmp_path, None, accumulation=1), num_layers=LAYERS, width=129) as engine:
        train_step(engine, 0)
        engine.optimizer.synchronize()
        pipeline = engine.optimizer.store.pipeline
        with engine.optimizer.store.worker.kept_away():
            slot = next(slot for slot in pipeline.residents if pipeline.is_here(slot))
            pipeline.will_change(slot)
            assert not pipeline.is_here(slot)
            pipeline.synchronize()
            assert pipeline.is_here(slot)


@GOES_ON
@pytest.mark.parametrize(
    ("op", "where"), each_value_once([Op.READ, Op.WRITE], ["forward", "step", "state_dict", "synchronize", "close"])
)
def test_an_error_behind_a_step_is_said_where_somebody_waits_next_and_can_be_made_good(
    alone, tmp_path, monkeypatch, op, where
):
    engine, twin = engine_and_twin(tmp_path)
    optimizer = engine.optimizer
    drive = Failing(optimizer.store.tier, monkeypatch, op)
    for one in (engine, twin):
        train_step(one, 1)
    calls = {
        "forward": lambda: loss_of(engine, 2),
        "step": lambda: optimizer.step(),
        "state_dict": optimizer.state_dict,
        "synchronize": optimizer.synchronize,
        "close": engine.close,
    }
    with pytest.raises(SwapIOError, match="optimizer state of subgroup") as caught:
        calls[where]()
    assert "This happened behind a step: step 2 stopped after" in "".join(caught.value.__notes__)
    if where != "close":
        assert optimizer.has_unfinished_step
        with pytest.raises(StateError, match="finish_step"):
            loss_of(engine.module, 2)
        with pytest.raises(StateError, match="finish_step"):
            optimizer.state_dict()
        drive.healthy = True
        optimizer.finish_step()
        for one in (engine, twin):
            train_step(one, 2)
        assert_same(full_state(engine.module, optimizer), full_state(twin.module, twin.optimizer))
        engine.close()
    twin.close()


def test_a_reader_that_is_told_of_a_failed_write_leaves_nobody_waiting(alone, tmp_path, monkeypatch):
    """No buffer comes free for the reads of the next step then: they are left to that step."""
    engine, twin = engine_and_twin(tmp_path)
    optimizer, store = engine.optimizer, engine.optimizer.store
    drive = Failing(store.tier, monkeypatch, Op.WRITE, first=len(store.slots))  # the last one
    read_first, told = StepJob._read_first, []

    def after_a_reader(job):
        """A reader comes before the first of these reads, and is told."""
        while job._store is store and not told:
            try:
                store.pipeline.acquire([store.slots[0]], 0, for_change=False)
            except SwapIOError as error:
                told.append(error)
        read_first(job)

    monkeypatch.setattr(StepJob, "_read_first", after_a_reader)
    for one in (engine, twin):
        train_step(one, 1)
    store.worker.wait_until(lambda: store.worker.is_idle)
    assert len(told) == 1
    drive.healthy = True
    optimizer.synchronize()
    assert_same(full_state(engine.module, optimizer), full_state(twin.module, twin.optimizer))
    for one in (engine, twin):
        one.close()


@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": False}}], ids=["bf16", "fp32"])
def test_weights_of_two_steps_are_not_read_as_those_of_one(alone, tmp_path, monkeypatch, keys):
    """After the error was told, too: an export or a state dict would be a mixture."""
    config = {**config_of(tmp_path, None, accumulation=1), **keys}
    with make(config, num_layers=LAYERS, width=129) as engine:
        train_step(engine, 0)
        engine.optimizer.synchronize()
        drive = Failing(engine.optimizer.store.tier, monkeypatch, Op.READ)
        train_step(engine, 1)
        with pytest.raises(SwapIOError):
            engine.optimizer.synchronize()
        for read in (
            lambda: engine.export_safetensors(tmp_path / "weights", dtype="fp32" if keys else "bf16"),
            lambda: [param.full_tensor() + 0 for param in engine.module.parameters()],
        ):
            with pytest.raises(StateError, match="finish_step"):
                read()
        drive.healthy = True
        engine.optimizer.finish_step()
        engine.export_safetensors(tmp_path / "weights")


@pytest.mark.parametrize("part", [lambda grad: grad, lambda grad: grad._local_tensor])
def test_a_gradient_that_is_changed_before_its_update_is_an_error(alone, tmp_path, part):
    with make(config_of(tmp_path, None, accumulation=1), num_layers=LAYERS, width=129) as engine:
        optimizer = engine.optimizer
        engine.backward(loss_of(engine, 0))
        with optimizer.store.worker.kept_away():
            optimizer.step()
            for p in engine.module.parameters():
                part(p.grad).mul_(2)
        with pytest.raises(StateError, match="gradients that have changed since"):
            loss_of(engine.module, 1)
        with pytest.raises(StateError, match="gradients that have changed since"):
            optimizer.finish_step()


def test_a_schedule_that_does_nothing_is_said_once(tmp_path):
    model, config = torch.nn.Linear(8, 8), {**section(tmp_path, state="nvme"), "overlap_step": "forward"}
    with OffloadAdamW(model.parameters(), offload=config) as adamw, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ConfigWarning)
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
            adamw.step()
    (about,) = [warning for warning in said if "overlap_step" in str(warning.message)]
    assert "overlap_with(model)" in str(about.message)
    assert about.filename == __file__
