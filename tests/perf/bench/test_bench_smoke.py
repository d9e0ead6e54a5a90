"""The benchmarks of kernels run, at their smallest size, and save what they found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_all_of_them_run_and_their_results_are_saved(tmp_path):
    file, suite = tmp_path / "kernels.json", "perf/benchmarks/bench_kernel.py"
    options = ["-q", "-p", "no:cacheprovider", "--bench-size=4MiB", "--benchmark-only", f"--benchmark-json={file}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", suite, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    document = json.loads(file.read_text())
    assert all(each["stats"]["rounds"] == 5 for each in document["benchmarks"])
    assert all(each["extra_info"]["size_bytes"] > 0 for each in document["benchmarks"])
    assert document["machine_info"]["num_cpus"] > 0
