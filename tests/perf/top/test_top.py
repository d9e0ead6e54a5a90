"""`offload top`: of a run that goes on, of one that ended, of one that was killed."""

import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from nvme_offload import OffloadAdamW
from nvme_offload.optim.telemetry import run_record
from nvme_offload.perf import cli
from nvme_offload.perf.top import command
from nvme_offload.perf.top.command import RunOnShow, runs_of
from tests.perf.documents import record
from tests.support.forked import FORKED

PATIENCE = 60
TRAIN = """
import sys, time, torch
from pathlib import Path
from nvme_offload import OffloadAdamW
from nvme_offload.optim.telemetry import run_record
run_record.SECONDS = 0.05
torch.set_num_threads(1)
folder = Path(place)
model = torch.nn.Linear(300, 300).bfloat16()
section = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}},
           "aio": {"direct": "optional"}, "run_log": str(folder / "run.jsonl")}
with OffloadAdamW(model.parameters(), offload=section) as optimizer:
    while not (folder / "stop").exists():
        model(torch.ones(4, 300, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
"""


def offload(*arguments):
    return CliRunner().invoke(cli.app, ["top", *map(str, arguments)], env={"COLUMNS": "160"})


def until(question):
    deadline = time.monotonic() + PATIENCE
    while not (answer := question()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)
    return answer


@pytest.fixture
def training(tmp_path):
    run = FORKED.Process(target=exec, args=(TRAIN, {"place": str(tmp_path)}))
    run.start()
    try:
        until(lambda: list(tmp_path.glob("*/record.json")) or not run.is_alive())
        assert run.is_alive()
        yield run
    finally:
        run.kill()
        run.join()


