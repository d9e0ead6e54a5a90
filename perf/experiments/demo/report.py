"""The table, the comparison of both runs, and the file with everything."""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

from nvme_offload.optim.stats import Span
from nvme_offload.perf.experiments.demo.records import RunResult
from nvme_offload.perf.experiments.demo.spans import io_seconds
from nvme_offload.perf.measure.environment import environment

MIB = 2**20
UNKNOWN = "unknown"


def differences(nvme: RunResult, memory: RunResult) -> list[str]:
    """Names of all that differs between the runs; empty where they are bit-identical."""
    names = [name for name in nvme.digests | memory.digests if nvme.digests.get(name) != memory.digests.get(name)]
    for i, (a, b) in enumerate(zip(nvme.samples, memory.samples, strict=False)):
        names += [f"training loss of step {i + 1}"] * (a.loss != b.loss)
        names += [f"gradient norm of step {i + 1}"] * (a.total_norm != b.total_norm)
    names += ["number of steps"] * (len(nvme.samples) != len(memory.samples))
    names += ["digests, which are missing"] * (not nvme.digests)
    return names


def _mib(size: int | None) -> str:
    return UNKNOWN if size is None else f"{size / MIB:,.0f} MiB"


def _per_parameter(result: RunResult, which: int) -> str:
    """Bytes per parameter and step, by the kernel's count and by the optimizer's."""
    elements = result.num_parameters * len(result.measured)
    counts = (result.process_bytes, result.counted_bytes)
    return " / ".join(UNKNOWN if count is None else f"{count[which] / elements:.2f}" for count in counts)


def _rate(result: RunResult) -> str:
    seconds = io_seconds(span for sample in result.measured for span in sample.spans)
    moved = sum(sample.bytes_moved for sample in result.measured)
    return f"{moved / seconds / 1e9:.2f} GB/s" if seconds else "nothing moved"


def all_spans(result: RunResult) -> list[Span]:
    """The spans of all steps, each once, by time: what runs on behind a step is in the samples of two."""
    spans = {Span._make(span) for sample in result.samples for span in sample.spans}
    return sorted(spans, key=lambda span: span.start_ns)


def _share(result: RunResult) -> str:
    shares = [sample.share_of_ideal for sample in result.measured if sample.share_of_ideal is not None]
    return f"{statistics.median(shares):.0%}" if shares else UNKNOWN


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} s"


def _cells(result: RunResult) -> dict[str, str]:
    """One column of the table, top to bottom."""
    measured = result.measured
    last = result.samples[-10:]
    cells = {
        f"training loss, last {len(last)} steps": f"{statistics.mean(s.loss for s in last):.4f}",
        "time per step, median": _median([s.seconds for s in measured]),
        "  forward and backward": _median([s.forward_backward_seconds for s in measured]),
        "  optimizer.step()": _median([s.optimizer_seconds for s in measured]),
        "  share of the ideal": _share(result),
        f"training time, {len(result.samples)} steps": f"{result.train_seconds:.1f} s",
        "peak resident memory": _mib(result.peak_resident_bytes),
        "  added by the optimizer": _mib(result.optimizer_resident_bytes),
        "optimizer state": _mib(result.stats["state_bytes"]),
        "staging buffers": _mib(result.stats["staging_bytes"]),
        "bytes per parameter and step": "by kernel / by us",
        "  read": _per_parameter(result, 0),
        "  written": _per_parameter(result, 1),
        "rate while reading or writing": _rate(result),
        "engine": str(result.stats["engine"]),
    }
    if result.cuda_peak_bytes is not None:
        cells["peak GPU memory"] = _mib(result.cuda_peak_bytes)
    return cells


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


def write_results(
    path: Path, options: dict[str, Any], swap_parent: Path, runs: dict[str, RunResult], differing: list[str]
) -> None:
    """Saves samples, configuration and surroundings, so that a result can be judged and repeated."""
    everything = {
        "options": options,
        "environment": environment([swap_parent]),
        "bit_identical": not differing,
        "differences": differing,
        "runs": {name: dataclasses.asdict(result) for name, result in runs.items()},
    }
    path.write_text(json.dumps(everything, indent=1, default=str) + "\n")
