"""pytest-benchmark suite: passes over a swap file, through each engine alone."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from nvme_offload.aio_native import ENGINES, EngineUnavailable
from nvme_offload.offload.units import KiB, MiB
from nvme_offload.perf.measure.settings import Rw, Settings
from nvme_offload.perf.measure.workloads import RawTarget, Region


def settings(path: Path, size: int, engine: str) -> Settings:
    """The defaults, with smaller blocks where the size is that of a smoke test."""
    bs = MiB if size >= 64 * MiB else 64 * KiB
    return Settings(paths=(path,), size=size, bs=bs, iodepth=32, numjobs=1, ioengine=engine, direct="optional")


@pytest.fixture(scope="module")
def region(bench_path: Path, bench_size: int) -> Iterator[Region]:
    with Region([bench_path], bench_size, "optional") as opened:
        yield opened


@pytest.mark.parametrize("rw", get_args(Rw))
@pytest.mark.parametrize("engine", [*ENGINES, "null"])
def test_engine(
    measure: Callable[..., Any], region: Region, bench_path: Path, bench_size: int, engine: str, rw: Rw
) -> None:
    try:
        target = RawTarget(settings(bench_path, bench_size, engine), region)
    except EngineUnavailable as error:
        pytest.skip(str(error))
    with target:
        target.prepare()
        measure(partial(target.run, rw, bench_size), bench_size)
