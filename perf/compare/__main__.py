"""`python -m nvme_offload.perf.compare`: this project beside others, by turns, with the same model and data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nvme_offload.perf.compare.contenders import BY_NAME, CONTENDERS, MEMORY, OURS, Contender
from nvme_offload.perf.compare.records import Order
from nvme_offload.perf.compare.report import HEAD, draw
from nvme_offload.perf.compare.result import Result
from nvme_offload.perf.compare.rounds import Found, beside_ours, weights_file
from nvme_offload.perf.demo.options import parse_size
from nvme_offload.perf.measure.command_line import failures_in_words
from nvme_offload.perf.measure.environment import environment
from nvme_offload.perf.measure.machine import num_cpus
from nvme_offload.perf.measure.pictures import NO_PICTURE, can_draw
from nvme_offload.perf.measure.progress import Progress

app = typer.Typer(add_completion=False)


@app.command()
def compare(
    path: Annotated[
        Path, typer.Option(exists=True, file_okay=False, writable=True, help="Folder on the drive.")
    ] = Path(),
    size: Annotated[str, typer.Option(help="Layers and width of the model; 16x1024 has 269 million parameters.")] = (
        "16x1024"
    ),
    tokens: Annotated[int, typer.Option(min=128, help="Of an iteration, a multiple of 128.")] = 512,
    quads: Annotated[int, typer.Option(min=1, help="Rounds of ours, theirs, theirs, ours.")] = 2,
    only: Annotated[list[str] | None, typer.Option("--with", help="Beside whom; by default beside all.")] = None,
    picture: Annotated[Path | None, typer.Option(help="File for the picture.")] = None,
    save_to: Annotated[Path | None, typer.Option("--save", help="Folder for the results.")] = None,
) -> None:
    """Train one model with ours and each of the others in turn: iteration time, memory, bytes and bits."""
    progress, console = Progress(Console(stderr=True)), Console()
    others = _others(only)
    try:
        parse_size(size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--size'") from None
    order = Order(contender="", package=None, size=size, tokens=tokens, threads=num_cpus(), swap="", weights="")
    with failures_in_words(), TemporaryDirectory(prefix="nvme-offload-compare-", dir=path) as folder:
        all_found = _compare(others, order, Path(folder), quads, progress)
    result = Result(environment([path]), order, all_found)
    table = Table(*HEAD, box=None)
    for cells in result.rows():
        table.add_row(*cells)
    console.print(table)
    for note in result.notes():
        console.print(note, soft_wrap=True)
    if picture is not None:
        if can_draw():
            draw(all_found, picture)
            progress.say(f"saved {picture}")
        else:
            progress.say(NO_PICTURE)
    if save_to is not None:
        for file in result.save(save_to):
            progress.say(f"saved {file.name}")


def _others(names: Sequence[str] | None) -> list[Contender]:
    """Those that were asked for, the run in memory among them: distances are measured from it."""
    for name in names or ():
        if name not in BY_NAME or name == OURS.name:
            known = ", ".join(other.name for other in CONTENDERS if other is not OURS)
            raise typer.BadParameter(f"{name!r} is not one of {known}", param_hint="'--with'")
    return [
        other for other in CONTENDERS if other is not OURS and (not names or other.name in names or other is MEMORY)
    ]


def _compare(others: Sequence[Contender], order: Order, folder: Path, quads: int, progress: Progress) -> list[Found]:
    """What was seen of ours, and of each of the others; the run in memory goes first."""
    from nvme_offload.perf.compare.distance import Distance, same_bits

    ours, results, distance = Found(OURS), {}, None
    for other in sorted(others, key=lambda other: other is not MEMORY):
        progress.say(f"ours beside {other.text}")
        own, found = beside_ours(other, order, folder, quads)
        results[other.name] = found
        if found.problem is not None:
            progress.say(f"{other.text}: {found.problem}")
            continue
        ours.seconds += own.seconds
        ours.ended, ours.losses = own.ended, own.losses
        distance = distance or Distance(order.size, weights_file(MEMORY, folder))
        found.distance = distance.of(weights_file(other, folder))
        ours.distance = distance.of(weights_file(OURS, folder))
        found.bits_of_ours = same_bits(weights_file(other, folder), weights_file(OURS, folder))
        if other is not MEMORY:
            weights_file(other, folder).unlink()
    return [ours, *(results[other.name] for other in others)]


if __name__ == "__main__":
    app()
