"""Durable steps are measured beside steps that end with their process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from nvme_offload import OffloadAdamW, OffloadOptimizer
from nvme_offload.offload.durable.inventory import find_runs, remove_run
from nvme_offload.perf.measure.command_line import Folder, SaveTo
from nvme_offload.perf.measure.experiment import Row, run_experiment
from nvme_offload.perf.measure.machine import moved_since, storage_bytes
from nvme_offload.perf.measure.sections import section
from nvme_offload.perf.measure.training import bf16_params

NAME = "benchmark-"  # the names of the measured runs begin with it
_WARM_STEPS, _TENSORS = 2, 8


def durable(
    path: Folder,
    millions: Annotated[int, typer.Option(min=1, help="Parameters, in millions, in bf16.")] = 100,
    steps: Annotated[int, typer.Option(min=1, help="Whole periods, or the figures are of a part of one.")] = 6,
    rewrite_every: Annotated[int, typer.Option(min=1, help="Steps from one rewriting of a subgroup to the next.")] = 1,
    save_to: SaveTo = None,
) -> None:
    """Count the bytes that durable steps and steps in place move."""

    def measured(name: str, period: int) -> Row:
        """Give bytes per parameter and step, as the kernel counts them, after the first steps."""
        with optimizer_of(path, millions, period) as optimizer:
            _seconds(optimizer, max(_WARM_STEPS, rewrite_every))  # until all take turns
            before, waited = storage_bytes(), optimizer.stats().commit_wait_seconds
            seconds = _seconds(optimizer, steps)
            moved, stats = moved_since(before), optimizer.stats()
        if moved is None:
            raise RuntimeError("the kernel does not count here what the block layer moves: see proc(5), /proc/pid/io")
        elements, waited = steps * (millions * 1_000_000 // _TENSORS) * _TENSORS, stats.commit_wait_seconds - waited
        read, written = (size / elements for size in moved)
        shown = {"": name, "B read": f"{read:.2f}", "B written": f"{written:.2f}", "seconds": f"{seconds:.3f}"}
        shown |= {"waited for commits": f"{waited:.3f}", "commits": f"{stats.commits}"}
        return Row(shown, {"read": read, "written": written, "step_seconds": seconds, "commit_wait_seconds": waited})

    both = (measured(name, period) for name, period in (("in place", 0), ("durable", rewrite_every)))
    with runs_removed(path):
        title = "Bytes per parameter and step of durable steps"
        run_experiment("durable-bytes", title, both, path=path, save_to=save_to)


def optimizer_of(path: Path, millions: int, period: int) -> OffloadAdamW:
    """Make an optimizer of bf16 parameters that have gradients, with clipping; a `period` of 0: it is not durable."""
    lasts = {"durable": unused_name(), "rewrite_every": period} if period else {}
    state = {"buffer_count": 4, "staging_budget": "320MiB", **lasts}
    its = section(path, state=state, sub_group_size=4_194_304, gradient_clipping=1.0)
    return OffloadAdamW(bf16_params(_TENSORS, millions * 1_000_000 // _TENSORS), lr=1e-3, offload=its)


def settle(optimizer: OffloadOptimizer) -> None:
    """Wait until the latest step is done, and lasts."""
    optimizer.synchronize()
    if optimizer.is_durable:
        optimizer.durable.commits.settle()


def _seconds(optimizer: OffloadAdamW, steps: int) -> float:
    """Mean seconds of a few iterations, the last of which is brought to an end."""
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    settle(optimizer)
    return (time.perf_counter() - start) / steps


def unused_name() -> str:
    """Return a name of a run, which `runs_removed` knows."""
    return f"{NAME}{time.time_ns()}"


@contextmanager
def runs_removed(path: Path) -> Iterator[None]:
    """Delete afterwards the runs that were measured."""
    try:
        yield
    finally:
        for each in find_runs([path]):
            if each.name.startswith(NAME):
                remove_run(each)
