"""The benchmark suites run, at their smallest size, and save what they found."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def pytest_in(tmp_path, *arguments):
    command = [sys.executable, "-m", "pytest", "perf/benchmarks", "-q", "-p", "no:cacheprovider"]
    options = ["--bench-size=4MiB", f"--bench-path={tmp_path}", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_all_suites_run(tmp_path):
    said = pytest_in(tmp_path, "--benchmark-disable")
    assert "failed" not in said
    assert not list(tmp_path.iterdir())


def test_results_are_saved(tmp_path):
    drive, results = tmp_path / "drive", tmp_path / "results"
    drive.mkdir()
    pytest_in(drive, "--benchmark-only", "-k", "test_swapper or test_grad_norm", f"--save-results={results}")
    (saved,) = results.glob("*.json")
    document = json.loads(saved.read_text())
    assert document["environment"]["storage"]
    names = [record["name"] for record in document["benchmarks"]]
    assert "test_swapper[mixed]" in names
    assert all(len(record["seconds"]) == 5 for record in document["benchmarks"])
    (table,) = results.glob("*.md")
    assert "| test_swapper[mixed] |" in table.read_text()
    assert "commit" in table.read_text()
