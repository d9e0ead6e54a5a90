"""The benchmark of updates from a log: it runs, and its figures mean what they say."""

import json

import pytest

from nvme_offload.perf.benchmarks import replay

SMALL = ["--numel", "100000", "--rounds", "2", "--max-period", "3"]


def test_one_document_with_a_rate_for_everything(capsys):
    replay.main([*SMALL, "--rule", "Lion"])
    document = json.loads(capsys.readouterr().out)
    rates = document["parameters per second"]
    assert document["options"]["rule"] == "Lion"
    assert list(rates["by_period"]) == ["1", "2", "3"]
    assert all(rate > 0 for rate in [*rates.pop("by_period").values(), *rates.values()])


def test_a_period_of_one_step_has_no_log():
    rates = replay.measure(numel=1, max_period=1, threads=1, rounds=1)
    assert rates.by_period == {1: pytest.approx(rates.checked)}


def test_bad_options_are_named(capsys):
    with pytest.raises(SystemExit):
        replay.main([*SMALL, "--rounds", "0"])
    assert "--rounds 0: at least 1" in capsys.readouterr().err
