"""The benchmark of iterations beside a checkpoint: it runs, saves, and leaves nothing."""

import json

import pytest

from nvme_offload.perf.benchmarks.beside_checkpoint import main


@pytest.mark.usefixtures("alone")
def test_a_ratio_and_how_much_was_written_beside(tmp_path, capsys):
    main([str(tmp_path), "--millions", "1", "--quads", "1", "--share", "0.01", "--iterations", "1"])
    found = json.loads(capsys.readouterr().out)
    assert found["share"] == 0.01
    assert found["ratio"] == found["low"] == found["high"] > 0
    assert found["progress"] < 1, "nothing was measured beside a checkpoint"
    assert list(tmp_path.iterdir()) == []
