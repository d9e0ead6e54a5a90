"""`offload bench` from outside, what its engine costs, fio beside it, and the benchmarks of kernels."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from itertools import count
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from nvme_offload import ConfigError, EngineUnavailable
from nvme_offload.aio_native.engine import EngineOptions
from nvme_offload.aio_native.uring import UringEngine
from nvme_offload.offload.units import MiB
from nvme_offload.perf.bench import command as bench
from nvme_offload.perf.bench import report
from nvme_offload.perf.bench.command import Fio, FioError, bandwidth, find_fio
from nvme_offload.perf.cli import app
from nvme_offload.perf.measure.command_line import Settings
from nvme_offload.perf.measure.workloads import RawTarget
from nvme_offload.perf.plan.machine import Drives
from tests.perf.documents import write_bench
from tests.support.forked import ROOT, output_of

SMALL = ("--size", "8MiB", "--bs", "64KiB", "--iodepth", "8", "--runtime", "0", "--direct", "optional")
COMMAND = (sys.executable, "-c", "from nvme_offload.perf.cli import main; main()")


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def settings(path, **changes):
    values = {"size": 8 * MiB, "bs": 65536, "iodepth": 8, "numjobs": 1, "ioengine": "auto", "direct": "optional"}
    return Settings(paths=(path,), **values | changes)


@pytest.mark.parametrize("engine", ["auto", "aiofiles", "null"])
def test_json_document_stands_alone(tmp_path, engine):
    result = run("--path", tmp_path, *SMALL, "--ioengine", engine, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["verified"] == (engine != "null")
    assert document["engine"]["reason"]
    assert document["config"]["settings"]["bs"] == 65536
    assert {"kernel", "commit", "storage", "time", "cpu"} <= document["environment"].keys()
    assert document["environment"]["storage"][0]["file_system"]
    for rw in ("read", "write", "mixed"):
        (sample,) = document["results"][rw]["samples"]
        assert sample["size_bytes"] == 8 * MiB
        assert sample["requests"] >= 128
        assert 0 < sample["achieved_depth"] <= 8
        figures = document["results"][rw]["summary"]
        assert figures["transfer_clat_ns"]["50"] <= figures["transfer_clat_ns"]["100"]
    assert not list(tmp_path.iterdir())


def test_table_for_people_and_saved_results(tmp_path):
    results = tmp_path / "results"
    result = run("--path", tmp_path, *SMALL, "--rw", "read", "--save", results)
    assert result.exit_code == 0, result.output
    for word in ("read", "engine", "commit", *report.FIGURES):  # whole, on the 80 columns of a pipe
        assert word in result.stdout
    (text,) = results.glob("*.md")
    assert "| read |" in text.read_text()
    (file,) = results.glob("*.json")
    document = json.loads(file.read_text())
    assert document["results"]["read"].keys() == {"summary"}
    assert document["results"]["read"]["summary"]["num_samples"] == 1
    assert '"directions": ["read"]' in file.read_text(), "a list of words takes a line for each"


@pytest.mark.parametrize(("rates", "planned"), [
    ([3e9] * 20 + [1e9] * 20, 1e9), ([3e9] * 36 + [2.6e9] * 12, 2.9e9),  # less than a fifth slower: the weather
    ([1e9] * 4 + [3e9] * 4, 2e9),  # faster
    ([3e9] * 3 + [1e9] * 3, 2e9),  # too few to tell
])  # fmt: skip
def test_of_a_drive_that_became_slow_its_end_is_planned_with(tmp_path, rates, planned):
    summary = {"total_bytes": sum(rates), "total_seconds": len(rates), "became_slow": report.became_slow(rates)}
    said = "".join(report.slow_lines({"results": {"write": {"summary": summary}}}))
    assert (": from 3.00 GB/s to 1.00 GB/s: " in said) == (planned == 1e9)
    if planned == 1e9:
        document = {"results": {"write": {"summary": {**summary, "total_seconds": 1.2}}}}
        assert "in 1 s that may be others' work on the drive; measure longer" in report.slow_lines(document)[0]
    result = {"summary": summary}
    assert Drives.of_bench(write_bench(tmp_path / "bench.json", result)).write == planned


def test_plan_reads_what_was_printed_and_what_was_saved(tmp_path):
    result = run("--path", tmp_path, *SMALL, "--json", "--save", tmp_path / "results")
    assert result.exit_code == 0, result.output
    printed = tmp_path / "bench.json"
    document = json.loads(result.stdout)
    printed.write_text(json.dumps(document | {"engine": {"direct": True}}))
    (saved,) = (tmp_path / "results").glob("*.json")
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"engine": {"direct": True}}))
    assert Drives.of_bench(printed) == Drives.of_bench(saved)
    (sample,) = document["results"]["read"]["samples"]
    assert Drives.of_bench(saved).read == sample["bw_bytes"]


def test_the_result_is_printed_although_it_cannot_be_saved(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("nvme_offload.perf.bench.command.save", Mock(side_effect=full))
    result = run("--path", tmp_path, *SMALL, "--rw", "read", "--json", "--save", tmp_path)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["results"]["read"]["samples"]
    assert "No space left" in result.stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (("--bs", "1000"), "out of range"), (("--bs", "6000"), "multiple of 4 KiB"),
    (("--bs", "1G"), "is not a number of bytes"), (("--size", "1MiB"), "too small"),
    (("--size", "900TiB"), "nothing was written"), (("--iodepth", "0"), "out of range"),
    (("--numjobs", "65"), "out of range"), (("--quads", "3"), "give that, too"),
    (("--compare-fio", "--quads", "0"), "compare nothing"), (("--compare-fio", "--quads", "-1"), "out of range"),
    (("--ioengine", "libaio"), "io_uring"), (("--direct", "maybe"), "required"), (("--runtime", "-1"), "negative"),
    (("--runtime", "nan"), "no number"), (("--path", "/no/such/folder"), "is no directory"),
    (("--save", __file__), "is no directory"), (("--save", f"{__file__}/results"), "is no directory"),
    (("--compare-fio", "--ioengine", "null"), "moves no bytes"),
])  # fmt: skip
def test_bad_values_are_told_before_anything_starts(tmp_path, monkeypatch, arguments, said):
    monkeypatch.setenv("COLUMNS", "400")
    result = run("--path", tmp_path, *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert arguments[-2] in result.output
    assert not list(tmp_path.iterdir())


def test_missing_fio_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    result = run("--path", tmp_path, *SMALL, "--compare-fio")
    assert result.exit_code == 1
    assert "apt-get install fio" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [ConfigError(["aio.rings = 99: too many"]), RuntimeError("other bits came back"), MemoryError()]
)
def test_failures_are_told_in_words(tmp_path, monkeypatch, error):
    monkeypatch.setattr(bench.RawTarget, "prepare", Mock(side_effect=error))
    result = run("--path", tmp_path, *SMALL)
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 1
    assert f"offload: {str(error) or 'MemoryError'}" in result.stderr
    assert not list(tmp_path.iterdir())


def test_data_that_comes_back_wrong_is_not_timed(tmp_path, monkeypatch):
    wrong = count()
    pattern = bench.RawTarget.prepare.__globals__["_pattern"]
    monkeypatch.setattr("nvme_offload.perf.measure.workloads._pattern", lambda *part: pattern(*part) + next(wrong))
    with RawTarget(settings(tmp_path)) as target, pytest.raises(RuntimeError, match="differ"):
        target.prepare()


def test_ctrl_c_exits_130_and_leaves_nothing(tmp_path):
    command = [*COMMAND, "bench", "--path", str(tmp_path), *SMALL, "--runtime", "60"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not process.stderr.readline().startswith("read"):
        assert process.poll() is None
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "nothing is left behind" in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


@pytest.fixture
def needs_io_uring():
    try:
        UringEngine(EngineOptions(queue_depth=8, block_size=65536, rings=1, alignment=4096, max_operations=8)).close()
    except EngineUnavailable as error:
        pytest.skip(str(error))


def python_calls(path, size):
    """Functions that Python called in one pass of always as many transfers, and the requests of these."""
    calls = 0

    def note(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    one = settings(path, size=size, bs=4096, iodepth=2048, ioengine="io_uring")
    with ExitStack() as stack:
        threading.setprofile(note)
        stack.callback(threading.setprofile, None)
        target = stack.enter_context(RawTarget(one))
        sys.setprofile(note)
        try:
            requests = target.run("mixed", size // 2).requests
        finally:
            sys.setprofile(None)
    return calls, requests


@pytest.mark.usefixtures("needs_io_uring")
def test_python_calls_do_not_grow_with_the_blocks(tmp_path):
    """O(1) per transfer: 16 times as many blocks in each of the same number of transfers cost not one call more."""
    few, few_requests = python_calls(tmp_path, 1 * MiB)
    many, many_requests = python_calls(tmp_path, 16 * MiB)
    assert many_requests == 16 * few_requests
    assert many == few


def fio_report(**directions):
    idle = {"io_bytes": 0, "runtime": 0}
    return {"jobs": [{"read": idle, "write": idle, **directions}]}


def test_bandwidth_of_fios_report():
    assert bandwidth(fio_report(read={"io_bytes": 10**9, "runtime": 1000})) == pytest.approx(1e9, rel=1e-3)
    both = fio_report(read={"io_bytes": 10**9, "runtime": 900}, write={"io_bytes": 10**9, "runtime": 1000})
    assert bandwidth(both) == pytest.approx(2e9, rel=1e-3)
    with pytest.raises(FioError, match="moved nothing"):
        bandwidth(fio_report())


@pytest.fixture
def needs_fio():
    try:
        find_fio()
    except FioError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("needs_fio")
@pytest.mark.parametrize("numjobs", [1, 3])
def test_jobs_of_fio_get_whole_blocks_of_a_written_file_and_leave_nothing(tmp_path, numjobs):
    its = settings(tmp_path, iodepth=4, numjobs=numjobs, direct="disabled")
    with Fio(its) as fio:
        command = dict(option.removeprefix("--").split("=", 1) for option in fio.command("mixed", its.size)[1:])
        assert int(command["offset_increment"]) % its.bs == int(command["io_size"]) % its.bs == 0
        assert command["fixedbufs"] == "1"
        (file,) = tmp_path.glob("*/fio")
        assert file.stat().st_blocks * 512 >= its.size
        assert fio.run("mixed", its.size) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_all_benchmarks_of_kernels_run_and_their_results_are_saved(tmp_path):
    file, suite = tmp_path / "kernels.json", "perf/benchmarks/bench_kernel.py"
    options = ["-q", "-p", "no:cacheprovider", "--bench-size=4MiB", "--benchmark-only", f"--benchmark-json={file}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", suite, *options]
    output_of(*command, cwd=ROOT, env=environment)
    document = json.loads(file.read_text())
    assert all(each["stats"]["rounds"] == 5 for each in document["benchmarks"])
    assert all(each["extra_info"]["size_bytes"] > 0 for each in document["benchmarks"])
    assert document["machine_info"]["num_cpus"] > 0
