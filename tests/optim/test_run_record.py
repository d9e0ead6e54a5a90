"""What a run notes of itself: small, whole, seldom, and never in the way of training."""

import itertools
import json
import logging
import os

import pytest
import torch

from nvme_offload import OffloadAdamW
from nvme_offload.optim.telemetry import run_record
from nvme_offload.optim.telemetry.run_record import LOG_SHARE, RunRecord, log_of_rank, read_records


def make(tmp_path, **more):
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300).bfloat16()
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    section = {"zero_optimization": zero, "aio": {"direct": "optional"}, **more}
    return model, OffloadAdamW(model.parameters(), offload=section)


def step(model, optimizer):
    model(torch.ones(4, 300, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(run_record, "SECONDS", 0.0)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(run_record.time, "monotonic", lambda: now[0])
    return now


def finite(scalars):
    return {name: value if value == value else None for name, value in scalars.items()}


def test_the_record_is_the_stats_and_goes_with_the_run(tmp_path, always):
    model, optimizer = make(tmp_path, run_log=str(tmp_path / "run.jsonl"))
    directory = optimizer.store.run_directory
    for _ in range(3):
        step(model, optimizer)
        (record,) = read_records(directory / "record.json")
        assert record["scalars"] == finite(optimizer.stats().scalars()) | {
            name: record["scalars"][name]  # writes go on behind the step
            for name in ("bytes_read", "bytes_written", "achieved_depth", "drive_busy_seconds")
        }
        assert sorted(os.listdir(directory)) == ["lock", "record.json", "swap"]
        assert os.path.getsize(directory / "record.json") < 4096
    assert record["tiers"]["optimizer state"]["nvme"] == optimizer.tier_plan.bytes_on("nvme", "optimizer state") > 0
    assert (record["pid"], record["rank"], record["world_size"], record["ended"]) == (os.getpid(), 0, 1, False)
    assert record["since"]["steps"] == 1
    optimizer.synchronize()
    last = optimizer.stats().scalars()
    optimizer.close()
    assert os.listdir(tmp_path) == ["run.jsonl"]
    *_, ended = read_records(tmp_path / "run.jsonl")
    assert ended["ended"]
    assert ended["scalars"] == finite(last)
    optimizer.close()
    assert read_records(tmp_path / "run.jsonl")[-1] == ended


def test_it_is_written_at_most_once_a_second(tmp_path, clock):
    record, said = RunRecord(tmp_path, None), []
    say = lambda: said.append(1) or {"scalars": {"steps": len(said), "drive_busy_seconds": 0.0}}  # noqa: E731
    for _ in range(40):
        clock[0] += 0.125
        record.note(say)
    assert len(said) == 5
    assert read_records(tmp_path / "record.json")[0]["scalars"]["steps"] == len(said)


def test_a_log_grows_slower_the_longer_a_run_is(tmp_path, clock):
    log = tmp_path / "run.jsonl"
    record = RunRecord(None, log)
    for _ in range(3000):
        clock[0] += 10.0
        record.note(lambda: {"scalars": {"steps": clock[0], "drive_busy_seconds": 0.0}})
    times = [entry["scalars"]["steps"] - 1000.0 for entry in read_records(log)]
    assert times[:3] == [10.0, 20.0, 30.0]
    assert len([when for when in times if when <= 10_000]) == 1000
    assert all(10.0 <= late - early <= LOG_SHARE * late + 10.0 for early, late in itertools.pairwise(times))
    assert len(times) < 2000


def test_what_cannot_be_noted_stops_nothing(tmp_path, always, caplog):
    """A log on a full disk, a run directory that somebody made read-only or took away."""
    model, optimizer = make(tmp_path, run_log="/dev/full")
    with optimizer, caplog.at_level(logging.WARNING):
        step(model, optimizer)
        (optimizer.store.run_directory / "record.json.new").mkdir()
        for _ in range(3):
            step(model, optimizer)
        (optimizer.store.run_directory / "record.json.new").rmdir()
        assert optimizer.num_steps == 4
    said = [entry.getMessage() for entry in caplog.records]
    assert len([line for line in said if line.startswith("/dev/full: No space left")]) == 1
    assert len([line for line in said if "record.json: Is a directory" in line]) == 1


def test_each_rank_has_a_log_of_its_own(tmp_path):
    assert log_of_rank(tmp_path / "run.jsonl", 0) == tmp_path / "run.jsonl"
    assert log_of_rank(tmp_path / "run.jsonl", 3) == tmp_path / "run.rank3.jsonl"


def test_of_a_log_the_latest_run_is_read_and_a_line_that_was_cut_off_is_not(tmp_path):
    log = tmp_path / "run.jsonl"
    lines = [
        {"format": 1, "host": "a", "pid": pid, "started": pid, "scalars": {"steps": steps}}
        for pid, steps in ((1, 1), (1, 2), (2, 1), (2, 2))
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"format": 1, "ho', encoding="utf-8")
    assert [(found["pid"], found["scalars"]["steps"]) for found in read_records(log)] == [(2, 1), (2, 2)]


def test_a_file_that_is_none_is_named(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("hello\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"notes\.txt, line 1: not what a run notes"):
        read_records(file)
    file.write_text('{"format": 2}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="has format 2, this version reads 1"):
        read_records(file)


def test_a_forked_child_writes_nothing(tmp_path, always):
    model, optimizer = make(tmp_path, run_log=str(tmp_path / "run.jsonl"))
    step(model, optimizer)
    before = (tmp_path / "run.jsonl").read_bytes()
    if (child := os.fork()) == 0:
        optimizer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "run.jsonl").read_bytes() == before
    optimizer.close()
