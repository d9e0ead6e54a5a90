"""This project beside others: each trains the same model with the same data by turns with ours."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar

import torch
import typer
from torch import Tensor

from nvme_offload.offload.devices.device import HOST
from nvme_offload.offload.units import format_bytes
from ..measure.child import Child, ChildFailedError, Work
from ..measure.command_line import Folder, Quads, SaveTo, failures_in_words
from ..measure.comparison import Quad
from ..measure.machine import device_here, num_cpus
from .experiment import run_experiment
from .gpt import parse_size
from .peers.worker import Ended, Order, SideOrder, model_of, work

ENVIRONMENTS = Path(__file__).resolve().parents[2]
"""`make compare` makes an environment here for each peer that needs one."""


@dataclass(frozen=True)
class Contender:
    """One way to train the model."""

    name: str
    text: str  # its name in the table
    package: str | None = None  # the package that the peer needs; None: torch and this project alone
    on_device: bool = False  # whether it is for models on a GPU alone

    def weights(self, folder: Path) -> Path:
        """The file in `folder` for its master weights at the end."""
        return folder / f"{self.name}.weights"

    def python(self) -> str | None:
        """The interpreter that has its package; None where there is none."""
        if self.package is None or find_spec(self.package):
            return sys.executable
        own = ENVIRONMENTS / f".venv-compare-{self.package}" / "bin" / "python"
        return str(own) if own.exists() else None


OURS = Contender("ours", "nvme-offload, state on NVMe")
MEMORY = Contender("memory", "FSDP2 and torch.optim.AdamW, all in memory")
CONTENDERS = (
    OURS,
    MEMORY,
    Contender("ours-int8", "nvme-offload, states in 8 bits, on NVMe"),
    Contender("ours-memory", "nvme-offload, state in memory"),
    Contender("ours-backward", "nvme-offload, state in memory, updated in backward, unclipped", on_device=True),
    Contender("ours-device", "nvme-offload, state on the device", on_device=True),
    Contender("cpu-offload", "FSDP2 with CPUOffloadPolicy"),
    Contender("torchao", "torchao's CPUOffloadOptimizer", "torchao"),
    Contender("zero-offload", "DeepSpeed ZeRO-Offload, state in memory", "deepspeed", on_device=True),
    Contender("superoffload", "DeepSpeed SuperOffload, state in memory", "deepspeed", on_device=True),
    Contender("deepspeed", "DeepSpeed ZeRO-3, state on NVMe, pipelined", "deepspeed"),
)
DEVICE_COLUMNS = ("device memory", "B to device", "B from device")
"""Columns that are there for a model on a GPU."""
DEVICE_NOTE = (
    "device memory: the most that torch's allocator reserved; B to and from the device: bytes per parameter of the "
    "copies of one iteration, as torch.profiler sees them; what a kernel reads in host memory itself is no copy"
)


@dataclass
class Seen:
    """One contender was seen so."""

    digits: ClassVar[int] = 1  # of bytes per parameter
    contender: Contender
    numel: int  # parameters of the model
    on_device: bool = False  # whether it computed on a GPU
    problem: str | None = None  # why it could not train; None: it did
    version: str | None = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)  # more of each iteration, in the demo
    quads: list[Quad] = field(default_factory=list)  # seconds of an iteration: ours, theirs, theirs, ours
    ended: Ended | None = None
    distance: float | None = None
    """The distance of its weights from those of the run in memory, by how far those have moved; 0: the same bits."""
    bits_of_ours: bool = False  # whether its weights have the bits that ours on NVMe has

    @property
    def times_ours(self) -> float | None:
        """Its iteration over ours, the median of the quads."""
        return median(1 / quad.ratio for quad in self.quads) if self.quads else None

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        return {**asdict(self), "quads": [quad.rates for quad in self.quads], "times_ours": self.times_ours}

    @property
    def shown(self) -> dict[str, str]:
        """Its row, by the heads of the columns."""
        there = DEVICE_COLUMNS if self.on_device else ()
        columns = ("", "iteration", "times ours", "peak memory", *there, "B read", "B written", "distance")
        row = dict.fromkeys(columns, "")
        row[""] = self.contender.text + (f" ({self.version})" if self.version else "")
        if self.problem is not None or self.ended is None:
            return row | {"iteration": "cannot" if self.problem else "not yet"}
        for head, count in zip(("B read", "B written"), self.ended.moved or (), strict=False):
            row[head] = f"{count / self.numel / self.ended.iterations:.{self.digits}f}"
        crossed = [f"{count / self.numel:.1f}" for count in self.ended.copied or ()]
        row |= dict(zip(there, [format_bytes(self.ended.device_peak_bytes), *crossed], strict=False))
        if self.distance is not None:
            of_ours = ", the bits of ours" if self.bits_of_ours else ""
            row["distance"] = f"{self.distance:.1e}{of_ours}" if self.distance else "0"
        times = "1" if self.times_ours is None else f"{self.times_ours:.2f}"
        peak = format_bytes(self.ended.peak_bytes)
        return row | {"iteration": f"{median(self.seconds):.2f} s", "times ours": times, "peak memory": peak}


def notes(order: Order, all_found: Sequence[Seen]) -> list[str]:
    """Say what was done and what the columns mean, and why some could not train."""
    quads = max(len(found.quads) for found in all_found)
    return [
        f"{parse_size(order.size).num_parameters:,} parameters, {order.tokens} tokens an iteration; bf16 compute over "
        f"fp32 masters, AdamW, clipping at 1.0; {quads} x {order.turn} iterations each of ours, theirs, theirs, ours",
        "B: bytes per parameter and iteration as the kernel counts them; memory: the most resident in training",
        *([DEVICE_NOTE] if order.device != HOST.type else ()),
        "times ours: the median of the ratios within rounds of ours, theirs, theirs, ours, so that what slows a whole "
        "round does not count; above 1 is slower than ours",
        f"distance: how far the weights end from those of {MEMORY.text}, as a share of how far training moved them",
        *(f"{found.contender.text}: {found.problem}" for found in all_found if found.problem is not None),
    ]


def distance(weights: Path, reference: Path, size: str) -> float:
    """Return how far two trainings end from one another, as a share of how far the second moved its weights.

    Both are files with the master weights at the end, by name; `size`: layers and width of the model.
    """
    others, ends = load(weights), load(reference)
    start = {name: param.detach() for name, param in model_of(size).named_parameters()}

    def squared_distance(values: Mapping[str, Tensor]) -> float:
        return sum(float((end - values[name]).double().square().sum()) for name, end in ends.items())

    return float((squared_distance(others) / squared_distance(start)) ** 0.5)


def same_bits(some: Path, others: Path) -> bool:
    """Whether two files have the same weights, bit for bit."""
    first, second = load(some), load(others)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def load(path: Path) -> Mapping[str, Tensor]:
    """Weights by name, mapped from a file and not read."""
    weights: Mapping[str, Tensor] = torch.load(path, mmap=True, weights_only=True)
    return weights


def compare(
    path: Folder = Path(),
    size: Annotated[str, typer.Option(help="Layers and width of the model; 16x1024 has 269 million parameters.")] = (
        "16x1024"
    ),
    tokens: Annotated[int, typer.Option(min=128, help="Tokens of an iteration, a multiple of 128.")] = 512,
    quads: Quads = 2,
    device: Annotated[str | None, typer.Option(help="By default this machine's GPU, or the CPU: cpu.")] = None,
    only: Annotated[list[str] | None, typer.Option("--with", help="Beside whom; by default beside all.")] = None,
    save_to: SaveTo = None,
) -> None:
    """Train one model with ours and each of the others in turn: iteration time, memory, bytes and bits."""
    on = device or str(device_here() or HOST)
    others = [each for each in CONTENDERS if each is not OURS and (on != HOST.type or not each.on_device)]
    for name in only or ():
        if name not in {other.name for other in others}:
            known = ", ".join(other.name for other in others)
            raise typer.BadParameter(f"{name!r} is not one of {known}", param_hint="'--with'")
    # Distances are measured from the run in memory.
    others = [other for other in others if not only or other.name in only or other is MEMORY]
    with failures_in_words():
        parse_size(size)
    sizes: dict[str, Any] = {"size": size, "tokens": tokens, "threads": num_cpus(), "device": on}
    order = Order(**sizes)
    with TemporaryDirectory(prefix="nvme-offload-compare-", dir=path) as folder:
        compared, say = _compared(others, order, Path(folder), quads), partial(notes, order)
        kept: dict[str, Any] = {"save_to": save_to, "asked": {"order": asdict(order)}}
        run_experiment("compare", "Beside others", compared, say, path=path, **kept)


def _compared(others: Sequence[Contender], order: Order, folder: Path, quads: int) -> Iterator[Seen]:
    """Find out about ours and each of the others; the run in memory goes first."""
    ours = Seen(OURS, parse_size(order.size).num_parameters, order.device != HOST.type)
    yield ours
    for other in others:
        own, found = (Seen(each, ours.numel, ours.on_device) for each in (OURS, other))
        beside(own, found, lambda seen, python: Side(seen, python, order, folder), quads)
        if found.problem is None:
            ours.seconds += own.seconds
            ours.ended, ours.losses = own.ended, own.losses
            weights, of_ours, of_memory = (each.weights(folder) for each in (other, OURS, MEMORY))
            found.distance, ours.distance = (distance(each, of_memory, order.size) for each in (weights, of_ours))
            found.bits_of_ours = same_bits(weights, of_ours)
            if other is not MEMORY:
                weights.unlink()
            yield ours
        yield found


def tools_of(python: str) -> dict[str, str]:
    """Return the environment of an interpreter: a peer that compiles finds tools, and what it made stays with it."""
    folder = Path(python).parent
    tools = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    return {"PATH": tools, "TORCH_EXTENSIONS_DIR": str(folder.parent / "torch_extensions")}


class Side(Child):
    """A contender's process; `found` takes what is seen of it."""

    def __init__(
        self,
        found: Seen,
        python: str,
        template: SideOrder,
        folder: Path,
        logs: Path | None = None,
        does: Work | None = None,
    ) -> None:
        """Start it, to do the work of the peers or another. The folder on the drive gets its swap, log and weights.

        `template` is its order, but for who and where.
        """
        contender, log = found.contender, (logs or folder) / f"{found.contender.name}.log"
        super().__init__(does or work, log, python=python, environment=tools_of(python))
        self._found = found
        self._turn = template.turn
        swap = folder / contender.name
        swap.mkdir(exist_ok=True)
        order = replace(template, contender=contender.name, package=contender.package)
        self.tell(replace(order, swap=str(swap), weights=str(contender.weights(folder))))
        found.version = self.expect("ready")

    def turn(self) -> float:
        """Take a turn; return the mean seconds of an iteration."""
        self.tell(self._turn)
        seconds, losses, figures = self.expect("turn")
        self._found.seconds += seconds
        self._found.losses += losses
        self._found.figures.extend(figures)
        return float(sum(seconds)) / self._turn

    def end(self) -> None:
        """End it, its weights written down."""
        self._found.ended = self.finish("ended")


def beside(ours: Seen, theirs: Seen, side_of: Callable[[Seen, str], Side], quads: int) -> None:
    """Train both by turns, and note what is seen of either. One that cannot train says why."""
    if (python := theirs.contender.python()) is None:
        theirs.problem = f"{theirs.contender.package} is not installed"
        return
    with ExitStack() as stack:
        try:
            other = stack.enter_context(side_of(theirs, python))
        except ChildFailedError as error:
            theirs.problem = str(error).splitlines()[0]
            return
        own = stack.enter_context(side_of(ours, sys.executable))
        theirs.quads = [Quad.measure(own.turn, other.turn) for _ in range(quads)]
        own.end()
        other.end()
