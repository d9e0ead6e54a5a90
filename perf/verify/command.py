"""`offload verify`: whether training here has the bits and the speed that it should."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nvme_offload.offload.units import MiB
from nvme_offload.perf.measure.accelerator import device_here, facts_of
from nvme_offload.perf.measure.command_line import Json, byte_option, failures_in_words, say_saved
from nvme_offload.perf.measure.environment import environment
from nvme_offload.perf.measure.knobs import KnobError, check_save, check_space
from nvme_offload.perf.measure.results import save
from nvme_offload.perf.verify.checks import CHECKS
from nvme_offload.perf.verify.outcome import Outcome, Site, exit_status
from nvme_offload.perf.verify.report import markdown, show, summary, where
from nvme_offload.perf.verify.run import verify as run_checks

PARAMS = {True: 1e9, False: 1e6}
"""Of the model whose iterations are timed, on a device and on the CPU."""
RUNTIME = {True: 5.0, False: 0.5}
SIZE = {True: 4096 * MiB, False: 128 * MiB}
BYTES_PER_PARAMETER = 12
_SHOWN: Any = "4GiB with a GPU, else 128MiB"


def verify(
    path: Annotated[Path, typer.Option(help="Folder on the drive.")] = Path(),
    only: Annotated[list[str] | None, typer.Option(help=f"Some checks, of: {', '.join(CHECKS)}.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure, too: copies, the drive, iterations.")] = True,
    params: Annotated[
        float | None,
        typer.Option(help="Parameters of the model whose iterations are timed; by default 1e9 with a GPU, else 1e6."),
    ] = None,
    size: Annotated[
        int | None, byte_option("--size", text=f"Of the region in which the drive is measured; by default {_SHOWN}.")
    ] = None,
    as_json: Json = False,
    save_to: Annotated[Path | None, typer.Option("--save", help="Folder for the results: JSON and Markdown.")] = None,
) -> None:
    """Verify bits and speed of training on this machine's GPU, or on its CPU where it has none.

    Runs on the device are compared with runs on the CPU bit by bit; then copies, the drive and iterations are
    measured. Each check has a time limit, and one that ends its process ends nothing else.

    Exit status: 0 all is as it should be, 1 something is not, 2 a bad value.
    """
    with failures_in_words():
        device = device_here()
        on_device = device is not None
        site = Site(
            device="cpu" if device is None else device.type,
            folder=path.absolute(),
            params=int(PARAMS[on_device] if params is None else params),
            size=SIZE[on_device] if size is None else size,
            runtime=RUNTIME[on_device],
            large=on_device,
        )
        names = _chosen(only, measure)
        _check(site, names, save_to)
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
        _tell(document, outcomes, save_to, as_json=as_json)
    raise typer.Exit(exit_status(outcomes))


def _tell(document: dict[str, Any], outcomes: list[Outcome], save_to: Path | None, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, default=str))
    else:
        show(outcomes, Console())
    if save_to is not None:
        say_saved(save(save_to, "verify", json.loads(json.dumps(document, default=str)), markdown(document)))


def _chosen(only: list[str] | None, measure: bool) -> list[str]:
    if unknown := set(only or ()) - CHECKS.keys():
        raise KnobError("only", f"{', '.join(sorted(unknown))}: choose of {', '.join(CHECKS)}")
    return [name for name, check in CHECKS.items() if name in (only or CHECKS) and (measure or not check.measures)]


def _check(site: Site, names: list[str], save_to: Path | None) -> None:
    """Find what cannot work before anything starts."""
    if not (site.folder.is_dir() and os.access(site.folder, os.W_OK | os.X_OK)):
        raise KnobError("path", f"{site.folder} is no folder in which this user may write; name another")
    if site.params < 1:
        raise KnobError("params", f"{site.params}: 1 or more")
    if "iteration" in names:
        check_space(site.folder, site.params * BYTES_PER_PARAMETER)
    if "drive" in names:
        check_space(site.folder, site.size)
    if save_to is not None:
        check_save(save_to)
