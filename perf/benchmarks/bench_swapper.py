"""pytest-benchmark suite: tensors through TensorSwapper, and whole steps of OffloadAdamW."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from nvme_offload.perf.benchmarks.bench_engine import settings
from nvme_offload.perf.measure.settings import Rw
from nvme_offload.perf.measure.tensor_workloads import StepTarget, SwapperTarget


@pytest.mark.parametrize("rw", get_args(Rw))
def test_swapper(measure: Callable[..., Any], bench_path: Path, bench_size: int, rw: Rw) -> None:
    with SwapperTarget(settings(bench_path, bench_size, "auto")) as target:
        target.prepare()
        measure(partial(target.run, rw, bench_size), bench_size)


def test_step(measure: Callable[..., Any], bench_path: Path, bench_size: int) -> None:
    with StepTarget(settings(bench_path, bench_size, "auto")) as target:
        target.prepare()
        moved = target.run("mixed", 1).size_bytes
        measure(partial(target.run, "mixed", 1), moved)
