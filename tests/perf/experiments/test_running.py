"""Experiments as they run: what is known is saved at once, and shown in a table that fits."""

import json

import pytest
import typer

from nvme_offload.perf import cli
from nvme_offload.perf.experiments.__main__ import EXPERIMENTS
from nvme_offload.perf.experiments.experiment import Row, run_experiment


def test_a_run_that_is_cut_short_has_saved_what_it_knows(tmp_path):
    def rounds():
        for count in (1, 2):
            yield Row({"": "durable", "ratio": "0.800", "quads": str(count)}, {"quads": [0.8] * count})
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        run_experiment("durable-steps", "Durable steps", rounds(), path=tmp_path, save_to=tmp_path / "results")
    assert ended.value.exit_code == 130
    [page] = (tmp_path / "results").glob("*-durable-steps.md")
    [document] = (tmp_path / "results").glob("*-durable-steps.json")
    assert "| durable | 0.800 | 2 |" in page.read_text()
    [outcome] = json.loads(document.read_text())["results"]
    assert len(outcome["quads"]) == 2
    assert str(tmp_path) not in document.read_text()


def test_a_table_that_is_too_wide_either_way_has_cells_of_several_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    rows = [Row({"what": f"a long operation {n}", "ratio": "0.93 (0.90 to 0.97)"}, {}) for n in range(9)]
    run_experiment("costs", "Costs", rows)
    assert "what ratio" in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_help_that_is_known_up_front_is_that_of_the_experiment():
    for name, experiment in EXPERIMENTS.items():
        loaded = cli.load(name, EXPERIMENTS)
        assert " ".join(loaded.help.split("\n\n")[0].split()) == experiment.help
        assert loaded.epilog == f"Example: {experiment.example}"
