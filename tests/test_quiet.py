"""Two tests at once, but none beside one that is marked `quiet`."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SUITE = """
import os, time
import pytest

@pytest.mark.parametrize("number", range(8))
def test_any(number):
    took_its_time("any")

@pytest.mark.quiet
@pytest.mark.parametrize("number", range(8))
def test_alone(number):
    took_its_time("alone")

def took_its_time(kind):
    began = time.monotonic_ns()
    time.sleep(0.05)
    with open("seen", "a") as seen:
        seen.write(f"{began} {time.monotonic_ns()} {kind} {os.environ['PYTEST_XDIST_WORKER']}\\n")
"""


def test_no_other_test_runs_beside_a_quiet_one(tmp_path):
    for name in ("__init__.py", "conftest.py"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-c", HERE.parent / "pyproject.toml", "--rootdir", tmp_path]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [*command, "-n", "2", "--dist", "worksteal", "."], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "16 passed" in done.stdout, done.stdout + done.stderr
    seen = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert {worker for *_, worker in seen} == {"gw0", "gw1"}
    spans = sorted((int(began), int(ended), kind) for began, ended, kind, _ in seen)
    for (_, ended, kind), (began, _, its_kind) in itertools.combinations(spans, 2):
        assert began >= ended or kind == its_kind == "any"
