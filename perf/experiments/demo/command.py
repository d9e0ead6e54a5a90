"""The demo: ours beside itself, a small GPT with its state on NVMe and in memory, by turns; every bit is compared."""

import os
import shutil
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from nvme_offload.aio_native.registry import ENGINES
from nvme_offload.offload.units import MiB
from ...measure import command_line
from ...measure.comparison import Quad
from ...measure.machine import mount_at, num_cpus
from ...report.command import report
from ..compare import Contender, Seen, Side
from ..experiment import run_experiment
from ..gpt import CONTEXT, PRESETS, ModelSize, parse_size
from ..peers.worker import MICRO_BATCHES, Order

TURN_STEPS = 4
"""Steps that one run takes before the other goes on: an even number, since updates alternate in direction."""
MICRO_BATCH = 8  # sequences
LEARNING_RATE, LEARNING_RATE_WIDTH = 2e-3, 384  # wider models get less, in proportion
ON_NVME, IN_MEMORY = Contender("ours", "state on NVMe"), Contender("ours-memory", "state in memory")
UNKNOWN = "unknown"


@dataclass
class DemoRun(Seen):
    """One of the two runs. A step before the first is in nothing: it makes what others only use."""

    @property
    def shown(self) -> dict[str, str]:
        """Its row, by the heads of the columns."""
        shares = [each["share"] for each in self.figures if "share" in each]
        in_step = [each["step_seconds"] for each in self.figures]
        row = {
            "": self.contender.text,
            "steps": str(len(self.seconds)),
            "a step": f"{median(self.seconds):.3f} s",
            "in step()": f"{(in_step[-1] - in_step[0]) / (len(in_step) - 1):.3f} s",
            "of the ideal": f"{median(shares):.0%} ({self.figures[-1]['limit']})" if shares else UNKNOWN,
            "peak memory": "",
            "the optimizer's": "",
            "B read": "",
            "B written": "",
            "GB/s": "",
            "loss": f"{mean(self.losses[-10:]):.4f}",
        }
        if (ended := self.ended) is not None:
            row |= {"peak memory": f"{ended.peak_bytes / MiB:,.0f} MiB"}
            row |= {"the optimizer's": f"{ended.grown_bytes / MiB:,.0f} MiB"}
            elements = self.numel * ended.iterations
            for way, head in enumerate(("B read", "B written")):
                counts = (ended.moved, ended.counted)  # by the kernel, and by the optimizer
                row[head] = " / ".join(UNKNOWN if each is None else f"{each[way] / elements:.2f}" for each in counts)
            row["GB/s"] = f"{sum(ended.counted) / ended.busy_seconds / 1e9:.2f}" if ended.busy_seconds else ""
        return row