@contextmanager
def watched(folder):
    """`offload top` on a terminal of 80 columns: its process, what it has shown so far, what types to it."""
    terminal, screen = pty.openpty()
    command = [sys.executable, "-m", "nvme_offload", "top", str(folder), "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stdin=screen, stdout=screen, env=environment) as watcher:
        os.close(screen)
        seen = b""

        def look():
            nonlocal seen
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    seen += os.read(terminal, 1 << 16)
                except OSError:  # the other end was closed
                    time.sleep(0.01)
            return seen

        yield watcher, look, lambda key: os.write(terminal, key)
    os.close(terminal)


def test_it_waits_for_the_first_step_until_q_is_typed(tmp_path):
    (tmp_path / "nvme-offload-1-0").mkdir()
    with watched(tmp_path) as (watcher, look, write):
        until(lambda: b"has not ended a step yet" in look())
        assert watcher.poll() is None
        write(b"q")
        assert watcher.wait(PATIENCE) == 0


def test_it_fits_80_columns(log):
    lines = CliRunner().invoke(cli.app, ["top", str(log)], env={"COLUMNS": "80"}).output.splitlines()
    assert max(map(len, lines)) == 80
    assert "…" not in "".join(lines)
    assert len(lines) <= 24


def test_a_terminal_of_24_lines_shows_a_run_with_every_kind_on_a_drive(capsys):
    kinds = {key: {"read": 1, "written": 1} for key in ("optimizer state", "parameters", "gradients")}
    Console(width=80).print(command.view(RunOnShow(RECORD | {"planned": kinds}), 0.0, lines=24))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert "steps in" in lines[-1]


def test_a_wide_terminal_has_longer_bars_and_what_was_before(log, capsys):
    rates = (0.5e9, 1e9, 2e9, 0.0)
    spans = [SINCE | {"bytes_read": rate, "bytes_written": rate, "steps": 1 + (rate > 1e9)} for rate in rates]
    records = [RECORD | {"time": RECORD["time"] + at, "since": span} for at, span in enumerate(spans)]
    log.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    [run], _ = runs_of(log)
    for width, bar in ((80, 20), (130, 70)):
        Console(width=width).print(command.view(run, 0.0, width=width))
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) == width
        assert any("█" * (bar // 2) + "░" * (bar // 2) + " " in line for line in lines), "half of the ideal"
        words = shown(" ".join(lines))
        assert "rate, the most 2.00 GB/s ▃▅█▁" in words
        assert "seconds of a step, the most 2.00 s ██▅█" in words
        assert "written by this run 22 GiB 0.557 TB a day" in words


def test_what_was_seen_of_a_run_stays_when_its_file_goes(log):
    [run], _ = runs_of(log)
    later = RunOnShow(RECORD | {"time": RECORD["time"] + 1}, history=(RECORD | {"time": RECORD["time"] + 1},))
    assert [each["time"] for each in run.then(later).history] == [RECORD["time"], RECORD["time"] + 1]
    assert run.then(None).history == run.history
    assert not run.then(None).is_there


def test_a_durable_run_is_shown_with_its_committed_step_and_the_space_that_is_left(tmp_path):
    section = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    section["zero_optimization"]["offload_optimizer"]["durable"] = "mine"
    param = torch.nn.Parameter(torch.zeros(256))
    with pytest.MonkeyPatch.context() as patch, OffloadAdamW([param], offload=section) as optimizer:
        patch.setattr(run_record, "SECONDS", 0.0)
        for _ in range(2):
            param.grad = torch.ones(256)
            optimizer.step()
            optimizer.synchronize()
        text = shown(offload(tmp_path).output)
        assert "live, noted" in text
        assert re.search(r"committed step, free space [01] [\d.]+ .?iB", text), text
    assert "ended 2" in offload(tmp_path).output, "its directory stays, and says that nobody goes on there"


def test_a_live_run_and_after_its_end(training, tmp_path):
    """One training process: looked at while it goes on, on a terminal until it ends, and in its log afterwards."""
    done = until(lambda: (done := offload(tmp_path)) and "limited by" in done.output and done)
    assert done.exit_code == 0, done.output
    for words in ("OffloadAdamW, rank 0 of 1", f"pid {training.pid}", "live, noted", "optimizer state", "limited by"):
        assert words in done.output
    first = json.loads(offload(tmp_path, "--json").output)
    until(lambda: json.loads(offload(tmp_path, "--json").output)["scalars"]["steps"] > first["scalars"]["steps"])
    (directory,) = tmp_path.glob("nvme-offload-*")
    assert "live, noted" in offload(directory).output

    with watched(tmp_path) as (watcher, look, _):
        until(lambda: look().count(b"live, noted") >= 3)
        (tmp_path / "stop").touch()
        until(lambda: look() and watcher.poll() is not None)
        assert watcher.returncode == 0
        assert re.search(rb"ended 2|gone, last heard of 2", look()), "its record goes with its folder, seen or not"
    training.join(PATIENCE)
    assert training.exitcode == 0

    (tmp_path / "run.rank1.jsonl").write_bytes((tmp_path / "run.jsonl").read_bytes())  # as of another host
    for logs, number in ((tmp_path / "run.jsonl", 1), (tmp_path, 2)):
        ended = offload(logs)
        assert ended.exit_code == 0, ended.output
        assert ended.output.count("ended 2") == number


ITERATION = {"seconds": 2.0, "share_of_ideal": 0.5, "compute_seconds": 1.0, "kernel_seconds": 0.25}
ITERATION |= {"wait_seconds_drive": 0.75, "wait_seconds_staging_buffers": 0.0, "wait_seconds_kernel": 0.0}
ITERATION |= {"norm_seconds": None}
SCALARS = {f"iteration_{name}": value for name, value in ITERATION.items()}
SCALARS |= {"steps": 17, "achieved_depth": 12.25, "bytes_written": 5 << 30, "grad_bytes_read": 34 << 20}
SCALARS |= {"activation_bytes_written": 17 << 30}
SINCE = {"seconds": 2.0, "steps": 1, "bytes_read": 2e9, "bytes_written": 1e9, "drive_busy_seconds": 1.0}
RECORD = record(3661, SCALARS, planned={"gradients": {"read": 3 << 20, "written": 4 << 20}}, since=SINCE)


@pytest.fixture
def log(tmp_path):
    file = tmp_path / "run.jsonl"
    file.write_text(json.dumps(RECORD) + "\n", encoding="utf-8")
    return file


def shown(output):
    return " ".join(output.replace("│", " ").split())


def test_every_figure_is_the_records(log):
    text = shown(offload(log).output)
    for words in (
        "OffloadLion, rank 3 of 8, pid 1 on elsewhere",
        "17 steps in 1:01:01, on another host",
        "optimizer state 1 GiB 3 GiB",
        "a step, by kind read written tier plan: read written",
        "gradients 2 MiB 0 B 3 MiB 4 MiB",
        "activations 0 B 1 GiB read 1.00 GB/s",  # the plan does not know their size
        "read 1.00 GB/s written 0.50 GB/s rate while busy 3.00 GB/s",
        "the most in this run 4.00 GB/s",
        "depth, of 32 12.2",
        "io_uring written by this run 22 GiB",
        "iteration 2.00 s limited by drive share of the ideal 50%",
        "waiting for the drive 750.0 ms",
    ):
        assert words in text, text
    assert runs_of(log)[0][0].state == "unknown"
    assert RunOnShow(RECORD | {"ended": True}).is_over


def test_ranks_of_several_hosts_are_one_line_and_a_rank_counts_once(log, tmp_path):
    assert "ranks" not in offload(log).output
    other = RECORD | {"rank": 4, "host": "other"}
    before = other | {"time": RECORD["time"] - 1, "scalars": RECORD["scalars"] | {"steps": 5}, "since": None}
    for name, each in (("other", other), ("before", before)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(each) + "\n")
    line = "OffloadLion, ranks 3, 4 of 8 on elsewhere, other: 17 steps, reads 2.00 GB/s, writes 1.00 GB/s"
    assert offload(tmp_path).output.splitlines()[0] == line


def test_a_run_that_was_killed_is_not_called_live(tmp_path):
    """Its record stays in its run directory until the next run on the path."""
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    (tmp_path / "nvme-offload-7-0").mkdir()
    record = RECORD | {"host": socket.gethostname(), "pid": dead.pid}
    (tmp_path / "nvme-offload-7-0" / "record.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    assert "gone, last heard of 2001-09-09" in shown(offload(tmp_path).output)
    assert runs_of(tmp_path)[0][0].is_over


def test_a_place_without_a_run_is_said(tmp_path):
    done = offload(tmp_path / "nothing")
    assert done.exit_code == 2
    assert "the file of run_log in its section stays" in done.output
    assert "holds no run: name the nvme_path of a run that goes on" in offload(tmp_path).output
    (tmp_path / "nvme-offload-1-0").mkdir()
    assert "has not ended a step yet" in offload(tmp_path).output
    (tmp_path / "notes").write_text("hello\n")
    assert "notes, line 1: not what a run notes of itself" in offload(tmp_path / "notes").output
