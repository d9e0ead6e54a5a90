"""`offload verify`: whether training here has the bits that it should."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.text import Text

from nvme_offload.offload.progress import say
from nvme_offload.offload.units import format_bytes
from ..doctor.command import examine
from ..doctor.findings import Level
from ..measure.bits import LeftOutError, WrongError
from ..measure.child import Child, ChildFailedError, Send, Work
from ..measure.command_line import Json, KnobError, check_folder, failures_in_words
from ..measure.machine import device_here, environment, facts_of
from ..measure.trainings import Site
from . import engines, optimizers

LIMIT = 480.0  # seconds after which a check counts as failed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A check came to this."""

    name: str
    status: Literal["ok", "wrong", "failed", "left out"]
    """Wrong: something else than what is promised was found. Failed: the check did not come to an end."""
    found: str
    seconds: float
    log: tuple[str, ...] = ()  # what a check that failed said last

    @property
    def is_bad(self) -> bool:
        """Whether it is not as it should be."""
        return self.status in ("wrong", "failed")


def machine(site: Site) -> str:
    """Nothing stands in the way, as `offload doctor` finds: an error of it would stop a run when it starts."""
    report = examine([site.folder])
    if errors := [each for group in report.groups for each in group.findings if each.level is Level.ERROR]:
        raise WrongError("; ".join(f"{each.check}: {each.found}" for each in errors))
    return report.summary()


CHECKS: dict[str, Callable[[Site], str]] = {
    check.__name__: check
    for check in (
        machine,
        *(optimizers.update, optimizers.clipping, optimizers.scaler, optimizers.swapper, optimizers.races),
        *(engines.gradients, engines.parameters, engines.growth, engines.precisions, engines.birth, engines.compiled),
        *(optimizers.process, engines.checkpoint, engines.ranks),
    )
}
"""Each returns what it found where all is as its docstring promises."""


def work(told: Iterator[Any], send: Send) -> None:
    """Make the checks that are named, after a site."""
    # torch's deterministic algorithms ask for this on CUDA, before its context is made.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    site: Site = next(told)
    for name in told:
        send("outcome", outcome_of(name, site))


WORK: Work = work  # the work of the child


def outcome_of(name: str, site: Site) -> Outcome:
    """Return what a check comes to. What it raises besides is for the caller: the process may be broken."""
    began = time.monotonic()
    try:
        found: dict[str, Any] = {"status": "ok", "found": CHECKS[name](site)}
    except (WrongError, LeftOutError) as error:
        found = {"status": "wrong" if isinstance(error, WrongError) else "left out", "found": str(error)}
    return Outcome(name=name, seconds=time.monotonic() - began, **found)


def outcomes_of(site: Site, names: Iterable[str]) -> Iterator[Outcome]:
    """Make checks, and give what each came to; the name of one that begins is said."""
    with TemporaryDirectory(prefix="verify-") as folder, ExitStack() as stack:
        log, child = Path(folder) / "log", None
        for name in names:
            say(f"{name} ...")
            if child is None:
                child = stack.enter_context(Child(WORK, log))
                child.tell(site)
            began = time.monotonic()
            child.tell(name)
            try:
                yield child.expect("outcome", within=LIMIT)
            except ChildFailedError as error:
                stack.close()
                child, said = None, tuple(log.read_text(errors="replace").strip().splitlines()[-12:])
                # The file goes with its folder: its last line is in the report.
                text = ": ".join([str(error).removesuffix(f"; see {log}"), *said[-1:]])
                yield Outcome(name=name, status="failed", found=text, seconds=time.monotonic() - began, log=said)


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
        if unknown := set(only or ()) - CHECKS.keys():
            raise KnobError("only", f"{', '.join(sorted(unknown))}: choose of {', '.join(CHECKS)}")
        device, folder = device_here(), path.absolute()
        check_folder("path", folder)
        accelerator = None if device is None else facts_of(device)
        say(where(accelerator))
        site = Site(device="cpu" if device is None else device.type, folder=folder, large=device is not None)
        outcomes = list(outcomes_of(site, [name for name in CHECKS if name in (only or CHECKS)]))
        exit_status = int(any(outcome.is_bad for outcome in outcomes))
        document = {
            "accelerator": accelerator,
            "environment": environment([folder]),
            "checks": [dataclasses.asdict(outcome) for outcome in outcomes],
            "summary": summary(outcomes),
            "exit_status": exit_status,
        }
    if as_json:
        typer.echo(json.dumps(document, default=str))
    else:
        show(outcomes, Console())
    raise typer.Exit(exit_status)


_STYLES = {"ok": "green", "wrong": "bold red", "failed": "bold red", "left out": "yellow"}


def where(accelerator: Mapping[str, Any] | None) -> str:
    """Return what was verified, in a line."""
    if accelerator is None:
        return "No GPU: the CPU path is verified, which says nothing of a GPU"
    size = f", {format_bytes(memory)}" if (memory := accelerator["memory_bytes"]) else ""
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
    bad = [outcome.name for outcome in outcomes if outcome.is_bad]
    left_out = [outcome.name for outcome in outcomes if outcome.status == "left out"]
    said = f"{len(outcomes) - len(bad) - len(left_out)} of {len(outcomes)} checks are as they should be"
    said += f"; left out: {', '.join(left_out)}" if left_out else ""
    return f"{said}; NOT: {', '.join(bad)}" if bad else said
