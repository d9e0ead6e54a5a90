"""Options and fixtures of the benchmark suite (``bench_*.py``)."""

from typing import Any

import pytest

from nvme_offload.offload.units import parse_bytes
from nvme_offload.perf.measure.machine import environment

ROUNDS = 5


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that says how much is handled."""
    parser.getgroup("nvme-offload").addoption("--bench-size", default="256MiB", help="bytes of one round")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Have what ``--benchmark-json`` writes say what other results say of the machine."""
    machine_info.update(environment([]))


@pytest.fixture(scope="session")
def bench_size(request: pytest.FixtureRequest) -> int:
    """Bytes of one round."""
    return parse_bytes(request.config.getoption("--bench-size"))


@pytest.fixture
def measure(benchmark: Any) -> Any:
    """``measure(action, size_bytes)``: a few rounds of something that handles `size_bytes`."""

    def run(action: Any, size_bytes: int) -> Any:
        benchmark.extra_info["size_bytes"] = size_bytes
        return benchmark.pedantic(action, rounds=ROUNDS, warmup_rounds=1)

    return run
