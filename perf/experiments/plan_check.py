"""Predictions of `offload plan` against the resident memory of whole runs.

Runs in every precision, each in a process of its own, because memory that an earlier one had freed would hide what it
takes: their peak of resident memory, from before birth and sharding, beside the plan's. `paced` has iterations beside
their plans.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import typer

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.units import GiB, MiB
from ..measure.child import Child, Send
from ..measure.command_line import Folder, SaveTo
from ..measure.machine import peak_resident_bytes, reset_peak_resident_bytes, settled_resident_bytes
from ..measure.sections import MODES, layered_model, section
from ..plan.machine import Machine
from ..plan.placing import Job
from ..plan.prediction import predict
from ..plan.shape import ModelShape
from .experiment import Row, run_experiment
from .training import Training

WIDTH, TOKENS, STEPS = 1024, 8, 3
SHARE, SLACK_BYTES = 0.10, 64 * MiB
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(MiB)}
"""Without it malloc keeps freed layers for later, in pieces: see docs/costs.md."""
BOUND = f"the plan, {SHARE:.0%} and {SLACK_BYTES // MiB} MiB"


@dataclass(frozen=True)
class MemoryCase:
    """A run: how deep the model is, its precision, and what is on NVMe."""

    layers: int
    mode: str
    tiers: int = 0  # staging buffers of parameters and gradients; 0: they are in memory

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return self.layers * (8 * WIDTH**2 + 7 * WIDTH)

    @property
    def name(self) -> str:
        """Say what is on NVMe, and how large the model is."""
        return f"{self.mode}, {'everything' if self.tiers else 'state'}, {8 * WIDTH**2 * self.layers / 1e6:.0f} M"

    def section(self, path: Path) -> dict[str, Any]:
        """Make the configuration section."""
        state = {"buffer_count": 2, "staging_budget": "32MiB"}
        return section(path, state=state, params=self.tiers, grads=self.tiers, **MODES[self.mode])

    def planned(self, path: Path) -> int:
        """Plan the bytes of host memory of one rank."""
        with torch.device("meta"):
            shape = ModelShape.of_layers(layered_model(self.layers, WIDTH), self.name, WIDTH)
        config = OffloadConfig.from_dict(self.section(path))
        job = Job(shape=shape, config=config, tokens=TOKENS, checkpointing=False, baseline_bytes=0)
        return predict(job, Machine(host_memory=64 * GiB)).tiers.bytes_on("host")


CASES = tuple(MemoryCase(layers, mode, tiers) for layers in (6, 48) for mode in MODES for tiers in (0, 2))


def growth_row(case: MemoryCase, predicted: int, measured: int) -> Row:
    """Show the growth of a run's resident memory at the peak, predicted and measured, in bytes."""
    shown = {"run": case.name, "parameters": f"{case.numel:,}", "bytes predicted": f"{predicted:,}"}
    within_plan = measured <= (1 + SHARE) * predicted + SLACK_BYTES
    figures = {"case": asdict(case), "predicted": predicted, "measured": measured, "within_plan": within_plan}
    return Row(shown | {"measured": f"{measured:,}"}, figures)


def memory_of(path: Path, case: MemoryCase) -> Row:
    """Run a case in a process of its own, and predict it."""
    with TemporaryDirectory() as folder, Child(grow, Path(folder) / "log", environment=GIVES_BACK) as child:
        child.tell((case, path))
        measured: int = child.finish("growth")
    return growth_row(case, case.planned(path), measured)


def grow(told: Iterator[Any], send: Send) -> None:
    """Run in a child a case on a folder: send how many bytes its resident memory grows beyond a run of nothing."""
    case, path = next(told)
    with torch.device("meta"):
        small, whole = layered_model(2, 16), layered_model(case.layers, WIDTH)
    with Training(small, torch.randn(TOKENS, 16), case.section(path), STEPS):
        pass  # what torch and the libraries take once and for all
    before = settled_resident_bytes()
    reset_peak_resident_bytes()
    with Training(whole, torch.randn(TOKENS, WIDTH), case.section(path), STEPS):
        send("growth", peak_resident_bytes() - before)


def plan_check(path: Folder, save_to: SaveTo = None) -> None:
    """Compare what `offload plan` predicts with the resident memory of runs in every precision.

    Exit status: 1 where a run takes more memory than the plan, 10 % and 64 MiB.
    """
    title, growths = "offload plan: resident memory predicted and measured", (memory_of(path, case) for case in CASES)
    note = lambda found: [f"more than {BOUND}: {_beyond(found)}"]  # noqa: E731
    if _beyond(run_experiment("plan-memory", title, growths, note, path=path, save_to=save_to)) != "none":
        raise typer.Exit(1)


def _beyond(found: list[Row]) -> str:
    return ", ".join(one.shown["run"] for one in found if not one.figures["within_plan"]) or "none"
