"""The page of a benchmark, from its document."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nvme_offload.offload.units import GB, format_bytes
from nvme_offload.perf.measure.machine import describe
from nvme_offload.perf.report.page import Line, bar_chart, line_chart, page, section, sentences, table

HEAD = ("rw", "GB/s", "min", "max", "IOPS", "depth", "request ms", "transfer ms p50", "p99", "p99.9", "max", "CPU s/GB")
PERCENTILES = {"p50": "p50_ns", "p99": "p99_ns", "p99.9": "p99_9_ns"}
"""Names of percentiles of a transfer's latency, and the key of a point that has them."""


def bench_page(document: Mapping[str, Any]) -> str:
    """The page of a document of `offload bench`."""
    config, engine = document["config"], document["engine"]
    settings = config["settings"]
    title = f"offload bench: {config['target']}, engine {engine['name']}"
    about = [
        f"size {format_bytes(settings['size'])}, bs {format_bytes(settings['bs'])}, iodepth {settings['iodepth']}, "
        f"numjobs {settings['numjobs']}, direct I/O {'on' if engine['direct'] else 'off'}",
        "data verified" if document["verified"] else "not verified: no byte moves",
    ]
    rates = {rw: result["summary"]["bw_bytes"]["median"] / GB for rw, result in document["results"].items()}
    sections = [
        section(
            "In short", sentences(about), table(HEAD, rows_of(document)), bar_chart("Bandwidth, median", rates, "GB/s")
        ),
        *(
            section(f"{rw}, second by second", sentences(result["found"]["words"]), *_pictures(rw, result))
            for rw, result in document["results"].items()
            if "series" in result
        ),
    ]
    return page(title, sections, describe(document["environment"]), without_passes(document))


def rows_of(document: Mapping[str, Any]) -> list[list[str]]:
    """A row below `HEAD` for each direction."""
    return [[rw, *_cells(result["summary"])] for rw, result in document["results"].items()]


def without_passes(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without what each pass was like."""
    kept = ("summary", "series", "found")
    results = {rw: {key: result[key] for key in kept if key in result} for rw, result in document["results"].items()}
    return {**document, "results": results}


def _cells(figures: Mapping[str, Any]) -> list[str]:
    bw, clat = figures["bw_bytes"], figures["transfer_clat_ns"]
    return [
        *(f"{bw[name] / GB:.2f}" for name in ("median", "min", "max")),
        f"{figures['iops']:.0f}",
        f"{figures['achieved_depth']:.1f}/{figures['requested_depth']}",
        f"{figures['request_clat_ns'] / 1e6:.2f}",
        *(f"{clat[percent] / 1e6:.1f}" if percent in clat else "-" for percent in ("50", "99", "99.9", "100")),
        f"{figures['cpu_seconds_per_gb']:.3f}",
    ]


def _pictures(rw: str, result: Mapping[str, Any]) -> Iterator[str]:
    series, cliff = result["series"], result["found"]["cliff"]
    when, marks = [point["at"] for point in series], {cliff["at"]: "cliff"} if cliff else {}
    rates = [point["bw_bytes"] / GB for point in series]
    yield line_chart(f"{rw}: bandwidth", when, [Line("bandwidth", rates)], "GB/s", marks=marks)
    latencies = [Line(name, [point[key] / 1e6 for point in series]) for name, key in PERCENTILES.items()]
    yield line_chart(f"{rw}: latency of a transfer", when, latencies, "ms", marks=marks)
    warmth = [math.nan if point["temperature"] is None else point["temperature"] for point in series]
    if any(map(math.isfinite, warmth)):
        yield line_chart(f"{rw}: temperature of the warmest drive", when, [Line("temperature", warmth)], "°C")
