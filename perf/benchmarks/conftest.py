"""Options and fixtures of the benchmark suites (``bench_*.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvme_offload.offload.units import format_bytes, parse_bytes
from nvme_offload.perf.measure.environment import environment
from nvme_offload.perf.measure.results import RESULTS, page, save

HEAD = ("benchmark", "GB/s", "median ms", "min ms", "max ms", "rounds")
DEFAULT_SIZE = "256MiB"
ROUNDS = 5

_path = pytest.StashKey[Path]()
_records = pytest.StashKey[list[dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much is moved, where, and where the results go."""
    group = parser.getgroup("nvme-offload")
    group.addoption("--bench-size", default=DEFAULT_SIZE, help="bytes of one round")
    group.addoption("--bench-path", default=None, help="folder on the drive (default: pytest's temporary one)")
    group.addoption("--save-results", nargs="?", const=str(RESULTS), help="folder for JSON and Markdown")


@pytest.fixture(scope="session")
def bench_size(request: pytest.FixtureRequest) -> int:
    """Bytes of one round."""
    return parse_bytes(request.config.getoption("--bench-size"))


@pytest.fixture(scope="session")
def bench_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the drive."""
    given = request.config.getoption("--bench-path")
    path = Path(given) if given else tmp_path_factory.mktemp("bench")
    request.config.stash[_path] = path
    return path


@pytest.fixture
def measure(benchmark: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """``measure(action, size_bytes)``: a few rounds of something that moves or handles `size_bytes`."""

    def run(action: Any, size_bytes: int) -> Any:
        benchmark.extra_info["size_bytes"] = size_bytes
        return benchmark.pedantic(action, rounds=ROUNDS, warmup_rounds=1)

    yield run
    if benchmark.stats is None:  # --benchmark-disable: it only ran
        return
    stats = benchmark.stats.stats
    request.config.stash.setdefault(_records, []).append(
        {"name": request.node.name, "seconds": sorted(stats.data), **benchmark.extra_info}
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save what was measured, where that was asked for."""
    folder = session.config.getoption("--save-results")
    records = session.config.stash.get(_records, [])
    if not folder or not records:
        return
    place = session.config.stash.get(_path, Path())
    document: dict[str, Any] = {"environment": environment([place]), "benchmarks": records}
    size = format_bytes(parse_bytes(session.config.getoption("--bench-size")))
    text = page(f"pytest-benchmark suites, rounds of {size}", document["environment"], HEAD, list(map(_row, records)))
    save(Path(folder), "suites", document, text)


def _row(record: dict[str, Any]) -> list[str]:
    seconds = record["seconds"]
    middle = seconds[len(seconds) // 2]
    times = [f"{1e3 * value:.2f}" for value in (middle, seconds[0], seconds[-1])]
    return [record["name"], f"{record['size_bytes'] / middle / 1e9:.2f}", *times, str(len(seconds))]
