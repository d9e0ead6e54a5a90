"""What a plan says of a durable run, beside what the run moves and takes."""

from dataclasses import replace

import pytest
import torch

from nvme_offload import OffloadAdamW, OffloadConfig
from nvme_offload.offload.units import GB, TB
from nvme_offload.perf.plan.machine import Drives, Machine
from nvme_offload.perf.plan.placing import Job
from nvme_offload.perf.plan.prediction import predict
from nvme_offload.perf.plan.shape import ModelShape
from tests.support.killed_steps import durable_section
from tests.support.training import params_of

NUMELS = [1_000_000] * 6
MACHINE = Machine(host_memory=10**12)


def job_of(section, numels):
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 1)
    shape = ModelShape(name="some", layers=tuple((numel,) for numel in numels), rest=(), **sizes)
    config = OffloadConfig.from_dict({**section, "bf16": {"enabled": True}, "overlap_step": "off"})
    return Job(shape=shape, config=config, tokens=1, checkpointing=False, baseline_bytes=0)


@pytest.mark.parametrize(
    ("period", "host_budget"),
    [(1, None), (3, "60MiB"), *(pytest.param(period, None, marks=pytest.mark.slow) for period in (3, 4))],
)
def test_the_bytes_of_a_plan_are_those_of_the_run(tmp_path, period, host_budget):
    made = durable_section(tmp_path, "run", rewrite_every=period, host_budget=host_budget, buffers=2)
    made["zero_optimization"]["sub_group_size"] = 524_288
    made["zero_optimization"]["offload_optimizer"]["staging_budget"] = "32MiB"
    params = params_of([(numel,) for numel in NUMELS], torch.bfloat16)
    for param in params:
        param.grad = torch.randn(param.shape).bfloat16()
    with OffloadAdamW(params, offload=made) as optimizer:

        def moved_by(steps):
            before = optimizer.stats()
            for _ in range(steps):
                optimizer.step()
            optimizer.synchronize()
            optimizer.durable.commits.settle()
            after = optimizer.stats()
            return [(getattr(after, name) - getattr(before, name)) / steps for name in ("bytes_read", "bytes_written")]

        moved_by(2 * period)
        # The least: where a write ends after the next one, a subgroup leaves its buffer that the next step reads again.
        read, written = min(moved_by(2 * period) for _ in range(3))
        [swap] = tmp_path.glob("nvme-durable-*/swap")
        space, in_memory = swap.stat().st_size, optimizer.stats().host_state_bytes
    found = predict(job_of(made, NUMELS), MACHINE)
    moved = found.traffic["optimizer state"].total
    assert moved.written == pytest.approx(written, rel=0.02)
    assert moved.read == pytest.approx(read, rel=0.02)
    assert found.tiers.bytes_on("nvme") == pytest.approx(space, rel=0.02)
    assert found.tiers.bytes_on("host", "optimizer state") == pytest.approx(in_memory, rel=0.02)


BILLION = [10**8] * 10


def planned(compute_seconds=0.0, **keys):
    """A billion parameters on drives with a rated life of 600 TB, steps at least so long."""
    keys = {"device": "nvme", "nvme_path": ".", "durable": True, **keys}
    job = job_of({"zero_optimization": {"stage": 3, "offload_optimizer": keys}}, BILLION)
    drives = Drives.of_rates(2 * GB, 2 * GB, terabytes_written=600)
    return predict(job, replace(MACHINE, drives=drives, flops=6e9 / compute_seconds if compute_seconds else 1e18))


def space_of(found):
    return found.tiers.bytes_on("nvme")


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(("period", "bytes_per_param"), [(1, 12), (2, 7), (3, 16 / 3), (16, 42 / 16)])
def test_wear_and_life_are_those_of_the_period_and_of_each_copy(period, bytes_per_param, copies):
    bytes_per_param *= copies
    found = planned(100.0, rewrite_every=period, copies=copies, nvme_path=["a", "b"][:copies])
    assert space_of(found) == pytest.approx(copies * space_of(planned(100.0, rewrite_every=period)))
    steps = 86_400 / found.time.seconds
    assert found.to_dict()["rewrite_every"] == period
    assert found.written_per_day == pytest.approx(bytes_per_param * GB * steps)
    assert found.days_of_life == pytest.approx(600 * TB / found.written_per_day)


def test_replays_and_bytes_make_a_step_as_long_as_they_are():
    """At 2 GB/s in each direction one after the other, and one update of a billion parameters in a second."""
    once, thrice = planned(rewrite_every=1), planned(rewrite_every=3)
    assert once.time.work.update == pytest.approx(1.0)
    assert thrice.time.work.update == pytest.approx(2.0)
    assert thrice.time.work.nvme < once.time.work.nvme
