"""What a run writes in a day is known, and said once where it is more than the section allows."""

import pytest
import torch

from nvme_offload import OffloadAdamW
from nvme_offload.offload.durable.rewrite_every import DurableRates
from nvme_offload.optim.durable import wear
from tests.support.training import assert_same_bits, params_in, params_of, section, snapshot, take_steps


def optimizer_of(path, **keys):
    made = section(path, sub_group_size=65536)
    made["zero_optimization"]["offload_optimizer"] |= {"staging_budget": "32MiB", **keys}
    return OffloadAdamW(params_of([(70_001,), (999,)], torch.bfloat16), offload=made)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass where somebody says so."""
    seconds = [0.0]
    monkeypatch.setattr(wear.time, "monotonic", lambda: seconds[0])
    return seconds


def test_bytes_a_day(drive, clock):
    with optimizer_of(drive) as optimizer:
        take_steps(optimizer, params_in(optimizer), 0)
        optimizer.synchronize()
        assert optimizer.stats().written_per_day is None
        of_a_step = optimizer.stats().bytes_written
        clock[0] = 2.0
        optimizer.step()
        optimizer.synchronize()
        clock[0] = 4.0
        optimizer.step()
        optimizer.synchronize()
        found = optimizer.stats()
        # Writes of a step may be under way when it ends.
        assert of_a_step / 2 * 21_600 <= found.written_per_day <= 3 * of_a_step * 21_600
        clock[0] = 40.0
        assert optimizer.stats().written_per_day == found.written_per_day


@pytest.mark.parametrize(
    ("keys", "said", "period"),
    [
        ({}, "a host_budget keeps state in memory", None),
        ({"durable": True}, "a new run with rewrite_every", 1),
        ({"durable": True, "rewrite_every": "auto"}, "a run with durable = false and a host_budget", 16),
    ],
)
def test_more_than_the_limit_is_said_once_with_what_writes_less(drive, clock, recwarn, keys, said, period):
    with optimizer_of(drive, wear_limit="0.01 GB/day", **keys) as optimizer:
        for _ in range(40):
            take_steps(optimizer, params_in(optimizer), 0)
            optimizer.synchronize()
            clock[0] += 5.0
        assert optimizer.stats().rewrite_every == period
    [text] = [str(warning.message) for warning in recwarn if "wear_limit" in str(warning.message)]
    assert "wear_limit is 1e-05 TB a day" in text
    assert said in text


def test_within_the_limit_nothing_is_said(drive, clock, recwarn):
    with optimizer_of(drive, wear_limit="10TB/day") as optimizer:
        for _ in range(3):
            take_steps(optimizer, params_in(optimizer), 0)
            clock[0] += 90.0
    assert not [warning for warning in recwarn if "wear_limit" in str(warning.message)]


@pytest.mark.parametrize(
    ("read", "write", "limit", "period"),
    [
        (2e9, 2e9, None, 3),
        pytest.param(2e9, 2e9, "45 TB/day", 4, marks=pytest.mark.slow),
        (2e9, 2e9, "10 GB/day", 16),
        (1e8, 1e9, None, 1),
        pytest.param(1e9, 1e8, None, 4, marks=pytest.mark.slow),
    ],
)
def test_auto_decides_once_by_the_drive_and_the_limit_and_the_bits_stay(
    drive, clock, monkeypatch, read, write, limit, period
):
    """At 2 GB/s each way 49 TB a day are written with a period of 3, 41 with 4, and 15 with 16."""

    def made(read, write):
        rates = DurableRates(read=read, write=write)
        monkeypatch.setattr("nvme_offload.optim.durable.state.measure_rates", lambda _: rates)
        return optimizer_of(drive, durable="run", rewrite_every="auto", wear_limit=limit)

    def steps(optimizer, numbers):
        for number in numbers:
            take_steps(optimizer, params_in(optimizer), number)
            clock[0] += 90.0 / (number + 1)
            assert optimizer.stats().rewrite_every == period

    with made(read, write) as optimizer:
        steps(optimizer, range(20))
    with made(1.0, 1e9) as optimizer:
        assert optimizer.resume() == (20, {})
        steps(optimizer, range(20, 25))
        found = snapshot(optimizer)
    with optimizer_of(drive) as optimizer:
        take_steps(optimizer, params_in(optimizer), *range(25))
        assert_same_bits(snapshot(optimizer), found)
