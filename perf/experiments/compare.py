"""This project beside others: each trains the same model with the same data by turns with ours."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from nvme_offload.perf.experiments.experiment import run_experiment
from nvme_offload.perf.experiments.gpt import parse_size
from nvme_offload.perf.experiments.peers.result import (
    CONTENDERS,
    ITERATIONS,
    MEMORY,
    OURS,
    Contender,
    Seen,
    distance,
    notes,
    same_bits,
)
from nvme_offload.perf.experiments.peers.worker import Order, work
from nvme_offload.perf.measure.child import Child, ChildFailedError
from nvme_offload.perf.measure.command_line import Folder, Quads, SaveTo, failures_in_words
from nvme_offload.perf.measure.comparison import Quad
from nvme_offload.perf.measure.machine import num_cpus


def compare(
    path: Folder = Path(),
    size: Annotated[str, typer.Option(help="Layers and width of the model; 16x1024 has 269 million parameters.")] = (
        "16x1024"
    ),
    tokens: Annotated[int, typer.Option(min=128, help="Tokens of an iteration, a multiple of 128.")] = 512,
    quads: Quads = 2,
    only: Annotated[list[str] | None, typer.Option("--with", help="Beside whom; by default beside all.")] = None,
    save_to: SaveTo = None,
) -> None:
    """Train one model with ours and each of the others in turn: iteration time, memory, bytes and bits."""
    others = [other for other in CONTENDERS if other is not OURS]
    for name in only or ():
        if name not in {other.name for other in others}:
            known = ", ".join(other.name for other in others)
            raise typer.BadParameter(f"{name!r} is not one of {known}", param_hint="'--with'")
    # Distances are measured from the run in memory.
    others = [other for other in others if not only or other.name in only or other is MEMORY]
    with failures_in_words():
        parse_size(size)
    order = Order(contender="", package=None, size=size, tokens=tokens, threads=num_cpus(), swap="", weights="")
    with TemporaryDirectory(prefix="nvme-offload-compare-", dir=path) as folder:
        compared, say = _compared(others, order, Path(folder), quads), partial(notes, order)
        kept: dict[str, Any] = {"save_to": save_to, "asked": {"order": asdict(order)}}
        run_experiment("compare", "Beside others", compared, say, path=path, **kept)


def _compared(others: Sequence[Contender], order: Order, folder: Path, quads: int) -> Iterator[Seen]:
    """Find out about ours and each of the others; the run in memory goes first."""
    ours = Seen(OURS, parse_size(order.size).num_parameters)
    yield ours
    for other in others:
        own, found = _beside_ours(other, order, folder, quads)
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


class Side(Child):
    """A contender's process; `found` takes what is seen of it."""

    def __init__(self, found: Seen, python: str, template: Order, folder: Path) -> None:
        """Start it. The folder on the drive gets its swap, log and weights; `template`: all but who and where."""
        # A peer that compiles when it is first used looks for its tools on PATH; what it made stays with its packages.
        bin_folder, contender = Path(python).parent, found.contender
        tools = os.pathsep.join((str(bin_folder), str(Path(sys.executable).parent), os.environ["PATH"]))
        made = {"PATH": tools, "TORCH_EXTENSIONS_DIR": str(bin_folder.parent / "torch_extensions")}
        super().__init__(work, folder / f"{contender.name}.log", python=python, environment=made)
        self._found = found
        swap = folder / contender.name
        swap.mkdir(exist_ok=True)
        order = replace(template, contender=contender.name, package=contender.package)
        self.tell(replace(order, swap=str(swap), weights=str(contender.weights(folder))))
        found.version = self.expect("ready")

    def turn(self) -> float:
        """Take a turn; return the mean seconds of an iteration."""
        self.tell(ITERATIONS)
        seconds, losses = self.expect("turn")
        self._found.seconds += seconds
        self._found.losses += losses
        return float(sum(seconds)) / ITERATIONS

    def end(self) -> None:
        """End it, its weights written down."""
        self._found.ended = self.finish("ended")


def _beside_ours(contender: Contender, template: Order, folder: Path, quads: int) -> tuple[Seen, Seen]:
    """Train both by turns; return what was seen of ours and of the other. One that cannot train says why."""
    numel = parse_size(template.size).num_parameters
    ours, theirs = Seen(OURS, numel), Seen(contender, numel)
    if (python := contender.python()) is None:
        theirs.problem = f"{contender.package} is not installed"
        return ours, theirs
    with ExitStack() as stack:
        try:
            other = stack.enter_context(Side(theirs, python, template, folder))
        except ChildFailedError as error:
            theirs.problem = str(error).splitlines()[0]
            return ours, theirs
        own = stack.enter_context(Side(ours, sys.executable, template, folder))
        theirs.quads = [Quad.measure(own.turn, other.turn) for _ in range(quads)]
        own.end()
        other.end()
    return ours, theirs