def demo(
    size: Annotated[str, typer.Option(help=f"{', '.join(PRESETS)}, or LAYERSxWIDTH such as 8x512.")] = "small",
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help="Steps of each run, in eights; by default as many as the size has."),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option(help="Directory for the swap file, on the drive to use. Default: --out, or another on a drive."),
    ] = None,
    engine: Annotated[
        str, command_line.choice_option("--engine", choices=("auto", *ENGINES), text="Engine of the I/O.")
    ] = "auto",
    out: Annotated[Path, typer.Option(help="Directory for the trace and results.")] = Path("demo-out"),
) -> None:
    """Train a byte-level GPT twice, with optimizer state on NVMe and in memory, and compare every bit."""
    asked = {**locals(), "path": str(path), "out": str(out)}
    with command_line.failures_in_words():
        shape = parse_size(size)
        command_line.check_save(out, "out")
        out.mkdir(parents=True, exist_ok=True)
        drive = choose_drive(path, out)
        command_line.check_space(drive, shape.swap_bytes)
    title = (
        f"A GPT with {shape.num_parameters / 1e6:.1f} million bf16 parameters learns Python's standard library, twice"
    )
    typer.echo(f"{title}; swap below {drive}.", err=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runs = [DemoRun(each, shape.num_parameters) for each in (ON_NVME, IN_MEMORY)]
    with TemporaryDirectory(prefix="nvme-offload-demo-", dir=drive) as swap:
        order, quads = order_of(size, shape, engine), ceil((steps or shape.steps) / (2 * TURN_STEPS))
        asked["order"] = vars(order)
        with closing(by_turns(runs, order, quads, Path(swap), out)) as measured:
            run_experiment("demo", title, measured, lambda _: conclusion(*runs), path=drive, save_to=out, asked=asked)
        trace = ON_NVME.weights(Path(swap))
        shutil.move(trace, out / "trace.json")
        log = Path(f"{trace}.jsonl")
        if noted := log.exists():  # a full drive may have kept the run from noting anything
            shutil.move(log, out / "run.jsonl")
    for log in (log for log in out.glob("ours*.log") if not log.stat().st_size):
        log.unlink()
    if noted:
        report(out / "run.jsonl", None)
    typer.echo(f"for ui.perfetto.dev: {out / 'trace.json'}")
    if differences(*runs):
        raise typer.Exit(1)


def choose_drive(path: Path | None, out: Path) -> Path:
    """The directory that will hold the swap directory: the one asked for, or one that is on a drive."""
    if path is not None:
        command_line.check_folder("path", path)
    candidates = [out, Path.cwd(), Path.home(), Path("/var/tmp")] if path is None else [path]
    for candidate in candidates:
        if os.access(candidate, os.W_OK | os.X_OK) and not ((mount := mount_at(candidate)) and mount.is_memory):
            return candidate
    where = ", ".join(map(str, candidates))
    raise command_line.KnobError("path", f"{where}: memory and no drive; name a directory on a drive with --path")


def order_of(size: str, shape: ModelSize, engine: str) -> Order:
    """Return what each run is told but for where it is, and whether its state is on NVMe."""
    lr = LEARNING_RATE * min(1.0, LEARNING_RATE_WIDTH / shape.width)
    keys = {
        "aio": {"engine": engine, "direct": "optional"},
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"params": {"lr": lr}},
        "zero_optimization": {"sub_group_size": shape.sub_group_size},
    }
    known: dict[str, Any] = {"size": size, "tokens": MICRO_BATCHES * MICRO_BATCH * CONTEXT, "threads": num_cpus()}
    return Order(turn=TURN_STEPS, keys=keys, demo=True, **known)


def by_turns(
    runs: Sequence[DemoRun], order: Order, quads: int, folder: Path, out: Path
) -> Generator[DemoRun, None, None]:
    """Train both runs, a few steps each in turn, so that the machine's moods are those of both."""
    nvme, memory = runs
    with (
        Side(nvme, sys.executable, order, folder, out) as ours,
        Side(memory, sys.executable, order, folder, out) as its,
    ):
        for _ in range(quads):
            Quad.measure(ours.turn, its.turn)
            yield from runs
        for side, run in ((ours, nvme), (its, memory)):
            side.end()
            yield run


def conclusion(nvme: DemoRun, memory: DemoRun) -> list[str]:
    """Say what the columns mean and, when both runs have ended, whether their bits are the same."""
    said = [
        "B: bytes per parameter and step, as the kernel and as the optimizer count them; GB/s while reading or writing",
        "peak memory: resident; the optimizer's: resident after training, less what was before it was made",
    ]
    if nvme.ended is None or memory.ended is None:
        return said
    said.append(f"engine of the run on NVMe: {nvme.ended.engine}")
    if names := differences(nvme, memory):
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return [*said, f"NOT bit-identical: {shown}. This is a bug; please report it with the saved files."]
    same = f"all {nvme.numel:,} parameters, their master weights and moments have equal SHA-256 digests"
    return [*said, f"Bit-identical: {same} after {len(nvme.losses)} steps, and all losses are equal."]


def differences(nvme: DemoRun, memory: DemoRun) -> list[str]:
    """Names of all that differs between the runs; empty where they are bit-identical."""
    ours, others = (run.ended.digests if run.ended is not None else {} for run in (nvme, memory))
    names = [name for name in ours | others if ours.get(name) != others.get(name)]
    norms = ([each["norm"] for each in run.figures] for run in (nvme, memory))
    for what, (own, its) in {"loss": (nvme.losses, memory.losses), "gradient norm": tuple(norms)}.items():
        names += [
            f"{what} of step {n}" for n, (one, other) in enumerate(zip(own, its, strict=False), 1) if one != other
        ]
    names += ["number of steps"] * (len(nvme.losses) != len(memory.losses))
    return names + ["digests, which are missing"] * (not ours)
