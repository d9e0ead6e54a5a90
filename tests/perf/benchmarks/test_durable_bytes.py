"""What a durable step writes, by the kernel's counters: the state and what parameters have besides, and little more."""

import json

import pytest

from nvme_offload.perf.benchmarks.durable_bytes import main


@pytest.mark.parametrize("millions", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_a_durable_step_writes_12_bytes_per_parameter_and_reads_no_more_than_another(tmp_path, capsys, millions):
    main([str(tmp_path), "--millions", str(millions), "--steps", "2"])
    found = json.loads(capsys.readouterr().out)
    slack = 0.05 + 0.15 / millions
    assert 12 <= found["durable"]["written"] <= 12 + slack
    assert 10 <= found["in place"]["written"] <= 10 + slack
    assert found["durable"]["read"] <= 10
    assert list(tmp_path.iterdir()) == []
