"""What a run writes in a day is known, and said once where it is more than the section allows."""

import re

import pytest
import torch

from nvme_offload import OffloadAdamW
from nvme_offload.offload.durable.rewrite_every import DurableRates
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.units import TB
from nvme_offload.optim import wear
from tests.support.training import assert_same_bits, params_of, section, set_grads, snapshot


def optimizer_of(path, **keys):
    made = section(path, sub_group_size=65536)
    made["zero_optimization"]["offload_optimizer"] |= {"staging_budget": "32MiB", **keys}
    params = params_of([(70_001,), (999,)], torch.bfloat16)
    return params, OffloadAdamW(params, offload=made)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass where somebody says so."""
    seconds = [0.0]
    monkeypatch.setattr(wear.time, "monotonic", lambda: seconds[0])
    return seconds


def test_bytes_a_day_and_days_of_life(drive, clock):
    params, optimizer = optimizer_of(drive, endurance="600TB")
    with optimizer:
        set_grads(params, 0)
        optimizer.step()
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
        assert found.days_of_life == 600 * TB / found.written_per_day
        clock[0] = 40.0
        assert optimizer.stats().written_per_day == found.written_per_day


@pytest.mark.parametrize(
    ("durable", "said"), [(False, "durable = true and rewrite_every = "), (True, "rewrite_every = ")]
)
def test_more_than_the_limit_is_said_once_with_what_writes_less(drive, clock, recwarn, durable, said):
    params, optimizer = optimizer_of(drive, durable=durable, wear_limit="0.5 GB/day")
    with optimizer:
        for _ in range(100):
            set_grads(params, 0)
            optimizer.step()
            optimizer.synchronize()
            clock[0] += 90.0
        texts = [str(warning.message) for warning in recwarn if "wear_limit" in str(warning.message)]
    assert len(texts) == 1
    found = re.search(rf": {said}(\d+) would write about ([0-9.e-]+) TB$", texts[0])
    assert found is not None, texts
    assert 2 <= int(found[1]) <= 16
    assert float(found[2]) <= 0.0005
    assert "wear_limit is 0.0005 TB a day" in texts[0]


def test_within_the_limit_nothing_is_said(drive, clock, recwarn):
    params, optimizer = optimizer_of(drive, wear_limit="10TB/day")
    with optimizer:
        for _ in range(3):
            set_grads(params, 0)
            optimizer.step()
            clock[0] += 90.0
    assert not [warning for warning in recwarn if "wear_limit" in str(warning.message)]


@pytest.mark.parametrize("limit", ["1TB", "a lot", 5])
def test_other_words_are_refused(drive, limit):
    with pytest.raises(ConfigError, match="wear_limit"):
        optimizer_of(drive, wear_limit=limit)


def test_auto_rewrites_as_seldom_as_the_limit_wants_and_the_bits_stay(drive, clock, monkeypatch, recwarn):
    """The pace of a run changes; it ends in between, and goes on with another period than what was logged last."""
    monkeypatch.setattr("nvme_offload.optim.state.period.measure_rates", lambda _: DurableRates(read=2e9, write=2e9))

    def steps(params, optimizer, numbers, seconds):
        periods = []
        for number in numbers:
            set_grads(params, number)
            optimizer.step()
            optimizer.synchronize()
            clock[0] += seconds
            periods.append(optimizer.stats().rewrite_every)
        return periods

    def made():
        return optimizer_of(drive, durable="run", rewrite_every="auto", wear_limit="10 GB/day")

    params, optimizer = made()
    with optimizer:
        assert optimizer.stats().rewrite_every == 3
        calm = steps(params, optimizer, range(8), 10.0)
        assert set(calm) == {3}, "4 GB a day"
        hurried = steps(params, optimizer, range(8, 60), 2.5)
        assert hurried[-1] > 3
        per_step = optimizer.stats().bytes_written
        steps(params, optimizer, range(60, 60 + 4 * hurried[-1]), 2.5)
        per_step = (optimizer.stats().bytes_written - per_step) / (4 * hurried[-1])
        assert per_step * 86_400 / 2.5 <= 10e9
        done = 60 + 4 * hurried[-1]
    params, optimizer = made()
    with optimizer:
        assert optimizer.resume() == (done, {})
        assert optimizer.stats().rewrite_every == 4, "until the pace is known again"
        slow = steps(params, optimizer, range(done, done + 40), 20.0)
        assert slow[-1] == 4
        found = snapshot(optimizer)
    params, optimizer = optimizer_of(drive)
    with optimizer:
        steps(params, optimizer, range(done + 40), 1.0)
        assert_same_bits(snapshot(optimizer), found)
    assert not [warning for warning in recwarn if "wear_limit" in str(warning.message)]


def test_a_limit_that_is_never_kept_says_by_how_much(drive, clock, recwarn):
    params, optimizer = optimizer_of(drive, durable=True, rewrite_every="auto", wear_limit="0.01 GB/day")
    with optimizer:
        for _ in range(200):
            set_grads(params, 0)
            optimizer.step()
            optimizer.synchronize()
            clock[0] += 5.0
        assert optimizer.stats().rewrite_every == 16
    [text] = [str(warning.message) for warning in recwarn if "wear_limit" in str(warning.message)]
    assert re.search(r"rewritten every 16 steps it writes [0-9.e-]+ TB, [0-9.e-]+ TB too much\. What is in host", text)
