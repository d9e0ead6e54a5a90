"""`offload verify`: whether training here has the bits that it should."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from nvme_offload.offload.units import format_bytes
from nvme_offload.perf.measure.accelerator import device_here, facts_of
from nvme_offload.perf.measure.command_line import Json, KnobError, check_folder, failures_in_words
from nvme_offload.perf.measure.machine import environment
from nvme_offload.perf.verify.outcome import Outcome, Site, exit_status
from nvme_offload.perf.verify.run import CHECKS
from nvme_offload.perf.verify.run import verify as run_checks


def verify(
    path: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder on the drive.")] = Path(),
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help=f"Run this check alone; repeat it. Checks: {', '.join(CHECKS)}."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify the bits of training on this machine's GPU or CPU.

    It compares runs on the device with runs on the CPU bit by bit.
    Each check has a time limit, and one that ends its process ends nothing else.

    Exit status: 0 all is as it should be, 1 something is not, 2 an option is wrong.
    """
    with failures_in_words():
        device = device_here()
        site = Site(device="cpu" if device is None else device.type, folder=path.absolute(), large=device is not None)
        if unknown := set(only or ()) - CHECKS.keys():
            raise KnobError("only", f"{', '.join(sorted(unknown))}: choose of {', '.join(CHECKS)}")
        names = [name for name in CHECKS if name in (only or CHECKS)]
        check_folder("path", site.folder)
        accelerator = None if device is None else facts_of(device)
        say = Console(stderr=True)
        say.print(where(accelerator), highlight=False, soft_wrap=True)
        outcomes = list(run_checks(site, names, lambda name: say.print(f"{name} ...", highlight=False)))
        document = {
            "accelerator": accelerator,
            "environment": environment([site.folder]),
            "checks": [dataclasses.asdict(outcome) for outcome in outcomes],
            "summary": summary(outcomes),
            "exit_status": exit_status(outcomes),
        }
        if as_json:
            typer.echo(json.dumps(document, default=str))
        else:
            show(outcomes, Console())
    raise typer.Exit(exit_status(outcomes))


_STYLES = {"ok": "green", "wrong": "bold red", "failed": "bold red", "left out": "yellow"}


def where(accelerator: Mapping[str, Any] | None) -> str:
    """Return what was verified, in a line."""
    if accelerator is None:
        return "No GPU: the CPU path is verified, which says nothing of a GPU"
    memory = accelerator["memory_bytes"]
    size = f", {format_bytes(memory)}" if memory else ""
    return f"{accelerator['count']} x {accelerator['name']}{size}"


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print a line for each check and a last one."""
    for outcome in outcomes:
        line = Text(f"{outcome.status:9} {outcome.name:11} {outcome.seconds:6.1f} s  {outcome.found}")
        line.stylize(_STYLES[outcome.status], 0, len(outcome.status))
        console.print(line, soft_wrap=True)
    console.print(summary(outcomes), highlight=False, soft_wrap=True)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return how many came to what, and which are not as they should be."""
    bad = [outcome.name for outcome in outcomes if outcome.status in ("wrong", "failed")]
    left_out = [outcome.name for outcome in outcomes if outcome.status == "left out"]
    said = f"{len(outcomes) - len(bad) - len(left_out)} of {len(outcomes)} checks are as they should be"
    said += f"; left out: {', '.join(left_out)}" if left_out else ""
    return f"{said}; NOT: {', '.join(bad)}" if bad else said
