"""The measurement of read-ahead, and what it must show."""

import json

import pytest

from nvme_offload.perf.benchmarks.read_ahead import main, measure


@pytest.mark.quiet
def test_it_reports_both_ways(alone, tmp_path, capsys):
    main([str(tmp_path), "--layers", "3", "--width", "16", "--tokens", "4", "--steps", "2", "--buffer-count", "2"])
    report = json.loads(capsys.readouterr().out)
    assert report["without"]["reads_ahead"] == 0
    assert report["without"]["reads"] > 0
    assert report["with read-ahead"]["uses"] == report["without"]["uses"]
    assert not list(tmp_path.iterdir())
    main([str(tmp_path), "--layers", "2", "--width", "16", "--tokens", "4", "--steps", "2", "--buffer-count", "4"])
    report = json.loads(capsys.readouterr().out)
    assert report["without"]["reads"] == 0
    assert report["waiting, of that without"] is None


def test_one_step_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--steps", "1"])
    assert "write 2 or more" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("state", ["cpu", "nvme"])
def test_most_of_the_waiting_is_hidden(alone, tmp_path, state):
    ahead, waiting = (measure(str(tmp_path), read_ahead=on, state=state, tokens=8, steps=8) for on in (True, False))
    assert ahead.share_ahead >= 0.95
    assert ahead.reads_unused == 0
    if state == "nvme":
        assert ahead.wait_seconds <= 0.15 * waiting.wait_seconds
    else:  # from memory a block is updated faster than some drives can bring and take it
        assert ahead.wait_in_passes_seconds <= 0.15 * waiting.wait_in_passes_seconds
