"""The demo: it trains a small GPT twice, state on NVMe and in memory, by turns, and compares every bit."""

import dataclasses
import itertools
import json
import math
import os
import signal
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from nvme_offload.aio_native.registry import ENGINES
from nvme_offload.optim.telemetry.trace import write_trace
from nvme_offload.perf.experiments.demo import report
from nvme_offload.perf.experiments.demo.training import RunResult, RunSettings, StepSample, work
from nvme_offload.perf.measure.child import Child
from nvme_offload.perf.measure.command_line import (
    KnobError,
    check_folder,
    check_save,
    check_space,
    choice_option,
    failures_in_words,
)
from nvme_offload.perf.measure.comparison import by_turns
from nvme_offload.perf.measure.gpt import PRESETS, parse_size
from nvme_offload.perf.measure.machine import environment, mount_at, num_cpus

TURN_STEPS = 4
"""Steps that one run takes before the other goes on: an even number, since updates alternate in direction."""
LINES = 10
"""Lines of progress in a run, about."""


class RunChild(Child):
    """A run in a process of its own: it trains when it is told to, says how it gets on, and ends with its result.

    What it says besides goes to a file in `out`, and is shown in the end.
    """

    def __init__(self, name: str, settings: RunSettings, steps: int, out: Path, console: Console) -> None:
        self._said = out / f"{name.replace(' ', '-').lower()}.log"
        super().__init__(work, self._said)
        self.samples: list[StepSample] = []
        """The steps taken so far."""
        self._name, self._steps, self._console = name, steps, console
        self.tell(settings)
        self.expect("ready")
        self._started = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if not (said := self._said.read_text(errors="replace").strip()):
            self._said.unlink()
        elif not any(exception):
            self._console.print(f"{self._name} said:\n{said}", style="yellow", markup=False, highlight=False)

    def train(self, steps: int) -> None:
        """Have the child take some steps, and wait until it has nothing left to do."""

        def note(kind: str, sample: StepSample) -> None:
            self.samples.append(sample)
            done = len(self.samples)
            if done in (1, self._steps) or done % max(1, self._steps // LINES) == 0:
                said = f"{self._name}: step {done}/{self._steps}, loss {sample.loss:.3f}, {sample.pace}"
                self._console.print(
                    f"{said}, {time.monotonic() - self._started:.0f} s", highlight=False, soft_wrap=True
                )

        self.tell(steps)
        self.expect("turn ended", note)


def demo(
    size: Annotated[str, typer.Option(help=f"{', '.join(PRESETS)}, or LAYERSxWIDTH such as 8x512.")] = "small",
    steps: Annotated[
        int | None, typer.Option(min=2, max=100_000, help="Steps of each run; without it what fits the budget.")
    ] = None,
    budget: Annotated[float, typer.Option(min=1, help="Seconds that a run may train, without --steps.")] = 50.0,
    path: Annotated[
        Path | None,
        typer.Option(help="Directory for the swap file, on the drive to use. Default: --out, or another on a drive."),
    ] = None,
    engine: Annotated[str, choice_option("--engine", choices=("auto", *ENGINES), text="Engine of the I/O.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and batches.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for pictures and results.")] = Path("demo-out"),
) -> None:
    """Train a byte-level GPT twice, with optimizer state on NVMe and in memory, and compare every bit."""
    options = dict(locals())
    console = Console()
    with failures_in_words():
        shape = parse_size(size)
        check_save(out, "out")
        out.mkdir(parents=True, exist_ok=True)
        drive = choose_drive(path, out)
        check_space(drive, shape.swap_bytes)
        console.print(
            f"A GPT with {shape.num_parameters / 1e6:.1f} million bf16 parameters learns Python's standard library, "
            f"twice; swap below {drive}.",
            highlight=False,
        )
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with TemporaryDirectory(prefix="nvme-offload-demo-", dir=drive) as swap:
            settings = RunSettings(
                size=shape,
                seed=seed,
                engine=engine,
                swap=Path(swap),
                threads=num_cpus(),
            )
            limits = (shape.steps, budget) if steps is None else (steps, math.inf)
            nvme, memory = train(settings, *limits, out, console)
        same = conclude(nvme, memory, {**options, "swap_parent": drive}, out, console)
    if not same:
        raise typer.Exit(1)


def choose_drive(path: Path | None, out: Path) -> Path:
    """The directory that will hold the swap directory: the one asked for, or one that is on a drive.

    Raises:
        KnobError: The directory is missing or lives in memory, or no candidate is on a drive.
    """
    if path is not None:
        check_folder("path", path)
    candidates = [out, Path.cwd(), Path.home(), Path("/var/tmp")] if path is None else [path]
    for candidate in candidates:
        if os.access(candidate, os.W_OK | os.X_OK) and not ((mount := mount_at(candidate)) and mount.is_memory):
            return candidate
    where = ", ".join(map(str, candidates))
    raise KnobError("path", f"{where}: memory and no drive; name a directory on a drive with --path")


def train(
    settings: RunSettings, steps: int, seconds: float, out: Path, console: Console
) -> tuple[RunResult, RunResult]:
    """Train both runs, a few steps each in turn, so that the machine's moods are those of both.

    Both end after their steps, or when the one on NVMe has used up its seconds.
    """
    in_memory = dataclasses.replace(settings, swap=None)
    with ExitStack() as children:
        nvme = children.enter_context(RunChild("state on NVMe", settings, steps, out, console))
        memory = children.enter_context(RunChild("state in memory", in_memory, steps, out, console))
        turns = by_turns((nvme, memory))
        while (taken := len(nvme.samples)) < steps and sum(one.seconds for one in nvme.samples) < seconds:
            for child in itertools.islice(turns, 2):
                child.train(min(TURN_STEPS, steps - taken))
        if taken < steps:
            words = f"both runs end after {taken} of {steps} steps: {seconds:.0f} s of a run are used up"
            console.print(f"[yellow]{words} (--budget or --steps changes that).")
        return nvme.finish("result"), memory.finish("result")


def conclude(nvme: RunResult, memory: RunResult, options: dict[str, Any], out: Path, console: Console) -> bool:
    """Make table, pictures and file of both runs; say whether they ended with the same bits."""
    differing = report.differences(nvme, memory)
    console.print()
    console.print(report.make_table(nvme, memory))
    engine, reason = nvme.stats["engine"], nvme.stats["engine_reason"]
    console.print(f"engine of the run on NVMe: {engine} ({reason})\n", markup=False, highlight=False)
    write_trace(report.all_spans(nvme), out / "trace.json")
    step, picture = None, "no picture: matplotlib is not installed; type: pip install 'nvme-offload[pictures]'"
    if find_spec("matplotlib") is not None:
        # It is slow to import, and a wrong option should be told at once.
        from nvme_offload.perf.experiments.demo.timeline import draw_timeline

        step = draw_timeline(nvme, out / "timeline.png")
        picture = f"timeline of step {step + 1}: {out / 'timeline.png'}"
    document = {
        "options": {**options, "timeline_step": step},
        "environment": environment([options["swap_parent"]]),
        "bit_identical": not differing,
        "differences": differing,
        "runs": {name: dataclasses.asdict(result) for name, result in (("nvme", nvme), ("cpu", memory))},
    }
    (out / "results.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
    console.print(
        picture,
        f"for ui.perfetto.dev: {out / 'trace.json'}",
        f"everything:         {out / 'results.json'}\n",
        sep="\n",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if differing:
        shown = ", ".join(differing[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
        console.print(f"[bold red]NOT bit-identical: {shown}. This is a bug; please report it with results.json.")
        return False
    console.print(
        f"[bold green]Bit-identical: all {nvme.num_parameters:,} parameters, their master weights and moments "
        f"have equal SHA-256 digests after {len(nvme.samples)} steps, and all losses are equal.",
        highlight=False,
    )
    return True
