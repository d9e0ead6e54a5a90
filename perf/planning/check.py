"""Predictions of `offload plan` against measured iterations, ten configurations.

python -m nvme_offload.perf.planning.check --path FOLDER [--save perf/results]

Each configuration measures, in the same minute, before and after its steps, what the drive reaches (as `offload bench`
does), and how fast the same model computes and updates with everything in memory.

Then runs in every precision, each in a process of its own: their peak of resident memory beside the plan's. The exit
status is 1 where one of them takes more than the plan, 10 % and 64 MiB.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from nvme_offload import OffloadEngine, initialize
from nvme_offload.offload.config.section import AioConfig, OffloadConfig
from nvme_offload.offload.units import GiB, MiB
from nvme_offload.perf.measure.environment import environment
from nvme_offload.perf.measure.models import layered_model
from nvme_offload.perf.measure.progress import Progress
from nvme_offload.perf.measure.results import page, save
from nvme_offload.perf.measure.settings import Rw, Settings
from nvme_offload.perf.measure.workloads import RawTarget, Region
from nvme_offload.perf.planning import memory_check
from nvme_offload.perf.planning.machine import Drives, Machine
from nvme_offload.perf.planning.prediction import Job, Prediction, predict
from nvme_offload.perf.planning.shape import ModelShape

WARM_UP_STEPS, ROUNDS, MEASURED_STEPS = 2, 2, 2
REGION_BYTES = 512 * MiB
PASS_BYTES = 768 * MiB
WANTED_BYTES, WANTED_TIME = 0.02, 0.20


@dataclass(frozen=True)
class Configuration:
    """A configuration that is run: how deep and wide the model is, and what is on NVMe."""

    name: str
    layers: int
    width: int
    params: int = 0
    """Staging buffers of the parameter tier; 0: parameters are in memory."""
    grads: int = 0
    """Staging buffers of the gradient tier; 0: gradients are in memory."""
    accumulation: int = 1
    tokens: int = 1
    """Tokens of one micro-batch: with one, the drive takes most of a step; with several, computing does."""
    buffers: int = 4
    """Staging buffers of the optimizer's state."""
    host_budget: str | None = None

    def section(self, path: Path, *, in_memory: bool = False) -> dict[str, Any]:
        """The configuration section, or the one with everything in memory."""
        drive = {"device": "nvme", "nvme_path": str(path)}
        state = {**drive, "buffer_count": self.buffers, "staging_budget": "160MiB"}
        zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"} if in_memory else state}
        section = {
            "zero_optimization": zero,
            "bf16": {"enabled": True},
            "gradient_accumulation_steps": self.accumulation,
        }
        if self.params and not in_memory:
            zero["offload_param"] = {**drive, "buffer_count": self.params}
        if self.grads and not in_memory:
            section["offload_gradients"] = {**drive, "buffer_count": self.grads}
        if self.host_budget and not in_memory:
            section["host_budget"] = self.host_budget
        return section


CONFIGURATIONS = (
    Configuration("state", 12, 768),
    Configuration("state, 8 tokens", 12, 768, tokens=8),
    Configuration("state, 2 buffers", 12, 768, buffers=2),
    Configuration("state, 8 buffers", 12, 768, buffers=8),
    Configuration("half of the state in memory", 12, 768, host_budget="430MiB"),
    Configuration("state and parameters", 12, 768, params=4),
    Configuration("state and parameters, 8 buffers", 12, 768, params=8),
    Configuration("state and gradients", 12, 768, grads=4),
    Configuration("everything", 12, 768, params=4, grads=4),
    Configuration("everything, 2 micro-batches of 4", 12, 768, params=4, grads=4, accumulation=2, tokens=4),
)


@dataclass(frozen=True)
class Rates:
    """What the machine reached in one minute."""

    read: float
    write: float
    mixed: float
    flops: float
    update_rate: float

    @classmethod
    def median_of(cls, several: list[Rates]) -> Rates:
        """The median of several measurements, rate by rate."""
        return cls(**{name: median(getattr(rates, name) for rates in several) for name in asdict(several[0])})


