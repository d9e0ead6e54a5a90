"""`offload report`: its figures are the records', its words are escaped, and it needs nothing else."""

import json
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from nvme_offload.offload.units import TB
from nvme_offload.perf import cli
from tests.perf.documents import record

SPANS = [("read", 0, 2), ("forward", 1, 3), ("compute", 4000, 5000), ("write", 4900, 6000)]  # in milliseconds


def records(count=4):
    """A run that reads 1, 2, ... GB a second and writes half of that; an iteration computes, and waits longer."""
    for n in range(1, count + 1):
        scalars = {"steps": n, "achieved_depth": 1.0, "bytes_read": n << 30, "grad_bytes_written": n * 10**12}
        scalars |= {"iteration_seconds": 1.0 + n, "iteration_compute_seconds": 1.0, "iteration_wait_seconds_drive": n}
        scalars |= {"iteration_share_of_ideal": 0.5}
        since = {"seconds": 2.0, "steps": 1, "bytes_read": 2e9 * n, "bytes_written": 1e9 * n, "drive_busy_seconds": 1.0}
        yield record(21600 * n, scalars, since=since, host="<b>elsewhere</b>")


def written(folder, *options, status=0):
    done = CliRunner().invoke(cli.app, ["report", *map(str, options)])
    assert done.exit_code == status, done.output
    return done.output if status else (folder / "report.html").read_text(encoding="utf-8")


def drawn(page, tag, kind):
    """Return what the elements of a kind have, of every chart in turn."""
    charts = [ElementTree.fromstring(each.partition("</svg>")[0] + "</svg>") for each in split(page)]
    return [element.attrib for chart in charts for element in chart.iter(tag) if element.get("class") == kind]


def split(page):
    return ["<svg" + each for each in page.split("<svg")[1:]]


@pytest.fixture
def log(tmp_path):
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in records()), encoding="utf-8")
    events = [{"ph": "M", "tid": 1, "args": {"name": "drive"}}, {"ph": "X", "cat": "stranger", "tid": 1}]
    events += [
        {"ph": "X", "cat": k, "tid": 1, "ts": 1e3 * first, "dur": 1e3 * (last - first)} for k, first, last in SPANS
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return file


def test_every_figure_is_the_records(log, tmp_path):
    page = written(tmp_path, log)
    for words in ("4</b>steps in 1 day", "50%</b>of the ideal", "4.00 GB/s</b>the most of its drive", "top: 4.00 GB/s"):
        assert words in page
    assert f"{4 * 10**12 / TB:.1f}</b>TB written in a day" in page
    assert "optimizer state, read" in page
    assert "gradients, written" in page
    assert "optimizer state, written" not in page, "nothing of it was"
    read, total = (each["points"].split() for each in drawn(page, "polyline", "a") + drawn(page, "polyline", "b")[1:])
    assert [float(point.split(",")[1]) for point in read] == [150, 100, 50, 0], "a quarter of the top more each time"
    assert [point.split(",")[0] for point in total] == ["0.0", "333.3", "666.7", "1000.0"]
    [computing] = drawn(page, "polygon", "a")
    assert [float(point.split(",")[1]) for point in computing["points"].split()] == [160] * 4 + [200] * 4


def test_the_end_of_a_trace_is_a_timeline(log, tmp_path):
    page = written(tmp_path, log)
    assert not drawn(page, "rect", "s-read"), "it ended before the last three seconds"
    [update], [write] = (drawn(page, "rect", f"s-{kind}") for kind in ("compute", "write"))
    assert float(update["x"]) == 0
    assert float(update["x"]) + float(update["width"]) == pytest.approx(500)
    assert float(write["x"]) + float(write["width"]) == pytest.approx(1000)


def test_it_needs_nothing_else_and_lets_nobody_else_write_in_it(log, tmp_path):
    (tmp_path / "a <script>trace.json").write_text("{", encoding="utf-8")
    page = written(tmp_path, tmp_path)
    assert not [word for word in ("http", "<script", "<b>elsewhere", "src=", "@import") if word in page]
    assert "no trace of ours" in page
    assert "prefers-color-scheme:dark" in page


def test_a_place_without_a_run_and_a_folder_that_takes_no_file_are_said(log, tmp_path):
    assert "holds no run" in written(tmp_path, tmp_path / "..", status=2)
    assert "name another file with --out" in written(tmp_path, log, "--out", tmp_path / "no" / "page", status=1)
