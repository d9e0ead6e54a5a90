"""A load without a pause: the cliff of a cache, heat, and the latencies of each second."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from nvme_offload.perf import cli
from nvme_offload.perf.bench import series as series_module
from nvme_offload.perf.bench.series import Point, cliff_of, found_in, measure_series
from nvme_offload.perf.measure.workloads import Sample
from nvme_offload.perf.plan.machine import Drives

MB, GB = 10**6, 10**9


class CachedDrive:
    """Fast until its cache is full, then slow; one transfer in 400 takes long. It has its own clock."""

    def __init__(self, cache_bytes, fast, slow):
        self.now = 100.0
        self._left, self._fast, self._slow, self._transfers = cache_bytes, fast, slow, 0

    def run(self, rw, size_bytes):
        quick = min(size_bytes, self._left)
        self._left -= quick
        seconds = quick / self._fast + (size_bytes - quick) / self._slow
        self.now += seconds
        each = [round(seconds * 1e6)] * (size_bytes // MB)
        for number in range(len(each)):
            self._transfers += 1
            if self._transfers % 400 == 0:
                each[number] = 10**9
        return Sample(
            rw=rw,
            size_bytes=size_bytes,
            seconds=seconds,
            cpu_seconds=0.0,
            requests=len(each),
            achieved_depth=1.0,
            request_clat_ns=1.0,
            clat_ns=tuple(each),
        )


def test_the_cliff_of_a_cache_is_found_where_it_is(monkeypatch):
    drive = CachedDrive(60 * GB, 3 * GB, 1 * GB)
    monkeypatch.setattr(series_module, "time", SimpleNamespace(monotonic=lambda: drive.now))
    warmth = iter(range(40, 1000))
    points, samples = measure_series(drive, "write", 60.0, 10 * MB, lambda: float(next(warmth)))
    assert 60.0 <= points[-1].at < 62.0
    assert sum(sample.size_bytes for sample in samples) == sum(point.size_bytes for point in points)
    assert all(1.0 <= point.seconds < 2.0 for point in points)
    assert points[0].p50_ns == points[0].p99_ns < points[0].p99_9_ns == 10**9
    cliff = cliff_of(points)
    assert cliff.at == pytest.approx(20.0, abs=1.5)
    assert cliff.bytes_before == pytest.approx(60 * GB, rel=0.05)
    assert (cliff.before, cliff.after) == (pytest.approx(3 * GB), pytest.approx(1 * GB))
    found = found_in(points, "write")
    text = " ".join(found["words"])
    assert "from 3.00 GB/s to 1.00 GB/s after" in text
    assert "40 °C at first" in text
    assert found["cliff"]["at"] == cliff.at


def point(at, rate, temperature=None):
    return Point(
        at=at,
        seconds=1.0,
        size_bytes=rate,
        bw_bytes=float(rate),
        temperature=temperature,
        p50_ns=1,
        p99_ns=1,
        p99_9_ns=at,
    )


@pytest.mark.parametrize(
    "rates",
    [
        [5 * GB] * 30,
        [5 * GB] * 20 + [4.5 * GB] * 10,  # 10 % less: the weather
        [5 * GB] * 20 + [GB // 10] + [5 * GB] * 9,  # stood still once
        [5 * GB] * 27 + [GB // 10] + [5 * GB] * 2,
        [1 * GB] * 15 + [5 * GB] * 15,  # faster
        [5 * GB] * 4 + [1 * GB] * 4,  # too short to tell
        [5 * GB],
    ],
)
def test_what_is_no_cliff_is_called_none(rates):
    points = [point(float(at), rate) for at, rate in enumerate(rates)]
    assert cliff_of(points) is None
    assert "no cliff" in found_in(points, "read")["words"][0]
    assert any("tells none" in words for words in found_in(points, "read")["words"])


def test_it_is_measured_shown_saved_and_planned_with(tmp_path):
    """On a real file: one document for programs, a page for people, and rates for `offload plan`."""
    drive, saved = tmp_path / "drive", tmp_path / "saved"
    drive.mkdir()
    arguments = ["bench", "--path", str(drive), "--size", "8MiB", "--bs", "64KiB", "--iodepth", "4", "--duration", "1"]
    done = CliRunner().invoke(cli.app, [*arguments, "--direct", "optional", "--json", "--save", str(saved)])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    for rw in ("read", "write", "mixed"):
        result = document["results"][rw]
        assert result["series"][-1]["at"] >= 1.0
        assert result["summary"]["total_bytes"] == sum(point["size_bytes"] for point in result["series"])
        assert 0 < result["summary"]["transfer_clat_ns"]["99"] <= result["summary"]["transfer_clat_ns"]["99.9"]
    assert not list(drive.iterdir())
    (page,) = saved.glob("*.md")
    assert "mixed: " in page.read_text(encoding="utf-8")
    (file,) = saved.glob("*.json")
    kept = json.loads(file.read_text())
    assert kept["results"]["read"]["series"] == document["results"]["read"]["series"]
    if document["engine"]["direct"]:
        assert Drives.of_bench(file).read > 0


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--duration", "0.5"], "choose 1 to"),
        (["--duration", "nan"], "choose 1 to"),
        (["--duration", "5", "--target", "step"], "use --target raw"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, more, why):
    done = CliRunner().invoke(cli.app, ["bench", "--path", str(tmp_path), *more], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert why in done.output
