"""The demo: it trains a small GPT twice, state on NVMe and in memory, by turns, and compares every bit."""

import contextlib
import dataclasses
import itertools
import math
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from nvme_offload.aio_native.registry import ENGINES
from nvme_offload.optim.trace import write_trace
from nvme_offload.perf.experiments.demo import report
from nvme_offload.perf.experiments.demo.place import ComputeDevice, choose_swap_parent
from nvme_offload.perf.experiments.demo.records import RunResult, RunSettings, StepSample
from nvme_offload.perf.experiments.demo.training import work
from nvme_offload.perf.measure import machine
from nvme_offload.perf.measure.child import Child, ChildFailedError, uninterrupted
from nvme_offload.perf.measure.command_line import choice_option
from nvme_offload.perf.measure.comparison import by_turns
from nvme_offload.perf.measure.gpt import PRESETS, ModelSize, parse_size
from nvme_offload.perf.measure.pictures import NO_PICTURE, can_draw

TURN_STEPS = 4
"""Steps that one run takes before the other goes on: an even number, since updates alternate in direction."""
ON_NVME, IN_MEMORY = "state on NVMe", "state in memory"
DEFAULT_BUDGET = 50.0
INTERRUPTED = 130
GIB = 2**30
LINES = 10
"""Lines of progress in a run, about."""


