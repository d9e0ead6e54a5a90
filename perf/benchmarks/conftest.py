"""Options and fixtures of the benchmark suite (``bench_*.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvme_offload.offload.units import format_bytes, parse_bytes
from nvme_offload.perf.measure.machine import environment
from nvme_offload.perf.measure.results import RESULTS, page, save

HEAD = ("benchmark", "GB/s", "median ms", "min ms", "max ms", "rounds")
ROUNDS = 5

_records = pytest.StashKey[list[dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Return how much is handled, and where the results go."""
    group = parser.getgroup("nvme-offload")
    group.addoption("--bench-size", default="256MiB", help="bytes of one round")
    group.addoption("--save-results", nargs="?", const=str(RESULTS), help="folder for JSON and Markdown")


@pytest.fixture(scope="session")
def bench_size(request: pytest.FixtureRequest) -> int:
    """Bytes of one round."""
    return parse_bytes(request.config.getoption("--bench-size"))


@pytest.fixture
def measure(benchmark: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """``measure(action, size_bytes)``: a few rounds of something that handles `size_bytes`."""

    def run(action: Any, size_bytes: int) -> Any:
        benchmark.extra_info["size_bytes"] = size_bytes
        return benchmark.pedantic(action, rounds=ROUNDS, warmup_rounds=1)

    yield run
    if benchmark.stats is not None:  # --benchmark-disable: it only ran
        seconds = sorted(benchmark.stats.stats.data)
        record = {"name": request.node.name, "seconds": seconds, **benchmark.extra_info}
        request.config.stash.setdefault(_records, []).append(record)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save what was measured, where that was asked for."""
    folder = session.config.getoption("--save-results")
    records = session.config.stash.get(_records, [])
    if folder and records:
        document: dict[str, Any] = {"environment": environment([]), "benchmarks": records}
        title = f"Kernels, rounds of {format_bytes(parse_bytes(session.config.getoption('--bench-size')))}"
        save(Path(folder), "suites", document, page(title, document["environment"], HEAD, list(map(_row, records))))


def _row(record: dict[str, Any]) -> list[str]:
    seconds = record["seconds"]
    middle = seconds[len(seconds) // 2]
    times = [f"{1e3 * value:.2f}" for value in (middle, seconds[0], seconds[-1])]
    return [record["name"], f"{record['size_bytes'] / middle / 1e9:.2f}", *times, str(len(seconds))]
