"""Predictions of `offload plan` against measured iterations, and against the resident memory of whole runs.

Each configuration measures, in the same minute, before and after its steps, what the drive reaches (as `offload bench`
does), and how fast the same model computes and updates with everything in memory. Then runs in every precision, each in
a process of its own, because memory that an earlier one had freed would hide what it takes: their peak of resident
memory, from before birth and sharding, beside the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, get_args

import torch
import typer

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.units import GiB, MiB
from nvme_offload.perf.measure.child import Child, Send
from nvme_offload.perf.measure.command_line import Folder, Rw, SaveTo, Settings
from nvme_offload.perf.measure.experiment import Column, Figures, run_experiment
from nvme_offload.perf.measure.machine import peak_resident_bytes, reset_peak_resident_bytes, settled_resident_bytes
from nvme_offload.perf.measure.sections import MODES, section
from nvme_offload.perf.measure.training import Training, layered_model
from nvme_offload.perf.measure.workloads import RawTarget
from nvme_offload.perf.plan.machine import Drives, Machine
from nvme_offload.perf.plan.placing import Job
from nvme_offload.perf.plan.prediction import Prediction, predict
from nvme_offload.perf.plan.shape import ModelShape

WARM_UP_STEPS, ROUNDS, MEASURED_STEPS = 2, 2, 2
REGION_BYTES, PASS_BYTES = 512 * MiB, 768 * MiB
WANTED_BYTES, WANTED_TIME = 0.02, 0.20
MEMORY_WIDTH, MEMORY_STEPS = 1024, 3
SHARE, SLACK_BYTES = 0.10, 64 * MiB
BOUND = f"the plan, {SHARE:.0%} and {SLACK_BYTES // MiB} MiB"


@dataclass(frozen=True)
class Configuration:
    """A run: how deep and wide the model is, and what is on NVMe."""

    name: str
    layers: int
    width: int = 768
    mode: str = "bf16"
    params: int = 0
    """Staging buffers of the parameter tier; 0: parameters are in memory."""
    grads: int = 0
    """Staging buffers of the gradient tier; 0: gradients are in memory."""
    accumulation: int = 1
    tokens: int = 1
    """Tokens of one micro-batch: with one, the drive takes most of a step; with several, computing does."""
    buffers: int = 4
    """Staging buffers of the optimizer's state."""
    staging: str = "160MiB"
    host_budget: str | None = None

    def section(self, path: Path | None) -> dict[str, Any]:
        """Make the configuration section; without a folder the one with everything in memory."""
        return section(
            path,
            state={"buffer_count": self.buffers, "staging_budget": self.staging},
            params=self.params,
            grads=self.grads,
            gradient_accumulation_steps=self.accumulation,
            host_budget=self.host_budget if path else None,
            **MODES[self.mode],
        )

    def training(self, path: Path | None, births: int) -> Training:
        """Train it; without a folder with everything in memory."""
        torch.manual_seed(0)
        model, batch = layered_model(self.layers, self.width), torch.randn(self.tokens, self.width)
        return Training(model, batch, self.section(path), births)

    def predicted(self, path: Path, **rates: Any) -> Prediction:
        """Plan it for one rank that has these rates."""
        with torch.device("meta"):
            shape = ModelShape.of_layers(layered_model(self.layers, self.width), self.name, self.width)
        config = OffloadConfig.from_dict(self.section(path))
        job = Job(shape=shape, config=config, tokens=self.tokens, checkpointing=False, baseline_bytes=0)
        return predict(job, Machine(host_memory=64 * GiB, **rates))