@dataclass(frozen=True)
class Outcome:
    """One configuration: predicted and measured."""

    configuration: Configuration
    rates: Rates
    predicted_bytes: float
    measured_bytes: float
    predicted_seconds: float
    measured_seconds: tuple[float, ...]
    limit: str

    @property
    def bytes_ratio(self) -> float:
        """Ratio of the bytes predicted to those measured."""
        return self.predicted_bytes / self.measured_bytes

    @property
    def time_ratio(self) -> float:
        """Ratio of the seconds predicted to the median of those measured."""
        return self.predicted_seconds / median(self.measured_seconds)

    def to_dict(self) -> dict[str, Any]:
        """The outcome in plain types, for JSON."""
        return {**asdict(self), "bytes_ratio": self.bytes_ratio, "time_ratio": self.time_ratio}

    def cells(self) -> list[str]:
        """The outcome as a row of the table."""
        sizes = (f"{size / 1e9:.3f}" for size in (self.predicted_bytes, self.measured_bytes))
        seconds = (f"{time:.2f}" for time in (self.predicted_seconds, median(self.measured_seconds)))
        return [self.configuration.name, *sizes, f"{self.bytes_ratio:.3f}", *seconds, f"{self.time_ratio:.2f}"]


HEAD = ("configuration", "GB predicted", "measured", "ratio", "s predicted", "measured", "ratio")


def run(path: Path, configuration: Configuration) -> Outcome:
    """Measure rates, steps, and rates again; predict from the rates."""
    rates, seconds = [_rates(path, configuration)], []
    moved: list[int] = []
    with _engine(configuration, configuration.section(path)) as engine:
        _iterations(engine, configuration, WARM_UP_STEPS)
        for _ in range(ROUNDS):
            before = _bytes(engine)
            seconds += _iterations(engine, configuration, 1 + MEASURED_STEPS)[1:]
            moved.append(_bytes(engine) - before)
            rates.append(_rates(path, configuration))
    prediction = _predict(configuration, path, Rates.median_of(rates))
    assert prediction.time is not None
    total = prediction.total_traffic
    return Outcome(
        configuration,
        Rates.median_of(rates),
        total.read + total.written,
        sum(moved) / (ROUNDS * (1 + MEASURED_STEPS)),
        prediction.time.seconds,
        tuple(seconds),
        prediction.time.limit,
    )


def _engine(configuration: Configuration, section: dict[str, Any]) -> OffloadEngine:
    torch.manual_seed(0)
    return initialize(layered_model(configuration.layers, configuration.width), section)


def _iterations(engine: OffloadEngine, configuration: Configuration, count: int) -> list[float]:
    """Train for `count` iterations and give the seconds of each; nothing else waits for what runs behind a step.

    Before the first one nothing runs: it is shorter than those after it.
    """
    seconds = []
    batch = torch.randn(configuration.tokens, configuration.width)
    for _ in range(count):
        start = time.monotonic()
        for _ in range(engine.gradient_accumulation_steps):
            engine.backward(engine(batch).float().square().mean())
            engine.step()
        seconds.append(time.monotonic() - start)
    engine.optimizer.synchronize()
    return seconds


def _bytes(engine: OffloadEngine) -> int:
    engine.optimizer.synchronize()
    stats = engine.optimizer.stats()
    state = stats.bytes_read + stats.bytes_written
    params = stats.param_bytes_read + stats.param_bytes_written
    return state + params + stats.grad_bytes_read + stats.grad_bytes_written


