"""Resident memory of whole runs beside the plan's."""

import pytest
import typer
from typer.testing import CliRunner

from nvme_offload.offload.units import MiB
from nvme_offload.perf.planning import check, memory_check
from nvme_offload.perf.planning.memory_check import CASES, Case, Outcome


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_takes_the_memory_of_its_plan(case, tmp_path):
    outcome = memory_check.measure(tmp_path, case)
    assert outcome.within_plan, outcome.cells()
    assert 1.1 * outcome.measured + 64 * MiB >= outcome.predicted, "the plan asks for no more than a run takes"


@pytest.mark.parametrize(("excess", "status"), [(0, 0), (1, 1)])
def test_the_check_fails_beyond_a_tenth_and_64_mib(excess, status, tmp_path, monkeypatch):
    allowed = 1100 * MiB + 64 * MiB
    monkeypatch.setattr(memory_check, "CASES", (Case("bf16", 6),))
    monkeypatch.setattr(
        memory_check, "measure", lambda _, case, __: Outcome(case, 1000 * MiB, allowed + excess, 50_000_000)
    )
    command = typer.Typer()
    command.command()(check.main)
    result = CliRunner().invoke(command, ["--path", str(tmp_path), "--memory-only", "--save", str(tmp_path)])
    assert result.exit_code == status, result.output
    assert ("bf16, state, 50 M" in result.output.splitlines()[-3]) is bool(excess)
    assert len(list(tmp_path.glob("*-plan-memory.*"))) == 2


@pytest.mark.slow
def test_a_run_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="KeyError: 'fp64'"):
        memory_check.measure(tmp_path, Case("fp64", 1))
