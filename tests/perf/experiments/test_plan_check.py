"""Resident memory of whole runs beside the plan's."""

import pytest

from nvme_offload.offload.units import MiB
from nvme_offload.perf.experiments import plan_check
from nvme_offload.perf.experiments.plan_check import CASES, MemoryCase, growth_row
from tests.perf.experiments.running import said


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_takes_the_memory_of_its_plan(case, tmp_path):
    found = plan_check.memory_of(tmp_path, case).to_dict()
    assert found["within_plan"], found
    assert 1.1 * found["measured"] + 64 * MiB >= found["predicted"], "the plan asks for no more than a run takes"


@pytest.mark.parametrize(("excess", "status"), [(0, 0), (1, 1)])
def test_the_check_fails_beyond_a_tenth_and_64_mib(excess, status, tmp_path, monkeypatch):
    allowed = 1100 * MiB + 64 * MiB
    monkeypatch.setattr(plan_check, "CASES", (MemoryCase(6, "bf16"),))
    monkeypatch.setattr(plan_check, "memory_of", lambda _, case: growth_row(case, 1000 * MiB, allowed + excess))
    output = said("plan-check", "--path", tmp_path, "--save", tmp_path, status=status)
    assert f"64 MiB: {'bf16, state, 50 M' if excess else 'none'}" in output
    assert len(list(tmp_path.glob("*-plan-memory.*"))) == 2
