"""Updates that begin in backward with a guess: the bits of the plain order, whether it was right or taken back."""

import errno
import pkgutil
import shutil
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from nvme_offload import ConfigWarning, OffloadAdamW, SwapIOError
from tests.support.failing_drive import Failing, Op
from tests.support.ranks import on_ranks
from tests.support.sharded_model import assert_same, full_state
from tests.support.tiers import PRECISIONS, be_eager, loss_of, make, section, wait_for_guessed

LAYERS = 3
SCALES = (1, 1, 1000, 1, 1, float("inf"), 1, 1)
"""What the loss of a step is multiplied by: one is clipped, one is skipped."""


def config_of(path, schedule, accumulation=1, period=1, **more):
    config = section(path, state="nvme", accumulation=accumulation)
    if schedule == "speculate":
        config["zero_optimization"]["offload_optimizer"] |= {"durable": "run", "rewrite_every": period}
    if period > 1:
        config["zero_optimization"]["offload_optimizer"]["staging_budget"] = "3MiB"
    return {**config, "gradient_clipping": 30.0, "overlap_step": schedule, **more}


def model(config):
    return make(config, num_layers=LAYERS, width=129, tied=False)


def backward(engine, step, scale=1):
    loss = loss_of(engine, step, rank=dist.get_rank() if dist.is_initialized() else 0)
    engine.backward(loss * scale)
    return loss.item()


def trained(config, scales=SCALES, between=lambda engine, step: None):
    seen, num_begun = [], 0
    with model(config) as engine:
        for step, scale in enumerate(scales):
            for micro in range(engine.gradient_accumulation_steps):
                if micro:
                    engine.step()
                seen.append(backward(engine, step, scale))
            num_begun += wait_for_guessed(engine.optimizer)
            between(engine, step)
            engine.step()
            seen += [engine.get_global_grad_norm(), engine.optimizer.num_skipped_steps]
        stats = engine.optimizer.stats()
        whole = {**full_state(engine.module, engine.optimizer), "seen": torch.tensor(seen).nan_to_num(-1.0)}
        return whole, stats, num_begun


@pytest.mark.filterwarnings("ignore:gradient norm")
@pytest.mark.parametrize(("precision", "budget", "period"), [("bf16", None, 3), ("fp32", "3MiB", 1)])
def test_the_bits_are_those_of_updates_inside_the_step(alone, eager, tmp_path, precision, budget, period):
    more = {**PRECISIONS[precision], "host_budget": budget}
    plain, before, _ = trained(config_of(tmp_path, "off", **more))
    ours, stats, num_begun = trained(config_of(tmp_path, "speculate", period=period, **more))
    assert_same(ours, plain)
    assert num_begun
    assert (stats.skipped_steps, stats.failed_commits) == (before.skipped_steps, 0)
    assert stats.guesses > stats.wrong_guesses >= 1
    assert stats.updates_in_backward > stats.updates_taken_back >= 1


def test_what_has_been_seen_of_the_norm_stops_a_guess(alone, eager, tmp_path):
    with model(config_of(tmp_path, "speculate")) as engine:
        for step in range(3):
            backward(engine, step)
            engine.step()
        engine.optimizer.synchronize()
        worker = engine.optimizer.store.worker
        with worker.kept_away():  # all gradients arrive before the first update
            backward(engine, 3, 1000)
            job = worker.job
        worker.wait_until(lambda: job.record.claims.final == set(job.source.sums))
        engine.step()
        stats = engine.optimizer.stats()
        assert (stats.wrong_guesses, stats.updates_taken_back) == (1, 0)


def exchange_gradient(engine, step):
    for param in engine.module.parameters():
        param.grad = param.grad * 0.5


def change_rate(engine, step):
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.01 / (step + 2)


def change_rate_back(engine, step):
    change_rate(engine, step)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.01


def clip(engine, step):
    engine.optimizer.clip_grad_norm_(0.3)


def read(engine, step):
    engine.optimizer.state_dict()


def evaluate(engine, step):
    loss_of(engine.module.eval(), step + 100)
    engine.module.train()


def drop(engine, step):
    engine.optimizer.zero_grad()
    engine.backward(loss_of(engine, step + 50))


def add(engine, step):
    loss_of(engine.module, step + 70).backward()


