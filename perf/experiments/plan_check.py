"""Predictions of `offload plan` against measured iterations, and against the resident memory of whole runs.

Each configuration measures, in the same minute, before and after its steps, what the drive reaches (as `offload bench`
does), and how fast the same model computes and updates with everything in memory. Then runs in every precision, each in
a process of its own, because memory that an earlier one had freed would hide what it takes: their peak of resident
memory, from before birth and sharding, beside the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from nvme_offload import initialize
from nvme_offload.offload.config.section import AioConfig, OffloadConfig
from nvme_offload.offload.units import GiB, MiB
from nvme_offload.perf.measure.child import Child, Send
from nvme_offload.perf.measure.command_line import Folder, SaveTo
from nvme_offload.perf.measure.experiment import Column, Experiment, Figures
from nvme_offload.perf.measure.machine import peak_resident_bytes, reset_peak_resident_bytes, settled_resident_bytes
from nvme_offload.perf.measure.models import layered_model
from nvme_offload.perf.measure.settings import Rw, Settings
from nvme_offload.perf.measure.training import Training
from nvme_offload.perf.measure.workloads import RawTarget, Region
from nvme_offload.perf.plan.machine import Drives, Machine
from nvme_offload.perf.plan.prediction import Job, Prediction, predict
from nvme_offload.perf.plan.shape import ModelShape

WARM_UP_STEPS, ROUNDS, MEASURED_STEPS = 2, 2, 2
REGION_BYTES, PASS_BYTES = 512 * MiB, 768 * MiB
WANTED_BYTES, WANTED_TIME = 0.02, 0.20
WIDTH, TOKENS, STEPS = 1024, 8, 3
SHARE, SLACK_BYTES = 0.10, 64 * MiB
BOUND = f"the plan, {SHARE:.0%} and {SLACK_BYTES // MiB} MiB"
MODES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "fp32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}
_MACHINE = Machine(
    ranks=1,
    ranks_per_node=1,
    host_memory=64 * GiB,
    device_memory=None,
    drives=None,
    capacity=None,
    flops=None,
    update_rate=1e9,
)


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
        """Make the configuration section, or the one with everything in memory."""
        drive = {"device": "nvme", "nvme_path": str(path)}
        state = {**drive, "buffer_count": self.buffers, "staging_budget": "160MiB"}
        zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"} if in_memory else state}
        section = {"zero_optimization": zero, "gradient_accumulation_steps": self.accumulation, **MODES["bf16"]}
        if self.params and not in_memory:
            zero["offload_param"] = {**drive, "buffer_count": self.params}
        if self.grads and not in_memory:
            section["offload_gradients"] = {**drive, "buffer_count": self.grads}
        if self.host_budget and not in_memory:
            section["host_budget"] = self.host_budget
        return section

    def training(self, path: Path, births: int, *, in_memory: bool = False) -> Training:
        """Train it."""
        torch.manual_seed(0)
        model = layered_model(self.layers, self.width)
        batch = torch.randn(self.tokens, self.width)
        return Training(model, batch, self.section(path, in_memory=in_memory), births)


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
        """Return the median of several measurements, rate by rate."""
        return cls(**{name: median(getattr(rates, name) for rates in several) for name in asdict(several[0])})


@dataclass(frozen=True)
class Iterations(Figures):
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
    rates, seconds, moved = [_rates(path, configuration)], list[float](), list[int]()
    with configuration.training(path, WARM_UP_STEPS) as training:
        for _ in range(ROUNDS):
            before = _bytes(training)
            seconds += [one.seconds for one in training.iterations(1 + MEASURED_STEPS)[1:]]
            moved.append(_bytes(training) - before)
            rates.append(_rates(path, configuration))
    reached = Rates.median_of(rates)
    machine = replace(
        _MACHINE,
        drives=Drives.of_rates(reached.read, reached.write, reached.mixed),
        flops=reached.flops,
        update_rate=reached.update_rate,
    )
    layers, width, section = configuration.layers, configuration.width, configuration.section(path)
    prediction = _predicted(configuration.name, layers, width, configuration.tokens, section, machine)
    assert prediction.time is not None
    return Iterations(
        configuration,
        reached,
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
    with configuration.training(path, 1, in_memory=True) as training:
        before = training.engine.optimizer.stats().step_seconds
        seconds = sum(one.seconds for one in training.iterations(2)) / 2
        updating = (training.engine.optimizer.stats().step_seconds - before) / 2
        numel = sum(param.numel() for param in training.engine.module.parameters())
    operations = 6.0 * numel * configuration.tokens * configuration.accumulation
    return Rates(**rates, flops=operations / (seconds - updating), update_rate=numel / updating)


def _predicted(
    name: str, layers: int, width: int, tokens: int, section: dict[str, Any], machine: Machine
) -> Prediction:
    with torch.device("meta"):
        shape = ModelShape.of_layers(layered_model(layers, width), name, width)
    config = OffloadConfig.from_dict(section)
    return predict(Job(shape=shape, config=config, tokens=tokens, checkpointing=False, baseline_bytes=0), machine)


@dataclass(frozen=True)
class MemoryCase:
    """A run: its precision, what is on NVMe beside the optimizer's state, and how many layers it has."""

    mode: str
    layers: int
    everything: bool = False
    """Whether parameters and gradients are on NVMe too."""

    @property
    def numel(self) -> int:
        """Parameters of its model."""
        return self.layers * (8 * WIDTH**2 + 7 * WIDTH)

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.mode}, {'everything' if self.everything else 'state'}, {8 * WIDTH**2 * self.layers / 1e6:.0f} M"

    def section(self, path: Path) -> dict[str, Any]:
        """Make the configuration section."""
        drive = {"device": "nvme", "nvme_path": str(path), "buffer_count": 2}
        zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {**drive, "staging_budget": "32MiB"}}
        section: dict[str, Any] = {"zero_optimization": zero, **MODES[self.mode]}
        if self.everything:
            zero["offload_param"] = drive
            section["offload_gradients"] = drive
        return section


