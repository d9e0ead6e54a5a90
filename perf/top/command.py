"""`offload top`: watch a run, while it goes on and afterwards."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from nvme_offload.perf.plan.machine import Drives, MachineError
from nvme_offload.perf.top.runs import NoRunError, Run, is_over, runs_of
from nvme_offload.perf.top.view import DriveTable, view


def top(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory, a folder with such, or the file of run_log.")
    ],
    bench: Annotated[
        Path | None, typer.Option(help="The drives as offload bench --json measured them: their limit.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option(help="Look once, also on a terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the latest record of each run as a line of JSON.")] = (
        False
    ),
) -> None:
    """Watch a run: where its bytes are, how fast they move, what it waits for, and how its drives are.

    Live on a terminal until the run ends or Ctrl-C; elsewhere one look. Nothing of the run is touched.
    """
    try:
        limit = Drives.of_bench(bench).mixed if bench else None
    except MachineError as error:
        raise typer.BadParameter(str(error), param_hint="'--bench'") from None
    try:
        found = runs_of(run)
    except NoRunError as error:
        typer.echo(f"offload: {error}", err=True)
        raise typer.Exit(2) from None
    console = Console(highlight=False)
    if as_json:
        for each in found:
            typer.echo(json.dumps(each.record))
    elif once or not console.is_terminal:
        console.print(_page(found, limit, DriveTable()))
    else:
        _watch(run, found, limit, interval, console)


def _page(runs: list[Run], limit: float | None, drives: DriveTable) -> RenderableType:
    now = time.time()
    return Group(*(view(run, limit, drives, now) for run in runs))


def _watch(path: Path, runs: list[Run], limit: float | None, interval: float, console: Console) -> None:
    """Look again and again, until every run is over or the user has seen enough."""
    drives = DriveTable()
    with Live(_page(runs, limit, drives), console=console, auto_refresh=False) as live:
        try:
            while not all(is_over(run) for run in runs):
                time.sleep(interval)
                runs = _looked_again(path, runs)
                live.update(_page(runs, limit, drives), refresh=True)
        except KeyboardInterrupt:
            return


def _looked_again(path: Path, before: list[Run]) -> list[Run]:
    """The runs as they are now; those that are gone as they were last."""
    try:
        found: dict[Any, Run] = {run.key: run for run in runs_of(path)}
    except NoRunError:
        found = {}
    return [found.pop(run.key, run.gone()) for run in before] + list(found.values())
