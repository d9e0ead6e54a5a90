"""The measurement of read-ahead, and what it must show."""

import pytest

from nvme_offload.perf.experiments.read_ahead import measure
from tests.perf.experiments.running import results, said

SMALL = ("--width", 16, "--tokens", 4, "--steps", 2)


@pytest.mark.quiet
@pytest.mark.parametrize(("layers", "buffers", "reads"), [(3, 2, True), (2, 4, False)])
def test_it_reports_both_ways(alone, tmp_path, layers, buffers, reads):
    found = results("read-ahead", "--path", tmp_path, *SMALL, "--layers", layers, "--buffer-count", buffers)
    assert found["without"]["reads_ahead"] == 0
    assert (found["without"]["reads"] > 0) is reads
    assert found["with read-ahead"]["uses"] == found["without"]["uses"]
    assert not list(tmp_path.iterdir())


def test_one_step_is_refused(tmp_path):
    assert "'--steps'" in said("read-ahead", "--path", tmp_path, "--steps", 1, status=2)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["cpu", "nvme"])
def test_most_of_the_waiting_is_hidden(alone, tmp_path, state):
    ahead, waiting = (measure(tmp_path, read_ahead=on, state=state, tokens=8, steps=8) for on in (True, False))
    assert ahead.share_ahead >= 0.95
    assert ahead.reads_unused == 0
    if state == "nvme":
        assert ahead.wait_seconds <= 0.15 * waiting.wait_seconds
    else:  # from memory a block is updated faster than some drives can bring and take it
        assert ahead.wait_in_passes_seconds <= 0.15 * waiting.wait_in_passes_seconds
