"""An optimizer says of itself: an iteration and its limit, scalars, the record of a run, traces and profiles."""

import json
import logging
import math
import os
import re
import resource
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from nvme_offload import OffloadAdamW, Span, initialize, write_trace
from nvme_offload.optim.telemetry import run_record
from nvme_offload.optim.telemetry.run_record import LOG_SHARE, RunRecord, log_of_rank, read_records
from nvme_offload.optim.telemetry.stats import DriveTotals, IterationStats, Meter
from nvme_offload.optim.telemetry.trace import TRACKS, trace_events
from nvme_offload.perf.experiments.paced_drive import STANDS_IN_FOR, paced_drive
from tests.support.own_resources import resident_bytes
from tests.support.training import params_of, set_grads
from tests.support.training import section as drive_section

SECOND = 1_000_000_000


@pytest.fixture
def clock(monkeypatch):
    """The time that is seen; add to its only entry."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: round(now[0] * SECOND))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def iteration(clock, meter, moved, *, compute=1.0, norm=0.0, kernel=0.0, drive=0.0, buffers=0.0):
    clock[0] += compute
    with meter.stepping():
        with meter.computing("norm", -1):
            clock[0] += norm
        with meter.waiting():
            clock[0] += drive
        with meter.waiting("staging buffers"):
            clock[0] += buffers
        with meter.computing("compute", 0):
            clock[0] += kernel
    meter.end_iteration(moved)
    return meter.iteration


def test_seconds_of_an_iteration_by_what_they_went_to(clock):
    meter = Meter()
    assert iteration(clock, meter, DriveTotals(100, 10.0, 0.0)) is None
    found = iteration(
        clock, meter, DriveTotals(400, 20.0, 0.25), compute=1.25, norm=0.5, kernel=0.25, drive=2.0, buffers=1.0
    )
    assert found == IterationStats(
        seconds=5.0,
        compute_seconds=1.0,  # a quarter of a second of the rest was waiting for parameters
        drive_seconds=15.0,  # 300 bytes at 400 bytes in 20 s
        norm_seconds=0.5,
        kernel_seconds=0.25,
        wait_seconds={"drive": 2.25, "staging buffers": 1.0},
    )
    again = iteration(clock, meter, DriveTotals(400, 20.0, 0.25))
    assert again.seconds == again.compute_seconds == 1.0
    assert again.drive_seconds == 0.0


@pytest.mark.parametrize(
    ("seconds", "drive_seconds", "share", "limit"),
    [
        ({}, 0.5, 1.0, "compute"),
        ({"drive": 1.05}, 2.0, 2.0 / 2.05, "drive"),
        ({"drive": 1.0}, 1.0, 0.5, "drive"),
        ({"drive": 0.2, "buffers": 0.5}, 1.0, 1.0 / 1.7, "staging buffers"),
        ({"drive": 0.2, "norm": 0.5}, 1.0, 1.0 / 1.7, "norm"),
        ({"drive": 0.2, "kernel": 0.5}, 1.0, 1.0 / 1.7, "kernel"),
    ],
    ids=str,
)
def test_what_limits_an_iteration(clock, seconds, drive_seconds, share, limit):
    meter = Meter()
    iteration(clock, meter, DriveTotals())
    found = iteration(clock, meter, DriveTotals(1000, drive_seconds, 0.0), **seconds)
    assert found.share_of_ideal == pytest.approx(share)
    assert found.limit == limit
    assert str(found) == f"{found.seconds:.3g} s, {share:.0%} of the ideal, limited by: {limit}"


def test_a_pause_is_no_part_of_an_iteration(clock):
    meter = Meter()
    iteration(clock, meter, DriveTotals())
    clock[0] += 100.0
    with meter.waiting():
        clock[0] += 1.0
    meter.begin_iteration(DriveTotals(50, 5.0, 0.0))
    found = iteration(clock, meter, DriveTotals(100, 10.0, 0.0))
    assert (found.seconds, found.drive_seconds) == (1.0, 5.0)
    assert found.wait_seconds["drive"] == 0.0


def test_a_timeline_is_of_the_latest_iteration_and_what_follows(clock):
    meter = Meter()
    for number in range(5):
        with meter.passing("forward"):
            clock[0] += 1.0
        meter.spans.append(Span("write", number, round((clock[0] - 0.5) * SECOND), round((clock[0] + 0.5) * SECOND)))
        iteration(clock, meter, DriveTotals())
    kinds = [span.kind for span in meter.timeline()]
    assert kinds.count("step") == kinds.count("forward") == 1
    assert [span.subgroup for span in meter.timeline() if span.kind == "write"] == [4]
    assert len(meter.spans) < 12
    with meter.passing("backward"):
        clock[0] += 1.0
    assert meter.timeline()[-1].kind == "backward"


@pytest.mark.parametrize(("overlap_step", "durable"), [("off", False), ("forward", True)])
def test_a_timeline_of_an_engine_covers_whole_iterations(overlap_step, durable, tmp_path, alone):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "durable": durable}
    section = {
        "zero_optimization": {"stage": 3, "sub_group_size": 2**16, "offload_optimizer": nvme},
        "bf16": {"enabled": True},
        "aio": {"engine": STANDS_IN_FOR},
        "overlap_step": overlap_step,
        "gradient_accumulation_steps": 2,
    }
    with paced_drive() as pace, initialize(model, section) as engine:
        pace.rate = 15e6  # nearly 8 MB are moved in an iteration: far longer than all else takes

        def train():
            for _ in range(engine.gradient_accumulation_steps):
                engine.backward(engine(torch.randn(4, 256)).float().square().mean())
                engine.step()

        for _ in range(3):
            train()
        found = engine.optimizer.stats().iteration
        engine.optimizer.synchronize()
        spans = engine.timeline()
    assert found.limit == "drive"
    kinds = [span.kind for span in spans]
    assert (kinds.count("forward"), kinds.count("backward"), kinds.count("step")) == (2, 2, 1)
    assert {"norm", "wait", "read", "compute", "write"} <= set(kinds)
    assert ("commit" in kinds) == durable
    passes = [span for span in spans if span.kind in ("forward", "backward", "step")]
    assert [span.kind for span in passes] == ["forward", "backward", "forward", "backward", "step"]
    for earlier, later in pairwise(passes):
        assert earlier.end_ns <= later.start_ns


@pytest.mark.parametrize("steps", [60, pytest.param(8_640, marks=pytest.mark.slow)])
def test_a_day_of_steps_is_counted_as_a_day(drive, monkeypatch, steps):
    """Clocks go on by a part of a day with each step; the drive is a model of one that takes no time."""
    gone, day = 0.0, 86_400
    for name in ("time", "monotonic", "perf_counter"):
        now, ns = getattr(time, name), getattr(time, f"{name}_ns")
        monkeypatch.setattr(time, name, lambda now=now: now() + gone)
        monkeypatch.setattr(time, f"{name}_ns", lambda ns=ns: ns() + int(gone * 1e9))
    params = params_of([(999,), (65_537,)], torch.bfloat16)
    with paced_drive(), OffloadAdamW(params, offload=drive_section(drive, engine=STANDS_IN_FOR)) as optimizer:
        for step in range(1 + steps):
            if step == 10:
                resident = resident_bytes()
            set_grads(params, step)
            optimizer.step()
            gone += day / steps
        optimizer.synchronize()
        stats = optimizer.stats()
        assert stats.iteration.seconds == pytest.approx(day / steps, rel=0.1)
        assert stats.written_per_day == pytest.approx(steps * stats.state_bytes, rel=0.1)
        assert resident_bytes() - resident < 16 << 20


def test_the_first_step_has_no_iteration_yet(tmp_path):
    param = torch.nn.Parameter(torch.ones(1000).bfloat16())
    with OffloadAdamW([param], offload={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}) as optimizer:
        for expected in (False, True):
            param.grad = torch.ones_like(param)
            optimizer.step()
            assert (optimizer.stats().iteration is not None) is expected
        found = optimizer.stats().iteration
    assert found.drive_seconds == 0.0
    assert found.wait_seconds.get("drive", 0.0) == 0.0


def test_bytes_that_failed_are_no_longer_counted(clock):
    """What was asked for and failed may be fewer bytes in the end than there were before: no rate follows from that."""
    meter = Meter()
    iteration(clock, meter, DriveTotals(bytes_moved=10, busy_seconds=1.0, wait_seconds=0.0))
    assert iteration(clock, meter, DriveTotals(bytes_moved=0, busy_seconds=1.0, wait_seconds=0.0)).drive_seconds == 0.0


PAGE = Path(__file__).parents[2] / "docs" / "watching.md"
ROW = re.compile(r"^\| `(\w+)` \| (counter|gauge) \| .+ \|$", re.MULTILINE)


def make(tmp_path, **more):
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300).bfloat16()
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    made = OffloadAdamW(model.parameters(), offload={"zero_optimization": zero, "aio": {"direct": "optional"}, **more})
    made.model = model
    return made


def train(optimizer, steps=1):
    for _ in range(steps):
        optimizer.model(torch.ones(4, 300, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def optimizer(tmp_path):
    with make(tmp_path) as optimizer:
        yield optimizer


def test_names_are_those_of_the_page_and_never_change(optimizer):
    """What a dashboard is built on: documented, present before the first step, and the same after it."""
    before = optimizer.stats().scalars()
    assert math.isnan(before["iteration_seconds"])
    train(optimizer, 3)
    after = optimizer.stats().scalars()
    assert list(before) == list(after)
    assert all(type(value) in (int, float) for value in after.values())
    kinds = [(name, "counter" if optimizer.stats().is_counter(name) else "gauge") for name in after]
    assert ROW.findall(PAGE.read_text(encoding="utf-8")) == kinds


def test_scalars_are_the_stats(optimizer):
    train(optimizer, 3)
    optimizer.synchronize()
    stats = optimizer.stats()
    flat = stats.scalars("offload/")
    assert flat["offload/steps"] == 3
    assert flat["offload/bytes_written"] == stats.bytes_written > 0
    assert flat["offload/drive_busy_seconds"] == stats.drive_busy_seconds > 0
    assert flat["offload/iteration_share_of_ideal"] == stats.iteration.share_of_ideal
    assert flat["offload/iteration_wait_seconds_drive"] == stats.iteration.wait_seconds.get("drive", 0.0)
    missing = {name for name, value in vars(stats).items() if isinstance(value, int | float)} - stats.scalars().keys()
    assert not missing


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(run_record, "SECONDS", 0.0)


def finite(scalars):
    return {name: value if value == value else None for name, value in scalars.items()}


def test_the_record_is_the_stats_and_goes_with_the_run(tmp_path, always):
    kept = {"device": "nvme", "nvme_path": str(tmp_path / "kept")}
    optimizer = make(tmp_path, run_log=str(tmp_path / "run.jsonl"), activations=kept)
    directory = optimizer.store.run_directory
    for _ in range(3):
        train(optimizer)
        (record,) = read_records(directory / "record.json")
        assert record["scalars"] == finite(optimizer.stats().scalars()) | {
            name: record["scalars"][name]  # writes go on behind the step
            for name in ("bytes_read", "bytes_written", "achieved_depth", "drive_busy_seconds")
        }
        assert sorted(os.listdir(directory)) == ["lock", "record.json", "swap"]
        assert os.path.getsize(directory / "record.json") < 4096
    assert record["tiers"]["optimizer state"]["nvme"] == optimizer.tier_plan.bytes_on("nvme", "optimizer state") > 0
    planned = {"read": optimizer.tier_plan.bytes_read, "written": optimizer.tier_plan.bytes_written}
    assert record["planned"] == {"optimizer state": planned}
    assert (record["pid"], record["rank"], record["world_size"], record["ended"]) == (os.getpid(), 0, 1, False)
    assert record["since"]["steps"] == 1
    assert record["paths"] == [str(tmp_path), kept["nvme_path"]]
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
    say = lambda: {"scalars": {"steps": clock[0], "drive_busy_seconds": 0.0}}  # noqa: E731
    for _ in range(3000):
        clock[0] += 10.0
        record.note(say)
    whole = log.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 99, -1))
    record.close(say)
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    assert log.read_bytes() == whole, "no half of a record is left, which the next run would append to"
    times = [entry["scalars"]["steps"] - 1000.0 for entry in read_records(log)]
    assert times[:3] == [10.0, 20.0, 30.0]
    assert len([when for when in times if when <= 10_000]) == 1000
    assert all(10.0 <= late - early <= LOG_SHARE * late + 10.0 for early, late in pairwise(times))
    assert len(times) < 2000


def test_what_cannot_be_noted_stops_nothing(tmp_path, always, caplog):
    """A log on a full disk, a run directory that somebody made read-only or took away."""
    optimizer = make(tmp_path, run_log="/dev/full")
    with optimizer, caplog.at_level(logging.WARNING):
        train(optimizer)
        (optimizer.store.run_directory / "record.json.new").mkdir()
        for _ in range(3):
            train(optimizer)
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
    optimizer = make(tmp_path, run_log=str(tmp_path / "run.jsonl"))
    train(optimizer)
    before = (tmp_path / "run.jsonl").read_bytes()
    if (child := os.fork()) == 0:
        optimizer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "run.jsonl").read_bytes() == before
    optimizer.close()


SPANS = [
    Span("forward", -1, 1_000, 5_000),
    Span("wait", -1, 2_000, 3_000),
    Span("backward", -1, 5_000, 9_000),
    Span("step", -1, 9_000, 12_000),
    Span("norm", -1, 9_000, 10_000),
    Span("compute", 3, 10_500, 11_000),
    Span("read", 4, 8_000, 11_500),
    Span("read", 5, 8_500, 12_500),
    Span("read", 6, 11_500, 13_000),
    Span("write", 3, 11_000, 14_000),
]


def assert_nested(events):
    """Within a track, any two spans are apart or one is inside the other."""
    for number in {event["tid"] for event in events}:
        ends = []
        for event in sorted(
            (e for e in events if e["tid"] == number and e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])
        ):
            while ends and ends[-1] <= event["ts"] + 1e-9:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-6, event
            ends.append(event["ts"] + event["dur"])


def test_the_trace_event_format(tmp_path):
    write_trace(SPANS, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names.values()) == ["training", "updates", "drive reads", "drive reads", "drive writes"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(SPANS)
    for event in spans:
        assert {"name", "cat", "pid", "tid", "ts", "dur"} <= event.keys()
        assert event["cat"] in TRACKS[names[event["tid"]]]
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    [update] = [event for event in spans if event["cat"] == "compute"]
    assert (update["name"], update["ts"], update["dur"]) == ("update 3", pytest.approx(9.5), pytest.approx(0.5))
    assert_nested(events)


def test_nothing_is_an_empty_trace():
    assert trace_events([]) == []


def test_many_overlapping_transfers_get_no_more_tracks_than_run_at_a_time():
    events = trace_events([Span("read", number, number * 10, number * 10 + 35) for number in range(50)])
    assert len({event["tid"] for event in events}) == 4
    assert_nested(events)
    by_track = [event["ts"] for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert all(later - earlier >= 0.035 - 1e-9 for earlier, later in pairwise(by_track))


def test_the_parts_of_a_step_are_named(alone, tmp_path):
    section = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
        "bf16": {"enabled": True},
        "overlap_step": "off",  # a profile is of the threads that it was begun in
    }
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with initialize(model, section) as engine, profile(activities=[ProfilerActivity.CPU]) as profiled:
        engine.backward(engine(torch.ones(2, 64)).float().sum())
        engine.step()
    names = {event.key for event in profiled.key_averages() if event.key.startswith("nvme_offload: ")}
    assert names == {f"nvme_offload: {part}" for part in ("gather", "norm", "read", "update", "write")}
