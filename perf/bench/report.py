"""A report shows in words and tables what `offload bench` measured."""

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from rich.console import Console

from nvme_offload.offload.units import GB, MiB, format_bytes, format_rate
from ..measure.command_line import Settings
from ..measure.comparison import Comparison, Quad, percentile
from ..measure.machine import describe
from ..measure.results import page, shown_table
from ..measure.workloads import Sample

FIGURES = "GB/s", "min", "max", "IOPS", "depth", "request ms", "transfer ms p50", "p99", "p99.9", "longest", "CPU s/GB"
HEAD = "rw", *FIGURES
PERCENTILES = (50, 95, 99, 99.9, 100)
LEAST_PASSES = 8
LEAST_DROP = 0.2  # share; a drive became slow if it fell by it from the first quarter of so many passes to the last


def summary(samples: Sequence[Sample], settings: Settings) -> dict[str, Any]:
    """The figures of all passes in one direction. Names and units as in fio: bw_bytes, iops, clat_ns."""
    clat_ns = [latency for sample in samples for latency in sample.clat_ns]
    bytes_moved = sum(sample.size_bytes for sample in samples)
    cpu_seconds = sum(sample.cpu_seconds for sample in samples)
    return {
        "bw_bytes": {
            "median": median(sample.bw_bytes for sample in samples),
            "min": min(sample.bw_bytes for sample in samples),
            "max": max(sample.bw_bytes for sample in samples),
        },
        "iops": median(sample.iops for sample in samples),
        "transfer_clat_ns": {str(percent): percentile(clat_ns, percent) for percent in PERCENTILES} if clat_ns else {},
        "request_clat_ns": mean(sample.request_clat_ns for sample in samples),
        "achieved_depth": mean(sample.achieved_depth for sample in samples),
        "requested_depth": settings.iodepth,
        "cpu_seconds_per_gb": cpu_seconds / (bytes_moved / 1e9),
        "cpu_us_per_mib": cpu_seconds * 1e6 / (bytes_moved / MiB),
        "num_samples": len(samples),
        "total_bytes": bytes_moved,
        "total_seconds": sum(sample.seconds for sample in samples),
        "became_slow": became_slow([sample.bw_bytes for sample in samples]),
    }


_TELLING_SECONDS = 10.0


def became_slow(rates: Sequence[float]) -> dict[str, float] | None:
    """Medians of the first and the last quarter of the passes, where the last is much slower: a full cache, or heat."""
    quarter = len(rates) // 4
    if len(rates) < LEAST_PASSES:
        return None
    first, last = median(rates[:quarter]), median(rates[-quarter:])
    return {"first_bw_bytes": first, "last_bw_bytes": last} if last <= (1 - LEAST_DROP) * first else None


def describe_latest(comparison: Comparison) -> str:
    """The latest quad of a direction, and its control, in a line."""
    said = f"{comparison.name} {len(comparison.quads):3}: ours fio fio ours {_rates(comparison.quads[-1])}"
    return f"{said} | control {_rates(comparison.controls[-1])}"


def _rates(quad: Quad) -> str:
    return f"{' '.join(f'{rate / 1e9:.2f}' for rate in quad.rates)} GB/s, ratio {quad.ratio:.3f}"


def show(document: dict[str, Any], console: Console) -> None:
    """Print a document of `offload bench` for people."""
    settings, engine = document["config"]["settings"], document["engine"]
    lines = [
        *describe(document["environment"]),
        f"size {format_bytes(settings['size'])}, bs {format_bytes(settings['bs'])}, "
        f"iodepth {settings['iodepth']}, numjobs {settings['numjobs']}",
        f"engine {engine['name']} ({engine['reason']}), direct I/O {'on' if engine['direct'] else 'off'}, "
        f"data {'verified' if document['verified'] else 'not verified: no byte moves'}",
    ]
    if not engine["direct"]:
        lines.append("without direct I/O these figures are those of the page cache, not of the drive")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(shown_table(rows_of(document), console), highlight=False)
    if not document["verified"]:
        for rw, result in document["results"].items():
            cost = result["summary"]["cpu_us_per_mib"]
            console.print(f"{rw}: {cost:.2f} us of processor time per MiB block", highlight=False)
    for line in [*slow_lines(document), *comparison_lines(document)]:
        console.print(line, highlight=False, soft_wrap=True)


def rows_of(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each direction, by the heads of the columns."""
    rows = ([rw, *_cells(result["summary"])] for rw, result in document["results"].items())
    return [dict(zip(HEAD, row, strict=True)) for row in rows]


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


def slow_lines(document: dict[str, Any]) -> list[str]:
    """A line for each direction in which the drive became slow."""
    return [
        f"{rw}: from {format_rate(slow['first_bw_bytes'])} to {format_rate(slow['last_bw_bytes'])}: {_why(result)}"
        for rw, result in document["results"].items()
        if (slow := result["summary"]["became_slow"])
    ]


def _why(result: Mapping[str, Any]) -> str:
    """Say what makes a drive slow, where it was watched long enough to tell that from the work of others."""
    if (seconds := result["summary"]["total_seconds"]) < _TELLING_SECONDS:
        return f"in {seconds:.0f} s that may be others' work on the drive; measure longer, with --runtime 60"
    return "a cache is full, or the drive is hot; plan with the second"


def comparison_lines(document: dict[str, Any]) -> list[str]:
    """The answers of the comparison with fio, one line for each direction."""
    lines = []
    for rw, result in document.get("comparison", {}).items():
        if not isinstance(result, dict):
            continue
        low, high = result["interval_95"]
        lines.append(
            f"{rw} against fio: median ratio {result['ratio']:.3f}, fio against itself {result['control_ratio']:.3f}, "
            f"quotient {result['quotient']:.3f} (95 %: {low:.3f} to {high:.3f}, {len(result['quads'])} quads)"
        )
    return lines


def summarized(document: dict[str, Any]) -> dict[str, Any]:
    """A document of `offload bench` without single passes: what is kept in a file."""
    return {**document, "results": {rw: {"summary": each["summary"]} for rw, each in document["results"].items()}}


def markdown(document: dict[str, Any]) -> str:
    """A document of `offload bench` as a Markdown page."""
    title = f"offload bench: engine {document['engine']['name']}"
    notes = [*slow_lines(document), *comparison_lines(document)]
    return page(title, document["environment"], rows_of(document), notes)
