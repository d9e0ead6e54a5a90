"""What an optimizer says of an iteration: how near it came to the ideal, what limited it, and its timeline."""

from itertools import pairwise

import pytest
import torch

from nvme_offload import OffloadAdamW, Span, initialize
from nvme_offload.optim.telemetry import stats
from nvme_offload.optim.telemetry.stats import DriveTotals, IterationStats, Meter
from nvme_offload.perf.measure.paced import STANDS_IN_FOR, paced_drive

SECOND = 1_000_000_000


@pytest.fixture
def clock(monkeypatch):
    """The time that a meter sees, in seconds; add to its only entry."""
    now = [100.0]
    monkeypatch.setattr(stats.time, "monotonic_ns", lambda: round(now[0] * SECOND))
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


@pytest.mark.parametrize(("overlap_step", "durable"), [("off", False), ("forward", False), ("forward", True)])
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
