"""The benchmarks of kernels run, at their smallest size, and save what they found."""

import json
import os
import sys

import pytest

from tests.support.forked import ROOT, output_of


@pytest.mark.slow
def test_all_of_them_run_and_their_results_are_saved(tmp_path):
    file, suite = tmp_path / "kernels.json", "perf/benchmarks/bench_kernel.py"
    options = ["-q", "-p", "no:cacheprovider", "--bench-size=4MiB", "--benchmark-only", f"--benchmark-json={file}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", suite, *options]
    output_of(*command, cwd=ROOT, env=environment)
    document = json.loads(file.read_text())
    assert all(each["stats"]["rounds"] == 5 for each in document["benchmarks"])
    assert all(each["extra_info"]["size_bytes"] > 0 for each in document["benchmarks"])
    assert document["machine_info"]["num_cpus"] > 0