class RunChild(Child):
    """A run in a process of its own: it trains when it is told to, says how it gets on, and ends with its result.

    Args:
        name: of the run.
        settings: what to do.
        log: file for what the child says besides.
        console: gets the lines of progress.
    """

    def __init__(self, name: str, settings: RunSettings, log: Path, console: Console) -> None:
        super().__init__(work, log)
        self.samples: list[StepSample] = []
        """The steps taken so far."""
        self._name, self._steps, self._console = name, settings.steps, console
        self.tell(settings)
        self.arithmetic: str = self.expect("ready")
        """Precision of forward and backward."""
        self._started = time.monotonic()

    def train(self, steps: int) -> None:
        """Have the child take some steps, and wait until it has nothing left to do."""
        self.tell(steps)
        self.expect("turn ended", lambda kind, sample: self._note(sample))

    def _note(self, sample: StepSample) -> None:
        self.samples.append(sample)
        done = len(self.samples)
        if done in (1, self._steps) or done % max(1, self._steps // LINES) == 0:
            self._console.print(
                f"{self._name}: step {done}/{self._steps}, loss {sample.loss:.3f}, {sample.pace}, "
                f"{time.monotonic() - self._started:.0f} s",
                highlight=False,
            )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that was decided before the first child starts."""

    size: ModelSize
    steps: int | None
    budget: float
    engine: str
    device: ComputeDevice
    seed: int
    swap_parent: Path
    out: Path

    def settings(self, state_device: str, swap_path: Path | None, steps: int) -> RunSettings:
        """The settings of one run."""
        return RunSettings(
            state_device=state_device,
            layers=self.size.layers,
            width=self.size.width,
            sub_group_size=self.size.sub_group_size,
            steps=steps,
            seed=self.seed,
            engine=self.engine,
            compute_device=self.device.value,
            swap_path=None if swap_path is None else str(swap_path),
            threads=machine.num_cpus(),
        )


class Demo:
    """The two runs and what is made of them."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan = plan
        self.console = console

    def run(self) -> bool:
        """Do both runs; True where they ended with the same bits."""
        swap = Path(tempfile.mkdtemp(prefix="nvme-offload-demo-", dir=self.plan.swap_parent))
        try:
            nvme, memory = self.train(swap)
        finally:
            with uninterrupted():
                shutil.rmtree(swap, ignore_errors=True)
        return self.conclude(nvme, memory)

    def train(self, swap: Path) -> tuple[RunResult, RunResult]:
        """Train both runs, a few steps each in turn, so that the machine's moods are those of both.

        Without a number of steps both end when one has used up its budget.
        """
        plan = self.plan
        steps = plan.size.steps if plan.steps is None else plan.steps
        seconds = plan.budget if plan.steps is None else math.inf
        with contextlib.ExitStack() as children:
            nvme = children.enter_context(self.child(ON_NVME, self.plan.settings("nvme", swap, steps)))
            settings = dataclasses.replace(self.plan.settings("cpu", None, steps), arithmetic=nvme.arithmetic)
            memory = children.enter_context(self.child(IN_MEMORY, settings))
            turns = by_turns((nvme, memory))
            while (taken := len(nvme.samples)) < steps and sum(one.seconds for one in nvme.samples) < seconds:
                for child in itertools.islice(turns, 2):
                    child.train(min(TURN_STEPS, steps - taken))
            if taken < steps:
                words = f"both runs end after {taken} of {steps} steps: {plan.budget:.0f} s of a run are used up"
                self.console.print(f"[yellow]{words} (--budget or --steps changes that).")
            return nvme.finish("result"), memory.finish("result")

    @contextlib.contextmanager
    def child(self, name: str, settings: RunSettings) -> Iterator[RunChild]:
        """Start one run in a child process; show in the end all that it said besides."""
        log = self.plan.out / f"{name.replace(' ', '-').lower()}.log"
        try:
            with RunChild(name, settings, log, self.console) as child:
                yield child
            said = log.read_text(errors="replace").strip()
            if said:
                self.console.print(f"{name} said:\n{said}", style="yellow", markup=False, highlight=False)
        finally:
            if log.exists() and not log.stat().st_size:
                log.unlink()

    def conclude(self, nvme: RunResult, memory: RunResult) -> bool:
        """Make table, pictures, file and verdict of both runs."""
        console, out = self.console, self.plan.out
        differing = report.differences(nvme, memory)
        console.print()
        console.print(report.make_table(nvme, memory))
        if nvme.arithmetic != "bf16":
            console.print(f"This processor is slow at bf16: forward and backward computed in {nvme.arithmetic}.")
        engine, reason = nvme.stats["engine"], nvme.stats["engine_reason"]
        console.print(f"engine of the run on NVMe: {engine} ({reason})", markup=False, highlight=False)
        write_trace(report.all_spans(nvme), out / "trace.json")
        step = self.draw(nvme)
        options = dataclasses.asdict(self.plan) | {"timeline_step": step}
        runs = {"nvme": nvme, "cpu": memory}
        report.write_results(out / "results.json", options, self.plan.swap_parent, runs, differing)
        console.print()
        drawn = NO_PICTURE if step is None else f"timeline of step {step + 1}: {out / 'timeline.png'}"
        console.print(drawn, markup=False, highlight=False, soft_wrap=True)
        console.print(f"for ui.perfetto.dev: {out / 'trace.json'}", highlight=False, soft_wrap=True)
        console.print(f"everything:         {out / 'results.json'}", highlight=False, soft_wrap=True)
        console.print()
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

    def draw(self, nvme: RunResult) -> int | None:
        """Draw the picture; returns the step that it shows, None where nothing can be drawn."""
        if not can_draw():
            return None
        # matplotlib is slow to import, and a wrong option should be told at once
        from nvme_offload.perf.experiments.demo.timeline import draw_timeline

        return draw_timeline(nvme, self.plan.out / "timeline.png")


def _check_space(plan: Plan) -> None:
    """Refuses to start where the swap would not fit."""
    needed, free = plan.size.swap_bytes, shutil.disk_usage(plan.swap_parent).free
    if free < needed:
        raise typer.BadParameter(
            f"{plan.swap_parent} has {free / GIB:.2f} GiB free and the swap needs {needed / GIB:.2f} GiB; "
            "free some space, choose another directory, or a smaller --size",
            param_hint="--path",
        )


def _on_terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def demo(
    size: Annotated[str, typer.Option(help=f"{', '.join(PRESETS)}, or LAYERSxWIDTH such as 8x512.")] = "small",
    steps: Annotated[
        int | None, typer.Option(min=2, max=100_000, help="Steps of each run; without it what fits the budget.")
    ] = None,
    budget: Annotated[
        float, typer.Option(min=1, help="Seconds that a run may train, without --steps.")
    ] = DEFAULT_BUDGET,
    path: Annotated[
        Path | None,
        typer.Option(help="Directory for the swap file, on the drive to use. Default: --out, or another on a drive."),
    ] = None,
    engine: Annotated[str, choice_option("--engine", choices=("auto", *ENGINES), text="Engine of the I/O.")] = "auto",
    device: Annotated[ComputeDevice, typer.Option(help="Where forward and backward run.")] = ComputeDevice.CPU,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and batches.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for pictures and results.")] = Path("demo-out"),
) -> None:
    """Train a byte-level GPT twice, with optimizer state on NVMe and in memory, and compare every bit."""
    console = Console()
    try:
        shape = parse_size(size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--size") from None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{out}: {error.strerror}", param_hint="--out") from None
    try:
        swap_parent = choose_swap_parent(path, out)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--path") from None
    plan = Plan(
        size=shape,
        steps=steps,
        budget=budget,
        engine=engine,
        device=device,
        seed=seed,
        swap_parent=swap_parent,
        out=out,
    )
    _check_space(plan)
    console.print(
        f"A GPT with {shape.num_parameters / 1e6:.1f} million bf16 parameters learns Python's standard library, twice; "
        f"swap below {swap_parent}.",
        highlight=False,
    )
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        same = Demo(plan, console).run()
    except KeyboardInterrupt:
        console.print("[yellow]Interrupted; the swap is removed.")
        raise typer.Exit(INTERRUPTED) from None
    except ChildFailedError as error:
        console.print("[bold red]The run failed.")
        console.print(str(error), markup=False, highlight=False)
        console.print(f"Nothing is left on the drive; what the run said is in {out}.", markup=False, highlight=False)
        raise typer.Exit(1) from None
    if not same:
        raise typer.Exit(1)