def _rates(path: Path, configuration: Configuration) -> Rates:
    """Measure the drive through the engine alone, and the same model with everything in memory."""
    aio = AioConfig()
    settings = Settings(
        paths=(path,),
        size=REGION_BYTES,
        bs=aio.block_size,
        iodepth=aio.queue_depth,
        numjobs=aio.rings,
        ioengine=aio.engine,
        direct=aio.direct,
    )
    directions: tuple[Rw, ...] = ("read", "write", "mixed")
    with Region(settings.paths, settings.size, settings.direct) as region, RawTarget(settings, region) as raw:
        raw.run("write", REGION_BYTES)
        rates = {rw: raw.run(rw, PASS_BYTES).bw_bytes for rw in directions}
    with _engine(configuration, configuration.section(path, in_memory=True)) as engine:
        _iterations(engine, configuration, 1)
        before = engine.optimizer.stats().step_seconds
        seconds = _iterations(engine, configuration, 2)
        updating = (engine.optimizer.stats().step_seconds - before) / 2
        numel = sum(param.numel() for param in engine.module.parameters())
    operations = 6.0 * numel * configuration.tokens * configuration.accumulation
    return Rates(**rates, flops=operations / (sum(seconds) / 2 - updating), update_rate=numel / updating)


def _predict(configuration: Configuration, path: Path, rates: Rates) -> Prediction:
    with torch.device("meta"):
        model = layered_model(configuration.layers, configuration.width)
    job = Job(
        shape=ModelShape.of_layers(model, configuration.name, configuration.width),
        config=OffloadConfig.from_dict(configuration.section(path)),
        tokens=configuration.tokens,
        checkpointing=False,
        baseline_bytes=0,
    )
    machine = Machine(
        ranks=1,
        ranks_per_node=1,
        host_memory=64 * GiB,
        device_memory=None,
        drives=Drives.of_rates(rates.read, rates.write, rates.mixed),
        capacity=None,
        flops=rates.flops,
        update_rate=rates.update_rate,
    )
    return predict(job, machine)


def main(
    path: Annotated[Path, typer.Option(exists=True, file_okay=False, writable=True, help="Folder on the drive.")],
    save_to: Annotated[Path | None, typer.Option("--save", help="Folder for the results.")] = None,
    memory_only: Annotated[bool, typer.Option("--memory-only", help="Resident memory alone.")] = False,
) -> None:
    """Run all configurations, print the tables, and save them."""
    console = Console()
    progress = Progress(Console(stderr=True))
    facts = environment([path])
    if not memory_only:
        outcomes = _run_all(path, progress)
        notes = [
            f"bytes within {WANTED_BYTES:.0%}: {sum(abs(o.bytes_ratio - 1) <= WANTED_BYTES for o in outcomes)} of 10",
            f"time within {WANTED_TIME:.0%}: {sum(abs(o.time_ratio - 1) <= WANTED_TIME for o in outcomes)} of 10",
        ]
        _show("plan-check", HEAD, outcomes, notes, facts, save_to, console)
    memory = [memory_check.measure(path, case, progress) for case in memory_check.CASES]
    excessive = [outcome.case.name for outcome in memory if not outcome.within_plan]
    notes = [f"more than {memory_check.BOUND}: {', '.join(excessive) or 'none'}"]
    _show("plan-memory", memory_check.HEAD, memory, notes, facts, save_to, console)
    if excessive:
        raise typer.Exit(1)


def _run_all(path: Path, progress: Progress) -> list[Outcome]:
    outcomes = []
    for configuration in CONFIGURATIONS:
        outcomes.append(run(path, configuration))
        progress.say("  ".join(outcomes[-1].cells()))
    if dist.is_initialized():
        dist.destroy_process_group()
    return outcomes


def _show(
    name: str,
    head: Sequence[str],
    outcomes: Sequence[Outcome | memory_check.Outcome],
    notes: Sequence[str],
    facts: dict[str, Any],
    save_to: Path | None,
    console: Console,
) -> None:
    """Print a table, and save it with what it is made of."""
    table = Table(*head, box=None)
    for outcome in outcomes:
        table.add_row(*outcome.cells())
    console.print(table)
    for note in notes:
        console.print(note)
    if save_to:
        document = json.loads(json.dumps({"environment": facts, "results": [o.to_dict() for o in outcomes]}))
        title = f"offload plan: {'resident memory ' if name == 'plan-memory' else ''}predicted and measured"
        for file in save(save_to, name, document, page(title, facts, head, [o.cells() for o in outcomes], notes)):
            console.print(f"saved {file.name}")


if __name__ == "__main__":
    typer.run(main)
