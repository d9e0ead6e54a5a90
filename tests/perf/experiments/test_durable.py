"""What durable steps cost: bytes by the kernel's counters, seconds by turns, and nothing that is left behind."""

import pytest

from tests.perf.experiments.running import results

MOST = {1: (12, 10.0), 2: (7, 12.0), 3: (16 / 3, 13.4)}
"""Bytes per bf16 parameter and step by period: written, but for trailers and manifests, and read at most."""


@pytest.mark.parametrize(
    ("millions", "period"), [(2, 1), (2, 3), *(pytest.param(100, period, marks=pytest.mark.slow) for period in MOST)]
)
def test_a_durable_step_writes_what_its_period_says_and_reads_little_more(tmp_path, millions, period):
    found = results("durable", "bytes", "--path", tmp_path, "--millions", millions, "--rewrite-every", period)
    slack = 0.05 + 0.15 / millions
    written, most_read = MOST[period]
    assert written <= found["durable"]["written"] <= written + slack
    assert 10 <= found["in place"]["written"] <= 10 + slack
    assert found["durable"]["read"] <= most_read
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "experiment",
    [("steps", "--millions", 1), ("checkpoint", "--millions", 1, "--share", 0.01, "--iterations", 1)],
    ids=lambda experiment: experiment[0],
)
@pytest.mark.usefixtures("alone")
def test_seconds_by_turns(tmp_path, experiment):
    [found] = results("durable", *experiment, "--path", tmp_path, "--quads", 1).values()
    assert found["quotient"] > 0
    assert len(found["quads"]) == len(found["controls"]) == 1
    assert list(tmp_path.iterdir()) == []
