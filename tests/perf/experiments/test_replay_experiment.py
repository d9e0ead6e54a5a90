"""The experiment of updates from a log: it runs, and its figures mean what they say."""

import pytest

from nvme_offload.perf.experiments.replay import measure
from tests.perf.experiments.running import results, said


def test_there_is_a_rate_for_everything():
    found = results("replay", "--numel", 100000, "--rounds", 2, "--max-period", 3, "--rule", "Lion")
    periods = [f"period of {period}" for period in (1, 2, 3)]
    assert list(found) == ["plain", "checked", "kept", "replayed", "checksummed", *periods]
    assert all(each["rate"] > 0 for each in found.values())


def test_a_period_of_one_step_has_no_log():
    rates = measure(numel=1, max_period=1, threads=1, rounds=1)
    assert rates.by_period == {1: pytest.approx(rates.checked)}


def test_bad_options_are_named():
    assert "'--rounds'" in said("replay", "--rounds", 0, status=2)
    assert "'SGDM' is not one of" in said("replay", "--rule", "SGDM", status=2)
