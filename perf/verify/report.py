"""What `offload verify` shows: a table, and a page to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nvme_offload.offload.units import format_bytes
from nvme_offload.perf.measure.results import page
from nvme_offload.perf.verify.outcome import Outcome

_STYLES = {"ok": "green", "wrong": "bold red", "failed": "bold red", "left out": "yellow"}


def where(accelerator: Mapping[str, Any] | None) -> str:
    """What was verified, in a line."""
    if accelerator is None:
        return "No GPU: the CPU path is verified, which says nothing of a GPU"
    memory = accelerator["memory_bytes"]
    size = f", {format_bytes(memory)}" if memory else ""
    return f"{accelerator['count']} x {accelerator['name']}{size}"


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print a line for each check and a last one; columns on a terminal only."""
    if console.is_terminal:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for outcome in outcomes:
            seconds, status = f"{outcome.seconds:.1f} s", Text(outcome.status, style=_STYLES[outcome.status])
            table.add_row(status, outcome.name, seconds, Text(f"{outcome.text}: {outcome.found}"))
        console.print(table)
    for outcome in () if console.is_terminal else outcomes:
        line = f"{outcome.status:9} {outcome.name:11} {outcome.seconds:6.1f} s  {outcome.text}: {outcome.found}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(summary(outcomes), highlight=False, soft_wrap=True)


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many came to what, and which are not as they should be."""
    bad = [outcome.name for outcome in outcomes if outcome.status in ("wrong", "failed")]
    left_out = [outcome.name for outcome in outcomes if outcome.status == "left out"]
    said = f"{len(outcomes) - len(bad) - len(left_out)} of {len(outcomes)} checks are as they should be"
    said += f"; left out: {', '.join(left_out)}" if left_out else ""
    return f"{said}; NOT: {', '.join(bad)}" if bad else said


def markdown(document: dict[str, Any]) -> str:
    """The document as a page."""
    rows = [
        (each["name"], each["text"], each["status"], each["found"], f"{each['seconds']:.1f} s")
        for each in document["checks"]
    ]
    head = ("check", "what", "", "found", "took")
    return page("Verification", document["environment"], head, rows, [where(document["accelerator"])])
