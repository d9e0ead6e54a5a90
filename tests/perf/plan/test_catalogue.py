"""Classes of drives for `offload plan --drive`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nvme_offload.perf.bench.report import became_slow, slow_lines
from nvme_offload.perf.cli import app
from nvme_offload.perf.plan.machine import CATALOGUE, Drives, MachineError, drives_of
from tests.perf.documents import write_bench

PAGE = Path(__file__).resolve().parents[3] / "docs" / "plan.md"
PLAN = ["plan", "--params", "1e9", "--layers", "10", "--flops", "1e12"]


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_class_can_be_planned_with(name):
    one, capacity = drives_of(name)
    four, four_times = drives_of(f"{name}x4")
    assert (four.read, four.write, four.mixed) == pytest.approx((4 * one.read, 4 * one.write, 4 * one.mixed))
    assert (four.endurance, four_times) == (4 * one.endurance, 4 * capacity)
    assert 0 < one.write <= one.read <= 15e9
    assert 100 < one.endurance / capacity < 6000, "writes of the whole drive in its life"


def test_the_page_has_the_figures_and_each_has_its_source():
    table = PAGE.read_text(encoding="utf-8").partition("\n## Classes of drives\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    for (name, kind), (shown, _, read, write, capacity, endurance, source) in zip(CATALOGUE.items(), rows, strict=True):
        assert (shown, source != "") == (f"`{name}`", True)
        assert f"\n- {shown}:" in table
        assert kind[:2] == (float(read) * 1e9, float(write) * 1e9)
        assert [f"{size / 1e12:g} TB" for size in kind[2:]] == [capacity, endurance]


def test_an_endurance_that_is_known_better_counts():
    assert drives_of("gen4-consumer", 600.0)[0].endurance == 600e12


@pytest.mark.parametrize("text", ["gen4", "gen4-consumerx0", "gen4-consumer x2", ""])
def test_another_name_is_refused_with_those_there_are(text):
    with pytest.raises(MachineError, match=r"write one of sata-consumer, gen3-consumer, .*: gen4-consumerx4"):
        drives_of(text)


def test_the_command_takes_a_class_in_place_of_rates():
    done = CliRunner().invoke(app, [*PLAN, "--drive", "gen4-enterprisex2", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["largest_model"]["layers"] > 10
    done = CliRunner().invoke(app, [*PLAN, "--drive", "gen4-consumer", "--read-bw", "1GB"])
    assert done.exit_code == 2
    assert "give one" in done.output


@pytest.mark.parametrize(
    ("rates", "planned"),
    [
        ([3e9] * 20 + [1e9] * 20, 1e9),
        ([3e9] * 36 + [2.6e9] * 12, 2.9e9),  # less than a fifth slower: the weather
        ([1e9] * 4 + [3e9] * 4, 2e9),  # faster
        ([3e9] * 3 + [1e9] * 3, 2e9),  # too few to tell
    ],
)
def test_of_a_drive_that_became_slow_its_end_is_planned_with(tmp_path, rates, planned):
    summary = {"total_bytes": sum(rates), "total_seconds": len(rates), "became_slow": became_slow(rates)}
    assert (": from 3.00 GB/s to 1.00 GB/s: " in "".join(slow_lines({"results": {"write": {"summary": summary}}}))) == (
        planned == 1e9
    )
    result = {"summary": summary}
    assert Drives.of_bench(write_bench(tmp_path / "bench.json", result)).write == planned
