"""Durable runs that are measured: names for them, and an end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nvme_offload import OffloadOptimizer
from nvme_offload.offload.durable.inventory import find_runs, remove_run

_NAME = "benchmark-"  # the names of the measured runs begin with it


def settle(optimizer: OffloadOptimizer) -> None:
    """Wait until the latest step is done, and lasts."""
    optimizer.synchronize()
    if optimizer.is_durable:
        optimizer.durable.commits.settle()


def unused_name() -> str:
    """Return a name of a run, which `runs_removed` knows."""
    return f"{_NAME}{time.time_ns()}"


@contextmanager
def runs_removed(path: Path) -> Iterator[None]:
    """Delete afterwards the runs that were measured."""
    try:
        yield
    finally:
        for each in find_runs([path]):
            if each.name.startswith(_NAME):
                remove_run(each)