CONFIGURATIONS = (
    Configuration("state", 12),
    Configuration("state, 8 tokens", 12, tokens=8),
    Configuration("state, 2 buffers", 12, buffers=2),
    Configuration("state, 8 buffers", 12, buffers=8),
    Configuration("half of the state in memory", 12, host_budget="430MiB"),
    Configuration("state and parameters", 12, params=4),
    Configuration("state and parameters, 8 buffers", 12, params=8),
    Configuration("state and gradients", 12, grads=4),
    Configuration("everything", 12, params=4, grads=4),
    Configuration("everything, 2 micro-batches of 4", 12, params=4, grads=4, accumulation=2, tokens=4),
)


def memory_case(mode: str, layers: int, tiers: int = 0) -> Configuration:
    """Make the run of a precision whose memory is measured; `tiers`: staging buffers of parameters and gradients."""
    name = f"{mode}, {'everything' if tiers else 'state'}, {8 * MEMORY_WIDTH**2 * layers / 1e6:.0f} M"
    return Configuration(name, layers, MEMORY_WIDTH, mode, tiers, tiers, tokens=8, buffers=2, staging="32MiB")


CASES = tuple(memory_case(mode, layers, tiers) for layers in (6, 48) for mode in MODES for tiers in (0, 2))


@dataclass(frozen=True)
class Iterations(Figures):
    """One configuration: predicted and measured."""

    configuration: Configuration
    rates: dict[str, float]
    """The rates that the machine reached in the same minute."""
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
        return self.predicted_seconds / self.median_seconds

    @property
    def name(self) -> str:
        """Name of the configuration."""
        return self.configuration.name

    @property
    def median_seconds(self) -> float:
        """Median of the seconds measured."""
        return median(self.measured_seconds)

    COLUMNS = (
        Column("configuration", "name"),
        Column("bytes predicted", "predicted_bytes", ".4g"),
        Column("measured", "measured_bytes", ".4g"),
        Column("ratio", "bytes_ratio", ".3f"),
        Column("s predicted", "predicted_seconds", ".2f"),
        Column("measured", "median_seconds", ".2f"),
        Column("ratio", "time_ratio", ".2f"),
    )


def iterations_of(path: Path, configuration: Configuration) -> Iterations:
    """Measure rates, steps, and rates again; predict from the rates."""
    several, seconds, moved = [_rates(path, configuration)], list[float](), list[int]()
    with configuration.training(path, WARM_UP_STEPS) as training:
        for _ in range(ROUNDS):
            before = _bytes(training)
            seconds += [one.seconds for one in training.iterations(1 + MEASURED_STEPS)[1:]]
            moved.append(_bytes(training) - before)
            several.append(_rates(path, configuration))
    rates = {name: median(each[name] for each in several) for name in several[0]}
    drives = Drives.of_rates(*(rates[rw] for rw in get_args(Rw)))
    prediction = configuration.predicted(path, drives=drives, flops=rates["flops"], update_rate=rates["update_rate"])
    assert prediction.time is not None
    return Iterations(
        configuration,
        rates,
        prediction.total_traffic.read + prediction.total_traffic.written,
        sum(moved) / (ROUNDS * (1 + MEASURED_STEPS)),
        prediction.time.seconds,
        tuple(seconds),
        prediction.time.limit,
    )


def _bytes(training: Training) -> int:
    stats = training.engine.optimizer.stats()
    state = stats.bytes_read + stats.bytes_written
    params = stats.param_bytes_read + stats.param_bytes_written
    return state + params + stats.grad_bytes_read + stats.grad_bytes_written


def _rates(path: Path, configuration: Configuration) -> dict[str, float]:
    """Measure the drive through the engine alone, and the same model with everything in memory."""
    settings = Settings(paths=(path,), size=REGION_BYTES)
    with RawTarget(settings) as raw:
        raw.run("write", REGION_BYTES)
        rates = {rw: raw.run(rw, PASS_BYTES).bw_bytes for rw in get_args(Rw)}
    with configuration.training(None, 1) as training:
        before = training.engine.optimizer.stats().step_seconds
        seconds = sum(one.seconds for one in training.iterations(2)) / 2
        updating = (training.engine.optimizer.stats().step_seconds - before) / 2
        numel = sum(param.numel() for param in training.engine.module.parameters())
    operations = 6.0 * numel * configuration.tokens * configuration.accumulation
    return {**rates, "flops": operations / (seconds - updating), "update_rate": numel / updating}


