"""`offload tune`: search, print, save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nvme_offload.offload.config.section import AioConfig
from nvme_offload.perf.measure.command_line import (
    DEFAULT_SIZE,
    HERE,
    Direct,
    Json,
    Paths,
    Size,
    failures_in_words,
    say_saved,
)
from nvme_offload.perf.measure.environment import describe
from nvme_offload.perf.tune.search import Search, run_tune

_AIO = AioConfig()


def tune(
    path: Paths = HERE,
    size: Size = DEFAULT_SIZE,
    seconds: Annotated[float, typer.Option(help="Time to search, about.")] = 60.0,
    direct: Direct = _AIO.direct,
    output: Annotated[Path, typer.Option(help="The aio section.")] = Path("aio.json"),
    as_json: Json = False,
) -> None:
    """Search block size, depth, rings and engine for the best `aio` section, on an optimizer step's 1:1 pattern."""
    search = Search(paths=tuple(path), size=size, seconds=seconds, direct=direct, output=output)
    with failures_in_words():
        document = run_tune(search)
    if as_json:
        typer.echo(json.dumps(document))
    else:
        show(document, Console())
    with failures_in_words():
        output.write_text(json.dumps(document["section"], indent=2) + "\n", encoding="utf-8")
        say_saved([output])


def show(document: dict[str, Any], console: Console) -> None:
    """Print the result for people: the section first, ready to paste."""
    console.print_json(data=document["section"])
    notes = [
        f"{document['bw_bytes'] / 1e9:.2f} GB/s read and written together, {document['score']:.2f} of the defaults "
        f"measured beside it; the simplest setting within {document['noise']:.1%} of the best",
        *describe(document["environment"]),
    ]
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
