"""The peak of resident memory of whole runs, from before birth and sharding, beside what the plan says.

Each run is a process of its own: memory that an earlier one had freed would hide what it takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nvme_offload import initialize
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.units import GiB, MiB
from nvme_offload.perf.measure.machine import (
    peak_resident_bytes,
    reset_peak_resident_bytes,
    settled_resident_bytes,
)
from nvme_offload.perf.measure.models import layered_model
from nvme_offload.perf.measure.progress import Progress
from nvme_offload.perf.planning.machine import Machine
from nvme_offload.perf.planning.prediction import Job, predict
from nvme_offload.perf.planning.shape import ModelShape

WIDTH, TOKENS, STEPS = 1024, 8, 3
SHARE, SLACK_BYTES = 0.10, 64 * MiB
BOUND = f"the plan, {SHARE:.0%} and {SLACK_BYTES // MiB} MiB"

MODES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "fp32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}


@dataclass(frozen=True)
class Case:
    """A run: its precision, what is on NVMe beside the optimizer's state, and how many layers it has."""

    mode: str
    layers: int
    everything: bool = False
    """Whether parameters and gradients are on NVMe too."""

    @property
    def name(self) -> str:
        """What the run is called in tables."""
        numel = 8 * WIDTH**2 * self.layers
        return f"{self.mode}, {'everything' if self.everything else 'state'}, {numel / 1e6:.0f} M"

    def section(self, path: Path) -> dict[str, Any]:
        """The configuration section."""
        drive = {"device": "nvme", "nvme_path": str(path), "buffer_count": 2}
        zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {**drive, "staging_budget": "32MiB"}}
        section: dict[str, Any] = {"zero_optimization": zero, **MODES[self.mode]}
        if self.everything:
            zero["offload_param"] = drive
            section["offload_gradients"] = drive
        return section


CASES = tuple(Case(mode, layers, everything) for layers in (6, 48) for mode in MODES for everything in (False, True))
HEAD = ("run", "MiB predicted", "measured", "B per parameter predicted", "measured")


@dataclass(frozen=True)
class Outcome:
    """A run: the growth of its resident memory at the peak, predicted and measured, in bytes."""

    case: Case
    predicted: int
    measured: int
    numel: int

    @property
    def within_plan(self) -> bool:
        """Whether it took no more than the plan with its margin."""
        return self.measured <= (1 + SHARE) * self.predicted + SLACK_BYTES

    def to_dict(self) -> dict[str, Any]:
        """The outcome in plain types, for JSON."""
        return {**asdict(self), "within_plan": self.within_plan}

    def cells(self) -> list[str]:
        """The outcome as a row of the table."""
        sizes = (self.predicted, self.measured)
        each = (f"{size / self.numel:.2f}" for size in sizes)
        return [self.case.name, *(f"{size / MiB:.0f}" for size in sizes), *each]


def measure(path: Path, case: Case, progress: Progress | None = None) -> Outcome:
    """Run a case in a process of its own, and predict it.

    Raises:
        RuntimeError: the run failed; with its own words.
    """
    command = [sys.executable, "-m", __spec__.name, str(path), json.dumps(asdict(case))]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{case.name}: {run.stderr[-2000:]}")
    with torch.device("meta"):
        model = layered_model(case.layers, WIDTH)
    outcome = Outcome(
        case, _predicted(case, path), int(run.stdout.splitlines()[-1]), sum(p.numel() for p in model.parameters())
    )
    if progress is not None:
        progress.say("  ".join(outcome.cells()))
    return outcome


def _predicted(case: Case, path: Path) -> int:
    with torch.device("meta"):
        model = layered_model(case.layers, WIDTH)
    job = Job(
        shape=ModelShape.of_layers(model, case.name, WIDTH),
        config=OffloadConfig.from_dict(case.section(path)),
        tokens=TOKENS,
        checkpointing=False,
        baseline_bytes=0,
    )
    machine = Machine(
        ranks=1,
        ranks_per_node=1,
        host_memory=64 * GiB,
        device_memory=None,
        drives=None,
        capacity=None,
        flops=None,
        update_rate=1e9,
    )
    return predict(job, machine).peak_host_bytes


def _train(section: dict[str, Any], layers: int, width: int) -> None:
    with torch.device("meta"):
        model = layered_model(layers, width)
    with initialize(model, section) as engine:
        for _ in range(STEPS):
            engine.backward(engine(torch.randn(TOKENS, width)).float().square().mean())
            engine.step()


def _growth(path: Path, case: Case) -> int:
    """Bytes by which resident memory grows at most, beyond what a run of nothing leaves."""
    section = case.section(path)
    _train(section, 2, 16)  # what torch and the libraries take once and for all
    before = settled_resident_bytes()
    reset_peak_resident_bytes()
    _train(section, case.layers, WIDTH)
    peak = peak_resident_bytes()
    if before is None or peak is None:
        raise RuntimeError("this system does not say how much memory is resident")
    return peak - before


if __name__ == "__main__":
    sys.stdout.write(f"{_growth(Path(sys.argv[1]), Case(**json.loads(sys.argv[2])))}\n")
