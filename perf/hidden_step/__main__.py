"""`python -m nvme_offload.perf.hidden_step`: how long an iteration is with each schedule."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from nvme_offload.perf.bench.comparison import comparison_of
from nvme_offload.perf.hidden_step import cells
from nvme_offload.perf.hidden_step import drive as schedules
from nvme_offload.perf.hidden_step.models import Shape
from nvme_offload.perf.hidden_step.training import Setup
from nvme_offload.perf.measure.environment import environment
from nvme_offload.perf.measure.progress import Progress
from nvme_offload.perf.measure.results import page, save
from nvme_offload.perf.planning.schedule import OVERLAPS, OverlapStep

LIMIT = 1.05
"""Most that an iteration may take over what the model of `offload plan` says."""

app = typer.Typer(add_completion=False, no_args_is_help=True)
Save = Annotated[Path | None, typer.Option("--save", help="Folder for the results: JSON and Markdown.")]
Buffers = Annotated[int, typer.Option(min=2, help="Staging buffers.")]
Schedule = Annotated[OverlapStep | None, typer.Option(help="One schedule; by default each in turn.")]


@app.command()
def paced(
    shape: Annotated[Shape, typer.Option(help="lm: a quarter of the parameters in embedding and head.")] = "layers",
    overlap_step: Schedule = None,
    buffers: Buffers = 4,
    width: Annotated[int, typer.Option(min=64, help="Of the matrices, each a subgroup.")] = 512,
    subgroups: Annotated[int, typer.Option(min=8, help="Number of matrices.")] = 48,
    io_seconds: Annotated[float, typer.Option(help="That the drive takes for all bytes of an iteration.")] = 1.5,
    iterations: Annotated[int, typer.Option(min=2, help="Measured in each cell; an even number.")] = 4,
    save_to: Save = None,
) -> None:
    """A drive of an exact rate, whose bytes are in memory: iterations over the ideal, beside the model of the plan."""
    progress, console = Progress(Console(stderr=True)), Console()
    setup = Setup(width=width, subgroups=subgroups, buffers=buffers, shape=shape)
    overlaps = OVERLAPS if overlap_step is None else (overlap_step,)
    found = []
    with TemporaryDirectory(prefix="nvme-offload-hidden-step-") as folder:
        for cell in cells.measure(setup, overlaps, cells.RATIOS, io_seconds, iterations, Path(folder)):
            found.append(cell)
            progress.say("  ".join(cell.row()))
        facts = environment([])
    dist.destroy_process_group()
    within = sum(cell.quotient <= LIMIT for cell in found)
    notes = [
        f"{setup.numel:,} parameters ({shape}) in {subgroups} subgroups, {buffers} staging buffers; one server of an "
        f"exact rate that moves {setup.bytes_moved('off'):,} bytes in {io_seconds:g} s (a tenth more with speculate, "
        "whose state is durable); layers sleep",
        "the ideal is the longer of an iteration without a drive's time and of moving every subgroup there and back; "
        "the bound is what the model of `offload plan` says of it",
        f"at most {LIMIT:g} times the bound: {within} of {len(found)}",
    ]
    _show(console, cells.HEAD, [cell.row() for cell in found], notes)
    if save_to:
        document = {"environment": facts, "results": [cell.to_dict() for cell in found]}
        text = page("Iterations over a paced drive", facts, cells.HEAD, [cell.row() for cell in found], notes)
        for file in save(save_to, f"hidden-step-{shape}", json.loads(json.dumps(document)), text):
            progress.say(f"saved {file.name}")


@app.command()
def clipped(
    share: Annotated[float, typer.Option(min=0, max=1, help="Of the steps, chosen by chance, that clip.")] = 0.95,
    quads: Annotated[int, typer.Option(min=1, help="Rounds.")] = 4,
    buffers: Buffers = 4,
    width: Annotated[int, typer.Option(min=64, help="Of the matrices, each a subgroup.")] = 512,
    subgroups: Annotated[int, typer.Option(min=8, help="Number of matrices.")] = 48,
    iterations: Annotated[int, typer.Option(min=2, help="Measured each time.")] = 20,
    io_seconds: Annotated[
        float, typer.Option(help="That the drive, and as long computing, takes in an iteration.")
    ] = 0.3,
) -> None:
    """Steps most of which clip, over a paced drive: iterations with speculate over those with forward, both durable."""
    progress, setup = Progress(Console(stderr=True)), Setup(width=width, subgroups=subgroups, buffers=buffers)
    found = []
    with TemporaryDirectory(prefix="nvme-offload-hidden-step-") as folder:
        for quad, control in cells.clipped(setup, share, io_seconds, iterations, quads, Path(folder)):
            found.append((quad, control))
            progress.say(f"{quad.ratio:.3f}, control {control.ratio:.3f}")
    dist.destroy_process_group()
    outcome = comparison_of(found)
    low, high = outcome.interval
    typer.echo(
        f"speculate over forward, {share:.0%} of the steps clipped: {outcome.quotient:.3f} ({low:.3f} to {high:.3f}), "
        f"control {outcome.control:.3f}"
    )


@app.command()
def drive(
    path: Annotated[Path, typer.Option(exists=True, file_okay=False, writable=True, help="Folder on the drive.")],
    overlap_step: Schedule = None,
    quads: Annotated[int, typer.Option(min=1, help="Rounds for each schedule.")] = 10,
    real: Annotated[bool, typer.Option(help="269 million parameters that compute; else layers that sleep.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Of a batch of the model that computes.")] = schedules.REAL_TOKENS,
    buffers: Buffers = 4,
    width: Annotated[int, typer.Option(min=64, help="Of the matrices of layers that sleep.")] = 1024,
    save_to: Save = None,
) -> None:
    """A real drive: iterations with a schedule and without, in turn; sleeping as long as the drive moves the state.

    What is known is saved after every round, under one name.
    """
    progress, facts = Progress(Console(stderr=True)), environment([path])
    setup = Setup(width=width, buffers=buffers)
    what = (
        f"269 million parameters, computed for {tokens} tokens"
        if real
        else f"{setup.numel:,} parameters, layers sleep as long as the I/O"
    )
    notes = [
        f"{what}; {buffers} staging buffers; {schedules.ITERATIONS} iterations each time, and all waited for between",
        f"left out: rounds in which an iteration in memory was off by more than {schedules.TOLERANCE:.0%}",
    ]
    outcomes: dict[OverlapStep, schedules.Outcome] = {}
    files: list[Path] = []
    for name in OVERLAPS[1:] if overlap_step is None else (overlap_step,):
        if real:
            rounds = schedules.real(name, tokens, buffers, quads, path)
        else:
            rounds = schedules.sleeping(setup, name, quads, path)
        for one in rounds:
            before = outcomes[name].rounds if name in outcomes else ()
            outcomes[name] = schedules.Outcome(name, (*before, one))
            progress.say(
                f"{name}: {one.quad.ratio:.3f}, control {one.control.ratio:.3f}{'' if one.counts else ', left out'}"
            )
            if save_to:
                files = _save_outcomes(save_to, "real" if real else "sleeping", facts, list(outcomes.values()), notes)
    dist.destroy_process_group()
    _show(Console(), schedules.HEAD, [outcome.row() for outcome in outcomes.values()], notes)
    for file in files:
        progress.say(f"saved {file.name}")


def _save_outcomes(
    folder: Path, what: str, facts: dict[str, Any], outcomes: list[schedules.Outcome], notes: list[str]
) -> list[Path]:
    """Write what is known, over what was known before."""
    rows = [outcome.row() for outcome in outcomes]
    document = {"environment": facts, "results": [outcome.to_dict() for outcome in outcomes]}
    text = page("Iterations on a drive, beside the plain order", facts, schedules.HEAD, rows, notes)
    return save(folder, f"hidden-step-{what}", json.loads(json.dumps(document)), text)


def _show(console: Console, head: tuple[str, ...], rows: list[list[str]], notes: list[str]) -> None:
    table = Table(*head, box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


if __name__ == "__main__":
    app()