@pytest.mark.parametrize(
    "between",
    [
        lambda engine, _: [param.grad.mul_(0.5) for param in engine.module.parameters()],
        lambda engine, _: torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1),
        change_rate,
        read,
        add,
        *(
            pytest.param(between, marks=pytest.mark.slow, id=between.__name__)
            for between in (exchange_gradient, change_rate_back, clip, evaluate, drop)
        ),
    ],
    ids=lambda between: between.__name__,
)
def test_whatever_somebody_does_after_backward_has_the_effect_that_it_has_in_the_plain_order(
    alone, eager, tmp_path, between
):
    scales = (1,) * 4

    def often(engine, step):
        if step % 2:
            between(engine, step)

    plain, _, _ = trained(config_of(tmp_path, "off"), scales, often)
    ours, stats, num_begun = trained(config_of(tmp_path, "speculate"), scales, often)
    assert_same(ours, plain)
    assert num_begun
    assert (stats.wrong_guesses > 0) == (between is not change_rate_back)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_parameters_that_are_changed_by_hand_are_not_lost_with_a_guess(alone, eager, tmp_path, precision):
    """The latest commit does not have them: what they are in is left to the step."""
    ends = []
    for schedule in ("off", "speculate"):
        with model(config_of(tmp_path, schedule, **PRECISIONS[precision])) as engine:
            for step, scale in enumerate((1, 1, 1000)):
                if step == 2:
                    engine.optimizer.synchronize()
                    with torch.no_grad():
                        engine.module.head.weight.add_(0.25)
                        engine.module.layers[1].up.weight.add_(0.25)
                backward(engine, step, scale)
                wait_for_guessed(engine.optimizer)
                engine.step()
            ends.append(full_state(engine.module, engine.optimizer))
    assert_same(*ends)


def begun(engine):
    """Two steps, and the backward of a third one with some subgroups updated in it."""
    for step in range(2):
        backward(engine, step)
        engine.step()
    engine.optimizer.synchronize()
    backward(engine, 2)
    assert wait_for_guessed(engine.optimizer)


def test_what_cannot_be_taken_back_now_is_taken_back_later(alone, eager, tmp_path, monkeypatch):
    plain, _, _ = trained(config_of(tmp_path, "off"), (1, 1, 1, 1))
    with model(config_of(tmp_path, "speculate")) as engine:
        begun(engine)
        optimizer = engine.optimizer
        drive = Failing(optimizer.store.tier, monkeypatch, Op.READ)
        for look in (optimizer.state_dict, lambda: loss_of(engine.module, 5), optimizer.step):
            optimizer.param_groups[0]["lr"] = 0.5
            with pytest.raises(SwapIOError):
                look()
        drive.healthy = True
        optimizer.param_groups[0]["lr"] = 0.01
        try:
            engine.step()
        except SwapIOError:  # of a read that began before
            engine.step()
        backward(engine, 3)
        engine.step()
        ours = full_state(engine.module, engine.optimizer)
    assert_same(ours, {name: value for name, value in plain.items() if name != "seen"})


def test_a_run_that_ends_in_backward_has_the_latest_step(alone, eager, tmp_path):
    plain, _, _ = trained(config_of(tmp_path, "off"), (1, 1, 1))
    found = tmp_path / "found"
    with model(config_of(tmp_path, "speculate")) as engine:
        begun(engine)
        with engine.optimizer.store.worker.kept_away():
            engine.optimizer.store.pipeline.synchronize()
            shutil.copytree(tmp_path, found, ignore=lambda folder, names: {"found"} & set(names))
    with model(config_of(found, "speculate")) as engine:
        assert engine.resume()[0] == 2
        backward(engine, 2)
        engine.step()
        assert_same(full_state(engine.module, engine.optimizer), {n: v for n, v in plain.items() if n != "seen"})


@pytest.mark.parametrize("schedule", ["backward", "speculate"])
def test_closing_between_backward_and_step_leaves_the_latest_step(alone, eager, tmp_path, schedule):
    more = {"gradient_clipping": 0.0, "skip_non_finite": False} if schedule == "backward" else {}
    config = config_of(tmp_path, schedule, **more)
    config["zero_optimization"]["offload_optimizer"]["durable"] = "run"
    with model(config) as engine:
        begun(engine)
    with model(config) as engine:
        assert engine.resume()[0] == 2


