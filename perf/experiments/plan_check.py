"""Predictions of `offload plan` against measured iterations, and against the resident memory of whole runs.

Each configuration measures, in the same minute, before and after its steps, what the drive reaches (as `offload bench`
does), and how fast the same model computes and updates with everything in memory. Then runs in every precision, each in
a process of its own, because memory that an earlier one had freed would hide what it takes: their peak of resident
memory, from before birth and sharding, beside the plan's.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, get_args

import torch
import typer

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.units import GiB, MiB
from nvme_offload.perf.experiments.experiment import Row, run_experiment
from nvme_offload.perf.experiments.training import Training
from nvme_offload.perf.measure.child import Child, Send
from nvme_offload.perf.measure.command_line import Folder, Rw, SaveTo, Settings
from nvme_offload.perf.measure.layers import layered_model
from nvme_offload.perf.measure.machine import peak_resident_bytes, reset_peak_resident_bytes, settled_resident_bytes
from nvme_offload.perf.measure.sections import MODES, section
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
    params: int = 0  # staging buffers of the parameter tier; 0: parameters are in memory
    grads: int = 0  # staging buffers of the gradient tier; 0: gradients are in memory
    accumulation: int = 1
    tokens: int = 1  # tokens of one micro-batch: with one, the drive takes most of a step; with several, computing does
    buffers: int = 4  # staging buffers of the optimizer's state
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


def iterations_of(path: Path, configuration: Configuration) -> Row:
    """Measure rates, steps, and rates again; predict from the rates."""
    several, seconds, moved = [_rates(path, configuration)], list[float](), list[int]()
    with configuration.training(path, WARM_UP_STEPS) as training:
        for _ in range(ROUNDS):
            before = sum(training.moved().values())
            seconds.append(training.seconds(MEASURED_STEPS))
            moved.append(sum(training.moved().values()) - before)
            several.append(_rates(path, configuration))
    rates = {name: median(each[name] for each in several) for name in several[0]}
    drives = Drives.of_rates(*(rates[rw] for rw in get_args(Rw)))
    prediction = configuration.predicted(path, drives=drives, flops=rates["flops"], update_rate=rates["update_rate"])
    assert prediction.time is not None
    moves, moved_bytes = prediction.total_traffic, sum(moved) / (ROUNDS * (1 + MEASURED_STEPS))
    predicted, taken = prediction.time.seconds, median(seconds)
    shown = {"configuration": configuration.name, "bytes predicted": f"{moves.read + moves.written:.4g}"}
    shown |= {"measured": f"{moved_bytes:.4g}", "ratio": f"{(moves.read + moves.written) / moved_bytes:.3f}"}
    shown |= {"s predicted": f"{predicted:.2f}", "s measured": f"{taken:.2f}", "s ratio": f"{predicted / taken:.2f}"}
    figures: dict[str, Any] = {"configuration": asdict(configuration), "rates": rates, "limit": prediction.time.limit}
    figures |= {"bytes_ratio": (moves.read + moves.written) / moved_bytes, "time_ratio": predicted / taken}
    return Row(shown, figures | {"measured_bytes": moved_bytes, "measured_seconds": seconds})


def _rates(path: Path, configuration: Configuration) -> dict[str, float]:
    """Measure the drive through the engine alone, and the same model with everything in memory."""
    rates = drive_rates(path)
    with configuration.training(None, 1) as training:
        before = training.engine.optimizer.stats().step_seconds
        seconds = training.seconds(2)
        updating = (training.engine.optimizer.stats().step_seconds - before) / 3  # a first one does not count there
        numel = sum(param.numel() for param in training.engine.module.parameters())
    operations = 6.0 * numel * configuration.tokens * configuration.accumulation
    return {**rates, "flops": operations / (seconds - updating), "update_rate": numel / updating}


def drive_rates(path: Path) -> dict[str, float]:
    """Measure the drive through the engine alone, in bytes per second of reading, writing and both."""
    with RawTarget(Settings(paths=(path,), size=REGION_BYTES)) as raw:
        raw.run("write", REGION_BYTES)
        return {rw: raw.run(rw, PASS_BYTES).bw_bytes for rw in get_args(Rw)}


def growth_row(case: Configuration, predicted: int, measured: int) -> Row:
    """Show the growth of a run's resident memory at the peak, predicted and measured, in bytes."""
    numel = case.layers * (8 * MEMORY_WIDTH**2 + 7 * MEMORY_WIDTH)
    shown = {"run": case.name, "parameters": f"{numel:,}", "bytes predicted": f"{predicted:,}"}
    within_plan = measured <= (1 + SHARE) * predicted + SLACK_BYTES
    figures = {"case": asdict(case), "predicted": predicted, "measured": measured, "within_plan": within_plan}
    return Row(shown | {"measured": f"{measured:,}"}, figures)


def memory_of(path: Path, case: Configuration) -> Row:
    """Run a case in a process of its own, and predict it."""
    with TemporaryDirectory() as folder, Child(grow, Path(folder) / "log") as child:
        child.tell((case, path))
        measured: int = child.finish("growth")
    return growth_row(case, case.predicted(path).tiers.bytes_on("host"), measured)


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
        send("growth", peak_resident_bytes() - before)


def plan_check(
    path: Folder,
    save_to: SaveTo = None,
    memory_only: Annotated[bool, typer.Option("--memory-only", help="Resident memory alone.")] = False,
) -> None:
    """Compare what `offload plan` predicts with measured iterations and with resident memory.

    Exit status: 1 where a run takes more memory than the plan, 10 % and 64 MiB.
    """
    to: dict[str, Any] = {"path": path, "save_to": save_to}
    if not memory_only:
        title, measured = "offload plan: predicted and measured", (iterations_of(path, each) for each in CONFIGURATIONS)
        run_experiment("plan-check", title, measured, _within, **to)
    title, growths = "offload plan: resident memory predicted and measured", (memory_of(path, case) for case in CASES)
    runs = run_experiment("plan-memory", title, growths, lambda found: [f"more than {BOUND}: {_beyond(found)}"], **to)
    if _beyond(runs) != "none":
        raise typer.Exit(1)


def _within(found: list[Row]) -> list[str]:
    wanted = {"bytes": WANTED_BYTES, "time": WANTED_TIME}
    figures = [one.figures for one in found]
    within = {name: sum(abs(each[f"{name}_ratio"] - 1) <= most for each in figures) for name, most in wanted.items()}
    return [f"{name} within {wanted[name]:.0%}: {count} of {len(found)}" for name, count in within.items()]


def _beyond(found: list[Row]) -> str:
    return ", ".join(one.figures["case"]["name"] for one in found if not one.figures["within_plan"]) or "none"