CASES = tuple(
    MemoryCase(mode, layers, everything) for layers in (6, 48) for mode in MODES for everything in (False, True)
)


@dataclass(frozen=True)
class MemoryGrowth(Figures):
    """A run: the growth of its resident memory at the peak, predicted and measured, in bytes."""

    case: MemoryCase
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
        return self.case.numel

    COLUMNS = (
        Column("run", "name"),
        Column("parameters", "numel", ","),
        Column("bytes predicted", "predicted", ","),
        Column("measured", "measured", ","),
    )
    BESIDES = ("within_plan",)


def memory_of(path: Path, case: MemoryCase) -> MemoryGrowth:
    """Run a case in a process of its own, and predict it.

    Raises:
        ChildFailedError: the run failed; with its own words.
    """
    with TemporaryDirectory() as folder, Child(grow, Path(folder) / "log") as child:
        child.tell((case, path))
        measured: int = child.finish("growth")
    prediction = _predicted(case.name, case.layers, WIDTH, TOKENS, case.section(path), _MACHINE)
    return MemoryGrowth(case, prediction.peak_host_bytes, measured)


def grow(told: Iterator[Any], send: Send) -> None:
    """Run in a child a case on a folder: send how many bytes its resident memory grows beyond a run of nothing."""
    case, path = next(told)
    section = case.section(path)
    _train(section, 2, 16)  # what torch and the libraries take once and for all
    before = settled_resident_bytes()
    reset_peak_resident_bytes()
    _train(section, case.layers, WIDTH)
    peak = peak_resident_bytes()
    if before is None or peak is None:
        raise RuntimeError("this system does not say how much memory is resident")
    send("growth", peak - before)


def _train(section: dict[str, Any], layers: int, width: int) -> None:
    with torch.device("meta"):
        model = layered_model(layers, width)
    with initialize(model, section) as engine:
        for _ in range(STEPS):
            engine.backward(engine(torch.randn(TOKENS, width)).float().square().mean())
            engine.step()


def plan_check(
    path: Folder,
    save_to: SaveTo = None,
    memory_only: Annotated[bool, typer.Option("--memory-only", help="Resident memory alone.")] = False,
) -> None:
    """Compare what `offload plan` predicts with measured iterations and with resident memory.

    Exit status: 1 where a run takes more memory than the plan, 10 % and 64 MiB.
    """
    if not memory_only:
        Experiment(
            name="plan-check",
            title="offload plan: predicted and measured",
            head=Iterations.head(),
            path=path,
            save_to=save_to,
        ).run((iterations_of(path, configuration) for configuration in CONFIGURATIONS), _within)
        if dist.is_initialized():
            dist.destroy_process_group()
    runs = Experiment(
        name="plan-memory",
        title="offload plan: resident memory predicted and measured",
        head=MemoryGrowth.head(),
        path=path,
        save_to=save_to,
    ).run((memory_of(path, case) for case in CASES), lambda found: [f"more than {BOUND}: {_excessive(found)}"])
    if not all(one.within_plan for one in runs):
        raise typer.Exit(1)


def _within(found: list[Iterations]) -> list[str]:
    in_bytes = sum(abs(one.bytes_ratio - 1) <= WANTED_BYTES for one in found)
    in_time = sum(abs(one.time_ratio - 1) <= WANTED_TIME for one in found)
    return [
        f"bytes within {WANTED_BYTES:.0%}: {in_bytes} of {len(found)}",
        f"time within {WANTED_TIME:.0%}: {in_time} of {len(found)}",
    ]


def _excessive(found: list[MemoryGrowth]) -> str:
    return ", ".join(one.case.name for one in found if not one.within_plan) or "none"