@dataclass(frozen=True)
class MemoryGrowth(Figures):
    """A run: the growth of its resident memory at the peak, predicted and measured, in bytes."""

    case: Configuration
    predicted: int
    measured: int

    @property
    def within_plan(self) -> bool:
        """Whether it took no more than the plan with its margin."""
        return self.measured <= (1 + SHARE) * self.predicted + SLACK_BYTES

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.case.name

    @property
    def numel(self) -> int:
        """Parameters of its model."""
        return self.case.layers * (8 * MEMORY_WIDTH**2 + 7 * MEMORY_WIDTH)

    COLUMNS = (
        Column("run", "name"),
        Column("parameters", "numel", ","),
        Column("bytes predicted", "predicted", ","),
        Column("measured", "measured", ","),
    )
    BESIDES = ("within_plan",)


def memory_of(path: Path, case: Configuration) -> MemoryGrowth:
    """Run a case in a process of its own, and predict it.

    Raises:
        ChildFailedError: the run failed; with its own words.
    """
    with TemporaryDirectory() as folder, Child(grow, Path(folder) / "log") as child:
        child.tell((case, path))
        measured: int = child.finish("growth")
    return MemoryGrowth(case, case.predicted(path).peak_host_bytes, measured)


def grow(told: Iterator[Any], send: Send) -> None:
    """Run in a child a case on a folder: send how many bytes its resident memory grows beyond a run of nothing."""
    case, path = next(told)
    with torch.device("meta"):
        small, whole = layered_model(2, 16), layered_model(case.layers, case.width)
    with Training(small, torch.randn(case.tokens, 16), case.section(path), MEMORY_STEPS):
        pass  # what torch and the libraries take once and for all
    before = settled_resident_bytes()
    reset_peak_resident_bytes()
    with Training(whole, torch.randn(case.tokens, case.width), case.section(path), MEMORY_STEPS):
        peak = peak_resident_bytes()
    if before is None or peak is None:
        raise RuntimeError("this system does not say how much memory is resident")
    send("growth", peak - before)


def plan_check(
    path: Folder,
    save_to: SaveTo = None,
    memory_only: Annotated[bool, typer.Option("--memory-only", help="Resident memory alone.")] = False,
) -> None:
    """Compare what `offload plan` predicts with measured iterations and with resident memory.

    Exit status: 1 where a run takes more memory than the plan, 10 % and 64 MiB.
    """
    if not memory_only:
        title, all_iterations = "offload plan: predicted and measured", (iterations_of(path, c) for c in CONFIGURATIONS)
        run_experiment("plan-check", title, Iterations.head(), all_iterations, _within, path=path, save_to=save_to)
    title, growths = "offload plan: resident memory predicted and measured", (memory_of(path, case) for case in CASES)
    runs = run_experiment("plan-memory", title, MemoryGrowth.head(), growths, _excessive, path=path, save_to=save_to)
    if not all(one.within_plan for one in runs):
        raise typer.Exit(1)


def _within(found: list[Iterations]) -> list[str]:
    in_bytes = sum(abs(one.bytes_ratio - 1) <= WANTED_BYTES for one in found)
    in_time = sum(abs(one.time_ratio - 1) <= WANTED_TIME for one in found)
    return [
        f"bytes within {WANTED_BYTES:.0%}: {in_bytes} of {len(found)}",
        f"time within {WANTED_TIME:.0%}: {in_time} of {len(found)}",
    ]


def _excessive(found: list[MemoryGrowth]) -> list[str]:
    return [f"more than {BOUND}: {', '.join(one.name for one in found if not one.within_plan) or 'none'}"]
