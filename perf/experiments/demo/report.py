"""The table, and the comparison of both runs."""

import statistics
from collections.abc import Iterable

from rich.table import Table

from nvme_offload.optim.telemetry.stats import Span
from nvme_offload.perf.experiments.demo.training import RunResult

MIB = 2**20
UNKNOWN = "unknown"
Interval = tuple[float, float]


def differences(nvme: RunResult, memory: RunResult) -> list[str]:
    """Names of all that differs between the runs; empty where they are bit-identical."""
    names = [name for name in nvme.digests | memory.digests if nvme.digests.get(name) != memory.digests.get(name)]
    for i, (a, b) in enumerate(zip(nvme.samples, memory.samples, strict=False)):
        names += [f"training loss of step {i + 1}"] * (a.loss != b.loss)
        names += [f"gradient norm of step {i + 1}"] * (a.total_norm != b.total_norm)
    names += ["number of steps"] * (len(nvme.samples) != len(memory.samples))
    return names + ["digests, which are missing"] * (not nvme.digests)


def all_spans(result: RunResult) -> list[Span]:
    """The spans of all steps, each once, by time: what runs on behind a step is in the samples of two."""
    return sorted({span for sample in result.samples for span in sample.spans}, key=lambda span: span.start_ns)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The times in which at least one of the intervals runs, disjoint and in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """Length of all intervals together."""
    return sum(end - start for start, end in intervals)


def io_seconds(spans: Iterable[Span]) -> float:
    """Time in which a read or a write was under way."""
    return total(merge((start, end) for kind, _, start, end in spans if kind in ("read", "write"))) / 1e9


def make_table(nvme: RunResult, memory: RunResult) -> Table:
    """The table with both runs side by side."""
    table = Table(title="The same training twice", title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("state on NVMe", justify="right")
    table.add_column("state in memory", justify="right")
    left, right = _cells(nvme), _cells(memory)
    for name, value in left.items():
        table.add_row(name, value, right[name])
    return table


def _cells(result: RunResult) -> dict[str, str]:
    """One column of the table, top to bottom."""
    measured, last = result.measured, result.samples[-10:]
    seconds = io_seconds(span for sample in measured for span in sample.spans)
    moved = sum(sample.bytes_moved for sample in measured)
    shares = [sample.share_of_ideal for sample in measured if sample.share_of_ideal is not None]
    return {
        f"training loss, last {len(last)} steps": f"{statistics.mean(s.loss for s in last):.4f}",
        "time per step, median": _median([s.seconds for s in measured]),
        "  forward and backward": _median([s.forward_backward_seconds for s in measured]),
        "  optimizer.step()": _median([s.optimizer_seconds for s in measured]),
        "  share of the ideal": f"{statistics.median(shares):.0%}" if shares else UNKNOWN,
        f"training time, {len(result.samples)} steps": f"{result.train_seconds:.1f} s",
        "peak resident memory": _mib(result.peak_resident_bytes),
        "  added by the optimizer": _mib(result.optimizer_resident_bytes),
        "optimizer state": _mib(result.stats["state_bytes"]),
        "staging buffers": _mib(result.stats["staging_bytes"]),
        "bytes per parameter and step": "by kernel / by us",
        "  read": _per_parameter(result, 0),
        "  written": _per_parameter(result, 1),
        "rate while reading or writing": f"{moved / seconds / 1e9:.2f} GB/s" if seconds else "nothing moved",
        "engine": str(result.stats["engine"]),
    }


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} s"


def _mib(size: int | None) -> str:
    return UNKNOWN if size is None else f"{size / MIB:,.0f} MiB"


def _per_parameter(result: RunResult, which: int) -> str:
    """Bytes per parameter and step, by the kernel's count and by the optimizer's."""
    elements = result.num_parameters * len(result.measured)
    counts = (result.process_bytes, result.counted_bytes)
    return " / ".join(UNKNOWN if count is None else f"{count[which] / elements:.2f}" for count in counts)
