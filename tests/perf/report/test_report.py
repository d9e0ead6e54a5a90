"""`offload report`: pages that stand alone, whose pictures a browser draws from the numbers that are in them."""

import json
import math
import re

import pytest
from typer.testing import CliRunner

from nvme_offload.perf import cli
from nvme_offload.perf.report.page import LEFT, RIGHT, WIDTH, Line, bar_chart, line_chart, nice_limit
from tests.perf.documents import record
from tests.support.browser import BROWSER, MISSING, opened

PROBE = """<script>
addEventListener('error', e => document.body.dataset.errors = e.message);
addEventListener('load', () => {
  const widths = (svg, kind) => [...svg.querySelectorAll(kind)].map(e => e.getBoundingClientRect().width);
  document.body.dataset.found = JSON.stringify({
    fetched: performance.getEntriesByType('resource').length,
    data: JSON.parse(document.getElementById('data').textContent).length ?? 1,
    pictures: [...document.querySelectorAll('svg')].map(svg => ({
      title: svg.getAttribute('aria-label'), width: svg.getBoundingClientRect().width,
      lines: widths(svg, 'path.line'), bars: widths(svg, 'rect.bar')}))});
});
</script></body>"""


def report(*arguments):
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)])


def record_of(step):
    scalars = {
        "steps": step,
        "bytes_read": 2e9 * step,
        "bytes_written": 1e9 * step,
        "drive_busy_seconds": 0.5 * step,
        "achieved_depth": 10.0 + step,
        "iteration_seconds": 1.0,
        "iteration_share_of_ideal": 0.5 if step else None,
        "iteration_compute_seconds": 0.4,
        "iteration_wait_seconds_drive": 0.3,
        "iteration_wait_seconds_staging_buffers": 0.1,
        "iteration_wait_seconds_kernel": 0.0,
        "iteration_kernel_seconds": 0.15,
        "iteration_norm_seconds": 0.05,
    }
    return record(step, scalars, ended=step == 9, paths=["/mnt/</script><b>nvme"])


@pytest.fixture
def log(tmp_path):
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps(record_of(step)) + "\n" for step in range(10)), encoding="utf-8")
    return file


@pytest.fixture
def bench(tmp_path):
    series = [
        {"at": at, "bw_bytes": (5e9 if at < 30 else 1e9), "p50_ns": 1e6, "p99_ns": 5e6, "p99_9_ns": 9e6}
        | {"temperature": 40.0 + at}
        for at in range(60)
    ]
    summary = {
        "bw_bytes": {"median": 5e9, "min": 1e9, "max": 5e9},
        "iops": 5000,
        "achieved_depth": 31.0,
        "transfer_clat_ns": {"50": 1e6, "99": 5e6, "99.9": 9e6},
        "requested_depth": 32,
        "request_clat_ns": 1e6,
        "cpu_seconds_per_gb": 0.1,
    }
    found = {"cliff": {"at": 30.0}, "words": ["From 5.00 to 1.00 GB/s after 150 GB"]}
    document = {
        "config": {"target": "raw", "settings": {"size": 1 << 30, "bs": 1 << 20, "iodepth": 32, "numjobs": 1}},
        "engine": {"name": "io_uring", "direct": True},
        "verified": True,
        "environment": {
            "cpu": "a processor",
            "num_cpus": 2,
            "memory_bytes": 1 << 34,
            "kernel": "6",
            "python": "3",
            "torch": "2",
            "storage": [],
            "commit": None,
            "time": "2026-01-01T00:00:00+00:00",
        },
        "results": {"write": {"summary": summary, "series": series, "found": found}},
    }
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return file


def browsed(page, tmp_path):
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    document, errors = opened(probed.as_uri(), tmp_path / "profile")
    assert not errors
    assert "data-errors" not in document
    found = re.search(r'data-found="([^"]*)"', document)[1].replace("&quot;", '"')
    return json.loads(found.replace("&amp;", "&").replace("&lt;", "<"))


