"""Figures for monitors: one flat dict of numbers with documented names that stay, and the same wherever they are."""

import math
import re
from pathlib import Path

import pytest
import torch

from nvme_offload import OffloadAdamW
from nvme_offload.optim.telemetry.metrics import prometheus_text
from nvme_offload.optim.telemetry.stats import GAUGES, scalar_texts

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"
ROW = re.compile(r"^\| `(\w+)` \| (counter|gauge) \| (.+) \|$", re.MULTILINE)
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")


@pytest.fixture
def optimizer(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300).bfloat16()
    section = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    with OffloadAdamW(model.parameters(), offload=section | {"aio": {"direct": "optional"}}) as optimizer:
        optimizer.model = model
        yield optimizer


def train(optimizer, steps=1):
    for _ in range(steps):
        optimizer.model(torch.ones(4, 300, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


def test_names_are_those_of_the_page_and_never_change(optimizer):
    """What a dashboard is built on: documented, present before the first step, and the same after it."""
    before = optimizer.stats().scalars()
    assert math.isnan(before["iteration_seconds"])
    train(optimizer, 3)
    after = optimizer.stats().scalars()
    assert list(before) == list(after)
    assert all(type(value) in (int, float) for value in after.values())
    rows = {name: (kind, text) for name, kind, text in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    texts = scalar_texts()
    wanted = {name: ("gauge" if name in GAUGES else "counter", texts[name]) for name in after}
    table = "\n".join(f"| `{name}` | {kind} | {text} |" for name, (kind, text) in wanted.items())
    assert rows == wanted, f"docs/watching.md should have:\n{table}"
    assert wanted.keys() >= GAUGES


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


def test_prometheus_text_can_be_scraped(optimizer):
    """Read back line by line: every sample has its type before it, a unique name, and the value of `scalars`."""
    train(optimizer, 2)
    stats = optimizer.stats()
    lines = stats.prometheus({"rank": 0, "run": 'a "b"\\'}).splitlines()
    types, samples = {}, {}
    for line in lines:
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            types[name] = kind
        elif not line.startswith("# HELP "):
            found = SAMPLE.match(line)
            assert found, line
            assert found["name"] in types
            assert 'rank="0",run="a \\"b\\"\\\\"' in found["labels"]
            assert found["name"] not in samples
            samples[found["name"]] = float(found["value"])
    assert samples.pop("nvme_offload_info") == 1
    assert f'engine="{stats.engine}"' in lines[-1]
    for name, value in stats.scalars().items():
        full = f"nvme_offload_{name}" if name in GAUGES else f"nvme_offload_{name}_total"
        assert types[full] == ("gauge" if name in GAUGES else "counter")
        assert same(samples.pop(full), value)
    assert not samples


def test_numbers_that_are_none_are_written_as_prometheus_reads_them():
    text = prometheus_text({"a": math.nan, "b": 2}, {"b": "Text."}, {"a"}, {}, {})
    assert text.splitlines()[:5] == [
        "# TYPE nvme_offload_a gauge",
        "nvme_offload_a NaN",
        "# HELP nvme_offload_b_total Text.",
        "# TYPE nvme_offload_b_total counter",
        "nvme_offload_b_total 2",
    ]


def test_an_event_file_of_tensorboard_has_the_stats(optimizer, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    written = []
    with SummaryWriter(tmp_path / "events") as writer:
        for step in range(3):
            train(optimizer)
            written.append(optimizer.stats().scalars("offload/"))
            for name, value in written[-1].items():
                writer.add_scalar(name, value, step)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(written[0])
    for name in written[0]:
        for step, event in enumerate(events.Scalars(name)):
            assert event.step == step
            assert same(event.value, torch.tensor(float(written[step][name])).item()), name