def train_plain(path, schedule, between=lambda step, layers: None):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4)))
    config = config_of(path, schedule, bf16={"enabled": False}, optimizer={"type": "AdamW"})
    del config["bf16"], config["optimizer"]
    with OffloadAdamW(layers.parameters(), lr=1e-3, offload=config) as optimizer:
        optimizer.overlap_with(layers)
        for step in range(6):
            (layers(torch.ones(2, 300)).square().sum() * (1e3 if step == 3 else 1e-3)).backward()
            between(step, layers)
            wait_for_guessed(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return {name: value.clone() for name, value in layers.state_dict().items()}, optimizer.stats()


def test_a_plain_module_guesses_too(alone, eager, drive):
    plain, _ = train_plain(drive, "off")
    ours, stats = train_plain(drive, "speculate")
    assert_same(ours, plain)
    assert stats.guesses > stats.wrong_guesses > 0


@pytest.mark.parametrize("where", ["guess.Guess.allows", "job.read_update_write"])
def test_a_gradient_clipped_by_torch_while_a_guess_takes_it_undoes_the_guess(alone, eager, drive, monkeypatch, where):
    plain, _ = train_plain(drive, "off", lambda step, layers: step == 4 and clip_grad_norm_(layers.parameters(), 1e-3))
    path = f"nvme_offload.optim.step.{where}"
    call, is_final, is_clipped = pkgutil.resolve_name(path), threading.Event(), threading.Event()

    def between(step, layers):
        def clip_beside(*args):  # in the worker: before it looks at the gradient, or after the kernel has read it
            answer = call(*args)
            if is_final.wait(60) and not is_clipped.is_set():
                clip_grad_norm_(layers.parameters(), 1e-3)
                is_clipped.set()
            return answer

        if step == 3:  # the next forward waits for this step's updates
            layers.register_forward_hook(lambda *_: monkeypatch.setattr(path, clip_beside))
        if step == 4:
            is_final.set()
            assert is_clipped.wait(60)

    ours, stats = train_plain(drive, "speculate", between)
    assert_same(ours, plain)
    assert stats.wrong_guesses > 0


LOST = 5  # the step whose commit fails on one rank


def fail_once(engine):
    """Have this rank's next commit fail."""
    run = engine.optimizer.durable.commits.run
    commit = run.commit

    def fail(*_):
        run.commit = commit
        raise OSError(errno.EIO, "it is broken")

    run.commit = fail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "period", "precision", "accumulation"),
    [
        ("backward", 1, "fp32", 2),  # whose gradients are added up in the memory that a unit was reduced into
        ("speculate", 1, "mixed", 2),
        ("speculate", 3, "bf16", 1),
    ],
)
@on_ranks(2)
def test_ranks_of_a_durable_run_begin_in_backward(
    rank, world_size, tmp_path, schedule, period, precision, accumulation
):
    """Between the backward after a commit that failed on one rank and its step, everybody dies, and others go on."""
    exact = {"gradient_clipping": 0.0, "skip_non_finite": False} if schedule == "backward" else {}
    scales = (1,) * len(SCALES) if schedule == "backward" else SCALES
    more = {**PRECISIONS[precision], **exact}

    def lasting(where):
        config = config_of(where, schedule, accumulation, period, **more)
        config["zero_optimization"]["offload_optimizer"] |= {"durable": "run", "rewrite_every": period}
        return config

    def lose_and_die(engine, step):
        if step == LOST and rank == 1:
            fail_once(engine)
        if step == LOST + 1:
            with engine.optimizer.store.worker.kept_away():
                engine.optimizer.store.pipeline.synchronize()
                dist.barrier()
                if rank == 0:
                    shutil.copytree(tmp_path, tmp_path / "found", ignore=lambda *_: {"found"})
                dist.barrier()

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        be_eager(patch)
        plain, _, _ = trained(config_of(tmp_path, "off", accumulation, **more), scales)
        ours, stats, num_begun = trained(lasting(tmp_path), scales, lose_and_die)
        before, _, _ = trained(config_of(tmp_path, "off", accumulation, **more), scales[:LOST])
        with model(lasting(tmp_path / "found")) as engine:
            assert engine.resume()[0] == LOST
            assert_same(full_state(engine.module, engine.optimizer), {n: v for n, v in before.items() if n != "seen"})
    assert_same(ours, plain)
    assert num_begun
    assert stats.failed_commits == (rank == 1)
    assert stats.updates_in_backward > 0
    assert (stats.wrong_guesses > 0) == (schedule == "speculate")


@on_ranks(2)
def test_ranks_that_do_not_say_which_backward_is_the_last_begin_in_the_step(rank, world_size, tmp_path):
    config = config_of(tmp_path, "backward", gradient_clipping=0.0, skip_non_finite=False)
    config["zero_optimization"]["offload_optimizer"]["durable"] = "run"
    with model(config) as engine, warnings.catch_warnings(record=True, action="always", category=ConfigWarning) as said:
        engine.optimizer.durable.commits.engines_model = None  # the loop here is without it
        begun = []
        for step in range(6):
            if step >= 3:
                engine.optimizer.expect_step(True)
            loss_of(engine, step).backward()
            if step >= 3:
                assert wait_for_guessed(engine.optimizer)
            engine.optimizer.step()
            begun.append(engine.optimizer.stats().updates_in_backward)
        assert begun[0] == begun[1] == begun[2] < begun[3] < begun[4], "in the first nothing was committed before"
    ours = [str(warning.message) for warning in said if warning.category is ConfigWarning]
    assert [text.count("expect_step") for text in ours] == [1] * (rank == 0)  # it speaks for all
