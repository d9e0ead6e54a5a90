"""The section that is chosen: it fits where any does, nothing is faster, and its reason is what came of it."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from nvme_offload.offload.units import GiB
from nvme_offload.perf.plan import choosing, schedule
from nvme_offload.perf.plan.choosing import Chooser
from nvme_offload.perf.plan.lora import Lora
from nvme_offload.perf.plan.machine import Drives, Machine
from nvme_offload.perf.plan.prediction import predict
from nvme_offload.perf.plan.remedies import remedies
from nvme_offload.perf.plan.shape import ModelShape
from nvme_offload.perf.plan.traffic import MOST_ROUNDS, of_gradients, of_parameters

RATES = {"drives": Drives.of_rates(7e9, 5e9), "flops": 155e12, "pcie": 22e9}
CARD = Machine(host_memory=60 * GiB, device_memory=24 * GiB, capacity=2 * 10**12, **RATES)


def chooser(machine=CARD, tokens=2048, **more):
    return Chooser(machine, [Path("/")], tokens, **more)


@pytest.mark.parametrize(("numbers", "tokens", "micro_batches"), [
    ((8_190_000_000, 36, 4096, 151936), 4096, 8),
    pytest.param((70_600_000_000, 80, 8192, 128256), 2048, 8, marks=pytest.mark.slow),
    ((30_000_000_000, 120, 4096, 128256), 2048, 32),
], ids=["8 B", "70 B", "30 B, 32 micro-batches"])  # fmt: skip
def test_a_card_of_24_gib_holds_large_models(numbers, tokens, micro_batches):
    """Whatever keeps it from fitting, the section that is chosen has the key that mends it."""
    choice = chooser(tokens=tokens, micro_batches=micro_batches).choose(ModelShape.of_numbers(*numbers))
    assert not choice.tiers.missing
    assert "an iteration takes" in choice.why


def drawn(seed):
    """A model and a machine: cards of 12 to 80 GiB or none, hosts of 16 to 512 GiB, 1 to 4 drives, 1 to 120 B."""
    rng = random.Random(seed)
    numel, vocab = 10 ** rng.uniform(9, 11.08), rng.choice([32000, 128256])
    layers = int(12 * (numel / 1e9) ** 0.35)
    shape = ModelShape.of_numbers(int(numel), layers, int((numel / layers / 12) ** 0.5), vocab)
    if rng.random() < 0.3:
        shape = replace(shape, idle=tuple(int(0.9 * sum(layer)) for layer in shape.layers))
    drives = rng.randint(1, 4)
    machine = Machine(
        host_memory=rng.choice([16, 32, 64, 128, 256, 512]) * GiB,
        device_memory=rng.choice([None, 12 * GiB, 16 * GiB, 24 * GiB, 48 * GiB, 80 * GiB]),
        drives=Drives.of_rates(drives * 7e9, drives * rng.choice([2e9, 5e9])),
        capacity=drives * 2 * 10**12,
        flops=rng.choice([1.5e14, 4e14, 1e12]),
        pcie=rng.choice([12e9, 25e9, 55e9]),
    )
    tokens, sequence = rng.choice([512, 2048, 4096, 8192]), rng.choice([0, 2048])
    micro_batches = rng.choice([1, 4, 8, 32])
    if rng.random() < 0.3:
        shape = shape.with_lora(Lora(rng.choice([8, 64]), rng.choice([None, 4.25])))
    return shape, chooser(machine, tokens, sequence=sequence, micro_batches=micro_batches)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 200))])
def test_no_section_of_the_whole_space_is_faster_by_5_percent(seed):
    shape, asked = drawn(seed)
    tried = (point.tried(asked, shape) for point in asked.points)
    fitting = [choice for choice in tried if choice is not None and not choice.tiers.missing]
    choice = asked.choose(shape)
    assert bool(choice.tiers.missing) == (not fitting)
    assert asked.fits(shape) == bool(fitting)
    if fitting:
        times = [predict(each.job, asked.machine, alone=True).time.seconds for each in fitting]
        assert predict(choice.job, asked.machine, alone=True).time.seconds <= 1.05 * min(times)


def test_how_far_a_search_is_can_be_seen(monkeypatch):
    shown = []
    monkeypatch.setattr(choosing, "tracked", lambda name, items: shown.append(name) or items)
    chooser().choose(ModelShape.of_numbers(10**9, 4, 4096, 32000))
    assert shown == ["trying sections", "timing sections"]


def test_the_reason_is_what_came_of_it():
    everything = chooser(replace(CARD, host_memory=512 * GiB)).choose(ModelShape.of_numbers(8 * 10**9, 32, 4096, 32000))
    assert everything.why.startswith("everything fits into memory")
    assert not everything.tiers.units_on("nvme")
    part = chooser().choose(ModelShape.of_numbers(8 * 10**9, 32, 4096, 32000))
    assert "of host memory would be missing" in part.why or "of GPU memory would be missing" in part.why


def test_what_does_not_fit_is_said_with_the_smallest_changes_that_do():
    shape = ModelShape.of_numbers(14 * 10**9, 30, 6144, 151936)
    asked = chooser(replace(CARD, host_memory=128 * GiB), tokens=8192)
    assert asked.choose(shape).tiers.missing
    said = remedies(asked, shape)
    assert any("in chunks" in each for each in said)
    tokens = next(int(each.split()[0].replace(",", "")) for each in said if "tokens" in each)
    assert not replace(asked, tokens=tokens).choose(shape).tiers.missing
    assert replace(asked, tokens=tokens + 128).choose(shape).tiers.missing


@pytest.mark.parametrize(("capacity", "moments"), [(32e9, "int8"), (56e9, "bf16"), (80e9, "fp32")])
def test_narrow_moments_are_offered_where_nothing_wider_fits_and_never_taken(capacity, moments):
    shape = ModelShape.of_numbers(8 * 10**9, 32, 4096, 32000)
    asked = chooser(replace(CARD, host_memory=24 * GiB, capacity=int(capacity)))
    assert asked.fits(shape) == (moments == "fp32")
    assert "state_dtype" not in str(asked.choose(shape).job.config.model_dump(exclude_defaults=True))
    said = remedies(asked, shape)
    assert len([each for each in said if each.startswith(f"moments in {moments} ")]) == (moments != "fp32")
    assert any(each.endswith(" machines like this one") for each in said), "--ranks alone means ranks of this machine"
    assert replace(asked, moments=moments).fits(shape)


@pytest.mark.parametrize("seed", range(8))
def test_traffic_of_many_micro_batches_is_that_of_each_one_after_the_other(seed, monkeypatch):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 5) for _ in range(rng.randint(2, 12))]
    buffers, rounds, visits = rng.randint(2, 6), rng.randint(MOST_ROUNDS + 1, 9), range(len(sizes))
    updated_in = rng.choice(["update", "forward", "backward"])

    def found():
        one = of_parameters(sizes, buffers, rounds, visits, has_root=seed % 2 == 0, twice=True, updated_in=updated_in)
        return one, of_gradients(sizes, buffers, rounds, visits, updated_in=updated_in)

    short = found()
    monkeypatch.setattr("nvme_offload.perf.plan.traffic.MOST_ROUNDS", rounds)
    assert found() == short


def test_an_iteration_of_many_micro_batches_takes_what_they_take_one_after_the_other(monkeypatch):
    """Micro-batches between the first and the last are counted and not simulated, once two are alike."""
    shape = ModelShape.of_numbers(8 * 10**9, 32, 4096, 32000)
    job = chooser(micro_batches=12).choose(shape).job.with_keys(micro_batch_order="horizontal")
    counted = predict(job, CARD).times
    schedule._ends.cache_clear()
    monkeypatch.setattr(schedule, "_alike", lambda *unused: False)
    for name, time in predict(job, CARD).times.items():
        assert counted[name].seconds == pytest.approx(time.seconds, rel=1e-9)
        assert counted[name].waiting == pytest.approx(time.waiting, rel=1e-6)
