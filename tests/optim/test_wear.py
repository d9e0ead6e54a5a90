"""What a run writes in a day is known, and said once where it is more than the section allows."""

import re

import pytest
import torch

from nvme_offload import OffloadAdamW
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.units import TB
from nvme_offload.optim import wear
from tests.support.training import params_of, section, set_grads


def optimizer_of(path, **keys):
    made = section(path, sub_group_size=65536)
    made["zero_optimization"]["offload_optimizer"] |= {"staging_budget": "8MiB", **keys}
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
