"""Iterations of one model with several sections: over a drive of an exact rate beside the plan, or over a real one."""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
import typer

from nvme_offload import OffloadConfig
from nvme_offload.offload.units import GiB, MiB
from ..measure.command_line import SaveTo
from ..measure.machine import device_here, peak_resident_bytes, reset_peak_resident_bytes, settled_resident_bytes
from ..measure.sections import MODES, layered_model, merged, section
from ..plan.machine import Drives, Machine
from ..plan.placing import Job
from ..plan.prediction import Prediction, predict
from ..plan.shape import ModelShape
from .experiment import Row, run_experiment
from .paced_drive import STANDS_IN_FOR, paced_drive
from .training import SleepingModel, Training

SCHEDULES: dict[str, dict[str, Any]] = {
    "off": {"overlap_step": "off"},
    "forward": {"overlap_step": "forward"},
    "backward": {"overlap_step": "backward", "gradient_clipping": 0.0, "skip_non_finite": False},
    "speculate": {"overlap_step": "speculate", "zero_optimization": {"offload_optimizer": {"durable": True}}},
}
"""A section has these keys for each schedule: "backward" allows no clipping, "speculate" needs durable state."""
CLIPPING = 1e3  # norm from which on gradients are clipped: far above that of these models
RATIOS = [0.5, 1.0, 2.0]
LIMIT = 1.05  # most that an iteration may take over its plan
KINDS = {"": "state", "param_": "parameters", "grad_": "gradients"}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model, and what its sections have in common."""

    layers: int
    width: int
    tokens: int
    micro_batches: int
    buffers: int
    everything: bool
    mode: str

    def section(self, case: dict[str, Any], folder: Path, **more: Any) -> dict[str, Any]:
        """Make the section of a case, whose own keys come last."""
        buffers = self.buffers if self.everything else 0
        common = section(
            folder,
            state={"buffer_count": self.buffers},
            params=buffers,
            grads=buffers,
            gradient_accumulation_steps=self.micro_batches,
            gradient_clipping=CLIPPING,
            **MODES[self.mode],
            **more,
        )
        return merged(common, case)

    def sleeping(self, case: dict[str, Any], folder: Path) -> Training:
        """Train matrices that are subgroups, over the engine of a paced drive, with the same weights each time."""
        torch.manual_seed(0)
        model = SleepingModel(self.width, self.layers)
        made = self.section(case, folder, sub_group_size=self.width**2, aio={"engine": STANDS_IN_FOR})
        return Training(model, torch.randn(self.tokens, self.width), made)

    def computing(self, case: dict[str, Any], folder: Path) -> Training:
        """Train layers that compute, on this machine's GPU if it has one.

        The model is born where it is kept: free memory of one that was whole would hide a peak.
        """
        torch.manual_seed(0)
        with torch.device("meta"):
            model = layered_model(self.layers, self.width)
        batch = torch.randn(self.tokens, self.width, device=device_here() or "cpu")
        return Training(model, batch, self.section(case, folder))

    def planned(self, case: dict[str, Any], folder: Path, computing: float, rate: float) -> Prediction:
        """Plan iterations that compute for so many seconds over a drive that moves so many bytes a second."""
        shape = ModelShape.of_numbers(self.layers * self.width**2, self.layers, self.width)
        config = OffloadConfig.of(self.section(case, folder, sub_group_size=self.width**2))
        job = Job(shape=shape, config=config, tokens=1, checkpointing=False, baseline_bytes=0)
        operations = (8 if job.computes_again else 6) * shape.numel * job.micro_batches
        drives = Drives(read=rate, write=rate, mixed=rate)
        machine = Machine(host_memory=64 * GiB, drives=drives, flops=operations / computing, update_rate=1e15)
        return predict(job, machine)


def cases_of(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the keys of each case by its name; BadParameter where a text is no schedule and no JSON object."""
    cases = dict(SCHEDULES) if not texts else {}
    for text in texts:
        try:
            case = SCHEDULES.get(text) or json.loads(text)
        except ValueError:
            case = None
        if not isinstance(case, dict):
            raise typer.BadParameter(
                f"{text!r} is neither {', '.join(SCHEDULES)} nor keys of a section as JSON", param_hint="'--case'"
            )
        cases[text] = case
    return cases