@pytest.mark.skipif(BROWSER is None, reason=MISSING)
def test_a_browser_draws_the_page_of_a_run(log, tmp_path):
    assert report(log).exit_code == 0
    found = browsed(tmp_path / "run.html", tmp_path)
    assert (found["fetched"], found["data"]) == (0, 10)
    drawn = {picture["title"]: picture for picture in found["pictures"]}
    assert {title: len(picture["lines"]) for title, picture in drawn.items() if picture["lines"]} == {
        "Moved to and from the drive": 2,
        "Share of the ideal": 1,
        "Iterations": 3,
        "Requests in flight": 1,
    }
    (bars,) = (picture["bars"] for picture in found["pictures"] if picture["bars"])
    assert bars == sorted(bars[:2], reverse=True) + bars[2:]
    assert len(bars) == 6
    whole = (WIDTH - LEFT - RIGHT) / WIDTH
    for picture in drawn.values():
        for line in picture["lines"]:
            assert line > 0.9 * whole * picture["width"] > 300, picture


@pytest.mark.skipif(BROWSER is None, reason=MISSING)
def test_a_browser_draws_the_page_of_a_benchmark(bench, tmp_path):
    assert report(bench, "-o", tmp_path / "page.html").exit_code == 0
    found = browsed(tmp_path / "page.html", tmp_path)
    assert found["fetched"] == 0
    assert {picture["title"]: len(picture["lines"]) for picture in found["pictures"]} == {
        "Bandwidth, median": 0,
        "write: bandwidth": 1,
        "write: latency of a transfer": 3,
        "write: temperature of the warmest drive": 1,
    }


def test_pages_need_nothing_from_elsewhere_and_hold_their_numbers(log, bench, tmp_path):
    for file, count in ((log, 10), (bench, None)):
        assert report(file, "-o", tmp_path / "page.html").exit_code == 0
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?(?!["']?data:)""", text)
        assert "<b>nvme" not in text
        assert ("What a step moves, mean" in text) is (file == log)
        (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
        kept = json.loads(data)
        assert len(kept) == count if count else kept["results"]["write"]["series"][59]["temperature"] == 99.0
    assert "2 GiB" not in (tmp_path / "page.html").read_text()
    assert "cliff" in (tmp_path / "page.html").read_text()


def test_other_files_are_named(tmp_path):
    (tmp_path / "other.json").write_text('{"a": 1}\n')
    done = report(tmp_path / "other.json")
    assert done.exit_code == 2
    assert "other.json, line 1: not what a run notes of itself" in done.output
    (tmp_path / "other.json").write_text("")
    assert "nothing is noted yet" in report(tmp_path / "other.json").output
    done = report(tmp_path / "nothing")
    assert done.exit_code == 2
    assert "there is no such file; name that of run_log" in done.output


def points(svg):
    return [
        [tuple(map(float, point.split())) for point in re.findall(r"[ML]([\d.]+ [\d.]+)", path)]
        for path in re.findall(r'<path class="line" d="([^"]*)"', svg)
    ]


def test_a_line_goes_through_its_values():
    svg = line_chart("t", [0.0, 1.0, 2.0], [Line("a", [0.0, 10.0, 5.0])], "s", marks={1.0: "<here>"})
    ((first, second, third),) = points(svg)
    assert (first[0], third[0]) == (LEFT, WIDTH - RIGHT)
    assert second[0] == pytest.approx((first[0] + third[0]) / 2)
    assert third[1] == pytest.approx((first[1] + second[1]) / 2)
    assert second[1] < first[1]
    assert "&lt;here&gt;" in svg


def test_gaps_stay_gaps_and_peaks_stay():
    values = [math.nan, *[1.0] * 5000, 100.0, *[1.0] * 5000]
    (line,) = points(line_chart("t", list(map(float, range(len(values)))), [Line("a", values)], "s"))
    assert len(line) <= 802
    assert min(y for _, y in line) == points(line_chart("t", [0.0], [Line("a", [100.0])], "s"))[0][0][1]
    svg = line_chart("t", [0.0, 1.0, 2.0], [Line("a", [1.0, math.nan, 1.0])], "s")
    assert svg.count("M") - svg.count("L") >= 2


def test_axes_end_at_round_numbers():
    assert [nice_limit(value) for value in (0, 0.03, 1, 1.01, 4.9, 7, 99)] == [1, 0.05, 1, 2, 5, 10, 100]


def test_bars_are_as_long_as_their_values():
    widths = [
        float(width) for width in re.findall(r'class="bar"[^>]*width="([\d.]+)"', bar_chart("t", {"a": 4, "b": 1}, ""))
    ]
    assert widths[0] == 4 * widths[1] > 0
