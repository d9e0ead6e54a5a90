"""The demo: it trains a small GPT twice, state on NVMe and in memory, by turns, and compares every bit."""

import hashlib
import os
import signal
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from nvme_offload import OffloadAdamW
from nvme_offload.aio_native.registry import ENGINES
from nvme_offload.optim.telemetry.stats import Span
from nvme_offload.optim.telemetry.trace import write_trace
from nvme_offload.perf.experiments.experiment import Row, run_experiment
from nvme_offload.perf.experiments.gpt import CONTEXT, PRESETS, ByteGPT, ModelSize, batches, load_corpus, parse_size
from nvme_offload.perf.measure.child import Child, Send, Work
from nvme_offload.perf.measure.command_line import (
    KnobError,
    check_folder,
    check_save,
    check_space,
    choice_option,
    failures_in_words,
)
from nvme_offload.perf.measure.comparison import Quad
from nvme_offload.perf.measure.machine import (
    mount_at,
    moved_since,
    num_cpus,
    peak_resident_bytes,
    settled_resident_bytes,
    storage_bytes,
)
from nvme_offload.perf.measure.sections import section

MICRO_BATCH, ACCUMULATION = 8, 2
LEARNING_RATE = 2e-3
SEED = 0  # of weights and batches
LEARNING_RATE_WIDTH = 384  # wider models get less, in proportion
WARM_UP_PASSES = 2
DIGESTED = ("master", "exp_avg", "exp_avg_sq")

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step; its loss is in nats per byte."""

    loss: float
    total_norm: float
    started_ns: int  # when its first forward began
    called_ns: int
    returned_ns: int  # when `optimizer.step()` was called and when it returned; writes may run behind it
    share_of_ideal: float | None
    """The iteration came so near to the longer of its computing and its bytes; None is not known."""
    limit: str

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return (self.returned_ns - self.started_ns) / 1e9


@dataclass(kw_only=True)
class DemoRun:
    """One child process has found this by now. A step before the first is in nothing: it makes what others only use."""

    settings: dict[str, Any]
    num_parameters: int
    steps: list[Step] = field(default_factory=list)
    spans: set[Span] = field(default_factory=set)
    peak_bytes: int = 0
    optimizer_bytes: int = 0
    """Resident memory after training, less what was resident before the optimizer existed; no gradients in either."""
    kernel_bytes: tuple[int, int] | None = None  # bytes read and written by the process, as the kernel counts them
    counted_bytes: tuple[int, int] = (0, 0)  # the same as the optimizer counts them
    busy_seconds: float = 0.0  # of the drive meanwhile
    stats: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float | None:
        """Bytes per second while a read or a write was under way; None where nothing moved."""
        return sum(self.counted_bytes) / self.busy_seconds if self.busy_seconds else None


def work(section: dict[str, Any], size: ModelSize, threads: int, told: Iterator[Any], send: Send) -> None:
    """Train in a child process: it is told numbers of steps, and sends its run; after each it is quiet until the next.

    What the optimizer holds on a drive is gone at the end, also after an error.
    """
    torch.set_num_threads(threads)  # the same in every process: arithmetic is repeatable
    torch.manual_seed(SEED)
    # Processors without bf16 instructions take many times as long to compute in bf16.
    model = ByteGPT(size, CONTEXT, torch.float32).bfloat16()
    stream = batches(load_corpus(), MICRO_BATCH, SEED)
    before = _warm_up(model, stream)
    with OffloadAdamW(
        model.parameters(),
        lr=LEARNING_RATE * min(1.0, LEARNING_RATE_WIDTH / size.width),
        betas=(0.9, 0.95),
        weight_decay=0.1,
        offload=section,
    ) as optimizer:
        optimizer.overlap_with(model)  # a step goes on under the next forward
        run = DemoRun(settings=section, num_parameters=sum(param.numel() for param in model.parameters()))
        _step(model, optimizer, stream)
        optimizer.synchronize()
        by_kernel, before_steps = storage_bytes(), optimizer.stats()
        send("run", run)
        for steps in told:
            optimizer.begin_iteration()
            for _ in range(steps):
                run.steps.append(_step(model, optimizer, stream))
                run.spans.update(optimizer.timeline())
            optimizer.synchronize()
            run.spans.update(optimizer.timeline())  # what ran on behind the last step
            now = optimizer.stats()
            run.peak_bytes, run.stats = peak_resident_bytes(), asdict(now)
            run.kernel_bytes = moved_since(by_kernel)
            run.counted_bytes = (
                now.bytes_read - before_steps.bytes_read,
                now.bytes_written - before_steps.bytes_written,
            )
            run.busy_seconds = now.drive_busy_seconds - before_steps.drive_busy_seconds
            send("run", run)
        run.optimizer_bytes = settled_resident_bytes() - before
        run.digests = _digest_all(model, optimizer)
    send("run", run)


def _warm_up(model: nn.Module, stream: Batches) -> int:
    """Forward and backward that change nothing; gives the memory that is resident afterwards.

    An optimizer of torch's is made, too: the first one of a process imports much of torch that is not our doing.
    """
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for inputs, targets in islice(stream, WARM_UP_PASSES):
        model(inputs, targets).backward()
        model.zero_grad(set_to_none=True)
    return settled_resident_bytes()


def _step(model: nn.Module, optimizer: OffloadAdamW, stream: Batches) -> Step:
    started, loss = time.monotonic_ns(), 0.0
    for inputs, targets in islice(stream, ACCUMULATION):
        with optimizer.passing("forward"):
            part = model(inputs, targets) / ACCUMULATION
        with optimizer.passing("backward"):
            part.backward()
        loss += part.item()
    called = time.monotonic_ns()
    optimizer.step()
    returned = time.monotonic_ns()
    optimizer.zero_grad()
    stats = optimizer.stats()
    return Step(
        loss=loss,
        total_norm=stats.total_norm,
        started_ns=started,
        called_ns=called,
        returned_ns=returned,
        share_of_ideal=stats.iteration.share_of_ideal if stats.iteration else None,
        limit=stats.iteration.limit if stats.iteration else "",
    )


def _digest_all(model: nn.Module, optimizer: OffloadAdamW) -> dict[str, str]:
    """SHA-256 of every parameter and of all its state, one tensor in memory at a time."""

    def digest(tensor: Tensor) -> str:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(raw.numpy().data).hexdigest()

    digests = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        digests[name] = digest(parameter)
        digests |= {f"{name} {key}": digest(state[key]) for key in DIGESTED}
        digests[f"{name} step"] = str(float(state["step"]))
    return digests


TURN_STEPS = 4
"""Steps that one run takes before the other goes on: an even number, since updates alternate in direction."""
MIB = 2**20
UNKNOWN = "unknown"


class DemoSide(Child):
    """A run in a process of its own. What it says besides is left in a file in `out`."""

    def __init__(self, name: str, its_work: Work, out: Path) -> None:
        self._said = out / f"{name.replace(' ', '-').lower()}.log"
        super().__init__(its_work, self._said)
        self.name = name
        self.run: DemoRun = self.expect("run")  # the run as far as it is known

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if not self._said.stat().st_size:
            self._said.unlink()

    def turn(self) -> float:
        """Have it take some steps, and wait until it has nothing left to do; give the mean seconds of a step."""
        self.tell(TURN_STEPS)
        self.run = self.expect("run")
        return mean(step.seconds for step in self.run.steps[-TURN_STEPS:])

    def end(self) -> None:
        """End it, and have its digests."""
        self.run = self.finish("run")

    def row(self) -> Row:
        """Show what is known of it."""
        run, steps = self.run, self.run.steps
        shares = [step.share_of_ideal for step in steps if step.share_of_ideal is not None]
        shown = {
            "": self.name,
            "steps": str(len(steps)),
            "a step": f"{median(step.seconds for step in steps):.3f} s",
            "in step()": f"{median((step.returned_ns - step.called_ns) / 1e9 for step in steps):.3f} s",
            "of the ideal": f"{median(shares):.0%} ({steps[-1].limit})" if shares else UNKNOWN,
            "peak memory": f"{run.peak_bytes / MIB:,.0f} MiB",
            "the optimizer's": f"{run.optimizer_bytes / MIB:,.0f} MiB" if run.digests else "",
            "B read": _per_parameter(run, 0),
            "B written": _per_parameter(run, 1),
            "GB/s": f"{run.rate / 1e9:.2f}" if run.rate else "",
            "loss": f"{mean(step.loss for step in steps[-10:]):.4f}",
        }
        return Row(shown, {name: value for name, value in asdict(run).items() if name != "spans"})


def _per_parameter(run: DemoRun, way: int) -> str:
    """Bytes per parameter and step, by the kernel's count and by the optimizer's."""
    elements = run.num_parameters * len(run.steps)
    counts = (run.kernel_bytes, run.counted_bytes)
    return " / ".join(UNKNOWN if count is None else f"{count[way] / elements:.2f}" for count in counts)


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
    engine: Annotated[str, choice_option("--engine", choices=("auto", *ENGINES), text="Engine of the I/O.")] = "auto",
    out: Annotated[Path, typer.Option(help="Directory for the trace and results.")] = Path("demo-out"),
) -> None:
    """Train a byte-level GPT twice, with optimizer state on NVMe and in memory, and compare every bit."""
    asked = {**locals(), "path": str(path), "out": str(out)}
    with failures_in_words():
        shape = parse_size(size)
        check_save(out, "out")
        out.mkdir(parents=True, exist_ok=True)
        drive = choose_drive(path, out)
        check_space(drive, shape.swap_bytes)
    title = (
        f"A GPT with {shape.num_parameters / 1e6:.1f} million bf16 parameters learns Python's standard library, twice"
    )
    typer.echo(f"{title}; swap below {drive}.", err=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ended: list[DemoSide] = []
    with TemporaryDirectory(prefix="nvme-offload-demo-", dir=drive) as swap:
        works = [partial(work, section_of(shape, engine, each), shape, num_cpus()) for each in (Path(swap), None)]
        measured = by_turns(works, ceil((steps or shape.steps) / (2 * TURN_STEPS)), out, ended)
        with closing(measured):
            run_experiment("demo", title, measured, lambda _: conclusion(ended), path=drive, save_to=out, asked=asked)
    write_trace(sorted(ended[0].run.spans, key=lambda span: span.start_ns), out / "trace.json")
    typer.echo(f"for ui.perfetto.dev: {out / 'trace.json'}")
    if differences(*(side.run for side in ended)):
        raise typer.Exit(1)


def choose_drive(path: Path | None, out: Path) -> Path:
    """The directory that will hold the swap directory: the one asked for, or one that is on a drive."""
    if path is not None:
        check_folder("path", path)
    candidates = [out, Path.cwd(), Path.home(), Path("/var/tmp")] if path is None else [path]
    for candidate in candidates:
        if os.access(candidate, os.W_OK | os.X_OK) and not ((mount := mount_at(candidate)) and mount.is_memory):
            return candidate
    where = ", ".join(map(str, candidates))
    raise KnobError("path", f"{where}: memory and no drive; name a directory on a drive with --path")


def section_of(size: ModelSize, engine: str, swap: Path | None) -> dict[str, Any]:
    """The section of a run, as a user would write it; without a folder for its swap all is in memory."""
    aio = {"engine": engine, "direct": "optional"}
    return section(swap, state={"buffer_count": 4}, sub_group_size=size.sub_group_size, aio=aio, gradient_clipping=1.0)


def by_turns(works: Sequence[Work], quads: int, out: Path, ended: list[DemoSide]) -> Generator[Row, None, None]:
    """Train both runs, a few steps each in turn, so that the machine's moods are those of both.

    Both end after these quads; then they are in `ended`.
    """
    with DemoSide("state on NVMe", works[0], out) as nvme, DemoSide("state in memory", works[1], out) as memory:
        for _ in range(quads):
            Quad.measure(nvme.turn, memory.turn)
            yield from (nvme.row(), memory.row())
        for side in (nvme, memory):
            side.end()
            ended.append(side)
            yield side.row()


def conclusion(ended: Sequence[DemoSide]) -> list[str]:
    """Say what the columns mean and, when both runs have ended, whether their bits are the same."""
    said = [
        "B: bytes per parameter and step, as the kernel and as the optimizer count them; GB/s while reading or writing",
        "peak memory: resident; the optimizer's: resident after training, less what was before it was made",
    ]
    if len(ended) < 2:
        return said
    nvme, memory = (side.run for side in ended)
    said.append(f"engine of the run on NVMe: {nvme.stats['engine']} ({nvme.stats['engine_reason']})")
    if names := differences(nvme, memory):
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return [*said, f"NOT bit-identical: {shown}. This is a bug; please report it with the saved files."]
    same = f"all {nvme.num_parameters:,} parameters, their master weights and moments have equal SHA-256 digests"
    return [*said, f"Bit-identical: {same} after {len(nvme.steps)} steps, and all losses are equal."]


def differences(nvme: DemoRun, memory: DemoRun) -> list[str]:
    """Names of all that differs between the runs; empty where they are bit-identical."""
    names = [name for name in nvme.digests | memory.digests if nvme.digests.get(name) != memory.digests.get(name)]
    for number, (ours, other) in enumerate(zip(nvme.steps, memory.steps, strict=False), 1):
        names += [f"loss of step {number}"] * (ours.loss != other.loss)
        names += [f"gradient norm of step {number}"] * (ours.total_norm != other.total_norm)
    names += ["number of steps"] * (len(nvme.steps) != len(memory.steps))
    return names + ["digests, which are missing"] * (not nvme.digests)