def over_a_paced_drive(
    setup: Setup, cases: dict[str, dict[str, Any]], ratios: Sequence[float], compute: float, count: int
) -> Iterator[Row]:
    """Measure each case at each ratio; the drive is the same for all cases of a ratio."""
    firsts: dict[float, tuple[float, float]] = {}  # the drive's rate, and seconds of the first case
    for name, case in cases.items():
        with TemporaryDirectory() as folder, paced_drive() as pace, setup.sleeping(case, Path(folder)) as training:
            model = training.engine.module
            assert isinstance(model, SleepingModel)
            own = training.seconds(count)
            model.compute_for(max(0.0, compute - own) / setup.micro_batches)
            for ratio in ratios:
                pace.rate = math.inf
                computing = training.seconds(count)
                moved = setup.planned(case, Path(folder), computing, 1.0).total_traffic
                rate, first = firsts.get(ratio, ((moved.read + moved.written) / (ratio * compute), 0.0))
                pace.rate = rate
                seconds = training.seconds(count)
                firsts.setdefault(ratio, (rate, seconds))
                planned = setup.planned(case, Path(folder), computing, rate).time
                assert planned is not None
                ideal = max(computing, (moved.read + moved.written) / rate)
                figures = {"seconds": seconds, "computing": computing, "plan": planned.seconds, "ratio": ratio}
                figures |= {"of_ideal": seconds / ideal, "plan_of_ideal": planned.seconds / ideal}
                figures |= {"quotient": seconds / planned.seconds, "of_first": seconds / (first or seconds)}
                shown = {"case, I/O : compute": f"{name}, {ratio:g}", "computing s": f"{computing:.3f}"}
                shown |= {"iteration s": f"{seconds:.3f}", "of the first": f"{figures['of_first']:.2f}"}
                shown |= {"of the ideal": f"{seconds / ideal:.2f}", "plan": f"{planned.seconds / ideal:.2f}"}
                yield Row(shown | {"quotient": f"{figures['quotient']:.3f}"}, figures)


def over_a_real_drive(setup: Setup, cases: dict[str, dict[str, Any]], path: Path, count: int) -> Iterator[Row]:
    """Measure time, processor time, bytes and memory of each case, one after the other."""
    for name, case in cases.items():
        on_drive = TemporaryDirectory(dir=path, prefix="nvme-offload-paced-")
        with on_drive as folder, setup.computing(case, Path(folder)) as training:
            settled_resident_bytes()
            reset_peak_resident_bytes()
            before, started = training.moved(), time.process_time()
            seconds = training.seconds(count)
            took, moved = time.process_time() - started, training.moved()
            peak, digest = peak_resident_bytes(), hashlib.sha256()
            for _, value in training.engine.weights("fp32"):
                digest.update(value.numpy().tobytes())
            elements = (1 + count) * sum(param.numel() for param in training.engine.parameters())
        each = {kind: (moved[kind] - before[kind]) / elements for kind in moved}
        figures = {"seconds": seconds, "cpu_ns": took / elements * 1e9, "peak_bytes": peak, **each}
        shown = {"case": name, "iteration s": f"{seconds:.3f}", "ns": f"{figures['cpu_ns']:.2f}"}
        for prefix, kind in KINDS.items():
            ways = (each[f"{prefix}bytes_{way}"] for way in ("read", "written"))
            shown[f"{kind}, B"] = " + ".join(f"{way:.2f}" for way in ways)
        shown |= {"peak MiB": f"{peak / MiB:.0f}", "weights": digest.hexdigest()[:12]}
        yield Row(shown, figures | {"digest": digest.hexdigest()})


def paced(
    path: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", exists=True, file_okay=False, writable=True, help="Folder on a real drive."),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="A schedule, or keys of a section as JSON; repeat it. Default: schedules.")
    ] = None,
    layers: Annotated[int, typer.Option(min=4, help="Layers of the model.")] = 48,
    width: Annotated[int, typer.Option(min=64, help="Its width.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch.")] = 2,
    count: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 1,
    buffers: Annotated[int, typer.Option(min=2, help="Staging buffers of each kind.")] = 4,
    everything: Annotated[bool, typer.Option(help="Keep parameters and gradients on the drive, too.")] = False,
    mode: Annotated[Literal["bf16", "fp16", "fp32", "autocast"], typer.Option(help="Precision.")] = "bf16",
    ratio: Annotated[list[float], typer.Option(help="The drive's seconds over those of computing.")] = RATIOS,
    compute: Annotated[float, typer.Option(help="Seconds that an iteration computes.")] = 0.8,
    iterations: Annotated[int, typer.Option(min=2, help="Measured of each case; an even number.")] = 4,
    save_to: SaveTo = None,
) -> None:
    """Measure iterations with several sections: over a drive of an exact rate beside the plan, or over a real one."""
    setup = Setup(
        layers=layers,
        width=width,
        tokens=tokens,
        micro_batches=count,
        buffers=buffers,
        everything=everything,
        mode=mode,
    )
    cases = cases_of(case or ())
    notes = [f"{layers} layers of width {width}, {tokens} tokens in each of {count} micro-batches, {mode}"]
    if path is not None:
        notes.append(
            "B: bytes read and written for each parameter and iteration; processors' ns: the same of their time"
        )
        found = over_a_real_drive(setup, cases, path, iterations)
        run_experiment("iterations", "Iterations by section", found, lambda rows: notes, path=path, save_to=save_to)
        return
    notes.append(
        "one server of an exact rate, the same for all cases, which moves the planned bytes of the first in so many "
        "times the seconds that it computes; layers sleep; the ideal is the longer of computing and of moving all bytes"
    )

    def with_verdict(found: list[Row]) -> list[str]:
        within = sum(row.figures["quotient"] <= LIMIT for row in found)
        return [*notes, f"at most {LIMIT:g} times the plan: {within} of {len(found)}"]

    rows = over_a_paced_drive(setup, cases, ratio, compute, iterations)
    run_experiment("paced", "Iterations over a paced drive", rows, with_verdict, save_to=save_to)
