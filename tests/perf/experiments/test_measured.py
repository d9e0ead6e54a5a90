"""Experiments from their command lines: figures that are what they promise, and nothing that is left behind."""

import json

import pytest
import typer

from nvme_offload.perf.measure.comparison import Comparison, Quad
from nvme_offload.perf.measure.experiment import Row, run_experiment
from tests.perf.experiments.running import results
from tests.support.forked import forked_children


@pytest.mark.slow  # a process for each
def test_with_boundaries_on_the_drive_memory_does_not_grow_with_depth(tmp_path):
    found = results("activations", "memory", "--path", tmp_path, "--width", 256, "--depth", 8, "--depth", 32)
    assert list(found) == ["plain", "checkpointing", "boundaries", "attention", "all"]
    assert len({tuple(each["digests"]) for each in found.values()}) == 1
    assert list(tmp_path.iterdir()) == []
    plain, boundaries = (found[way]["peaks"] for way in ("plain", "boundaries"))
    assert boundaries[1] <= 1.1 * boundaries[0]
    assert plain[1] > 2 * plain[0]


def test_iterations_by_turns(tmp_path):
    size = ("--width", 64, "--context", 64, "--layers", 2)
    with forked_children():
        found = results("activations", "iterations", "--path", tmp_path, *size, "--quads", 1)
    assert list(found) == ["boundaries", "attention", "all"]
    assert all(each["quotient"] > 0 for each in found.values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("alone")
def test_iterations_on_a_device_beside_their_plans(tmp_path, monkeypatch):
    """Without one, on the CPU."""
    monkeypatch.setattr("nvme_offload.perf.experiments.plan_check.REGION_BYTES", 8 << 20)
    monkeypatch.setattr("nvme_offload.perf.experiments.plan_check.PASS_BYTES", 8 << 20)
    monkeypatch.setattr("nvme_offload.perf.experiments.on_device._UPDATED", 1 << 20)
    size = ("--layers", 2, "--width", 64, "--tokens", 4, "--count", 1)
    found = results("on-device", "--path", tmp_path, *size, "--only", "all on NVMe")
    own, *ours = found.values()
    assert own["plan"] is None
    assert list(found)[1:] == ["all on NVMe", "all on NVMe, 4 micro-batches"]
    assert all(each["iteration"] > 0 < each["plan"] for each in ours)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # what it measures is measured in bytes and over a paced drive, too
@pytest.mark.usefixtures("alone")
def test_seconds_by_turns(tmp_path):
    [found] = results("micro-batches", "turns", "--path", tmp_path, "--layers", 4, "--width", 64, "--quads", 1).values()
    assert len(found["quads"]) == len(found["controls"]) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "in_backward", [pytest.param(False, marks=pytest.mark.slow), True], ids=["clipped", "in backward"]
)
def test_bytes_of_a_step_in_each_order(tmp_path, in_backward):
    small = ("--layers", 8, "--width", 64, "--tokens", 4, "--count", 3, "--steps", 2)
    found = results("micro-batches", "bytes", "--path", tmp_path, *small, *(["--in-backward"] if in_backward else []))
    one_by_one, by_blocks = found["horizontal, 3"], found["vertical, 3"]
    assert by_blocks["digest"] == one_by_one["digest"]
    assert by_blocks["param_bytes_read"] < one_by_one["param_bytes_read"] - 3
    assert one_by_one["grad_bytes_written"] > 5
    assert by_blocks["grad_bytes_written"] == 0 if in_backward else by_blocks["grad_bytes_written"] < 2.3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_orders_over_a_paced_drive_that_all_tiers_share():
    found = results("micro-batches", "paced", "--layers", 6, "--width", 128, "--count", 1, "--compute", 0.05)
    assert len(found) == 6
    for each in found.values():
        ratio = int(each["name"].rpartition(" ")[2])
        assert each["seconds"] > 0.8 * 0.05 * ratio, "a drive for each tier would move the bytes sooner"


@pytest.mark.slow  # twelve optimizers
@pytest.mark.usefixtures("alone")
def test_every_cost_has_a_figure(tmp_path):
    found = results("costs", "--path", tmp_path, "--millions", 1, "--quads", 1)
    names = {"step", "state_dict", "durable step", "resume", "save", "load"}
    assert {name.partition(",")[0] for name in found} >= names
    assert all(each["each"] > 0 for name, each in found.items() if not name.startswith("step on NVMe"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_cut_short_has_saved_what_it_knows(tmp_path):
    quads, controls = (Quad((0.8, 1.0, 1.0, 0.8)),) * 2, (Quad((1.0, 1.0, 1.0, 1.0)),) * 2

    def rounds():
        yield Comparison("durable", quads[:1], controls[:1])
        yield Comparison("durable", quads, controls)
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        run_experiment("durable-steps", "Durable steps", rounds(), path=tmp_path, save_to=tmp_path / "results")
    assert ended.value.exit_code == 130
    [page] = (tmp_path / "results").glob("*-durable-steps.md")
    [document] = (tmp_path / "results").glob("*-durable-steps.json")
    assert "| durable | 0.800 (0.800 to 0.800) | 1.000 | 2 |" in page.read_text()
    [outcome] = json.loads(document.read_text())["results"]
    assert len(outcome["quads"]) == len(outcome["controls"]) == 2
    assert str(tmp_path) not in document.read_text()


def test_a_table_that_is_too_wide_either_way_has_cells_of_several_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    run_experiment(
        "costs", "Costs", [Row({"what": f"a long operation {n}", "ratio": "0.93 (0.90 to 0.97)"}, {}) for n in range(9)]
    )
    assert "what ratio" in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
