"""`offload report`: a page of HTML about a run or a benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from nvme_offload.optim.run_record import read_records
from nvme_offload.perf.measure.command_line import failures_in_words
from nvme_offload.perf.report.bench import bench_page
from nvme_offload.perf.report.run import run_page


def report(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file of run_log, or what offload bench --json printed or saved.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="By default FILE with the ending .html.")
    ] = None,
) -> None:
    """Write one page of HTML about a run or a benchmark, with its pictures in it.

    The page stands alone: it needs no network, and holds the numbers that its pictures were drawn from.
    """
    target = file.with_suffix(".html") if output is None else output
    try:
        text = page_of(file)
    except (OSError, ValueError) as error:
        typer.echo(f"offload: {error}", err=True)
        raise typer.Exit(2) from None
    with failures_in_words():
        target.write_text(text, encoding="utf-8")
    typer.echo(f"saved {target}", err=True)


def page_of(file: Path) -> str:
    """The page of a file.

    Raises:
        ValueError: it is neither the log of a run nor a result of `offload bench`; says so.
        OSError: it cannot be read.
    """
    if (document := _bench_document(file)) is not None:
        return bench_page(document)
    records = read_records(file)
    if not records:
        raise ValueError(f"{file}: nothing noted yet; a run begins to with the first step after a second")
    return run_page(records)


def _bench_document(file: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None  # several lines: perhaps a log
    is_bench = isinstance(document, dict) and {"config", "environment", "engine", "results"} <= document.keys()
    return document if is_bench else None
