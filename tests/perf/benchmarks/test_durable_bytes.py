"""What a durable step writes, by the kernel's counters: the state and what parameters have besides, and little more."""

import json

import pytest

from nvme_offload.perf.benchmarks.durable_bytes import main

MOST = {1: (12, 10.0), 2: (7, 12.0), 3: (16 / 3, 13.4)}
"""Bytes per bf16 parameter and step by period: written, but for trailers and manifests, and read at most."""


@pytest.mark.parametrize(
    ("millions", "period"),
    [(2, 1), (2, 3), *(pytest.param(100, period, marks=pytest.mark.slow) for period in MOST)],
)
def test_a_durable_step_writes_what_its_period_says_and_reads_little_more(tmp_path, capsys, millions, period):
    main([str(tmp_path), "--millions", str(millions), "--steps", "6", "--rewrite-every", str(period)])
    found = json.loads(capsys.readouterr().out)
    slack = 0.05 + 0.15 / millions
    written, most_read = MOST[period]
    assert written <= found["durable"]["written"] <= written + slack
    assert 10 <= found["in place"]["written"] <= 10 + slack
    assert found["durable"]["read"] <= most_read
    assert list(tmp_path.iterdir()) == []
