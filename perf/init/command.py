"""`offload init`: write the section that suits a model and this machine."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.host.available_memory import total_bytes
from nvme_offload.offload.units import format_bytes
from nvme_offload.perf.measure.command_line import HERE, Paths, byte_option, failures_in_words
from nvme_offload.perf.plan.choosing import Chooser, ChosenSection
from nvme_offload.perf.plan.machine import Drives, Machine, MachineError
from nvme_offload.perf.plan.remedies import remedies
from nvme_offload.perf.plan.shape import ModelShape, ShapeError


def init(
    model: Annotated[Path, typer.Option(help="Hugging Face config.json, or its folder.")],
    path: Paths = HERE,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File for the section. A file that exists is not overwritten.")
    ] = Path("offload.json"),
    ranks: Annotated[
        int | None, typer.Option(help="Ranks that share the model; by default one for each GPU, or one.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of one micro-batch on one rank.")] = 2048,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of a step on one rank.")] = 1,
    flops: Annotated[float | None, typer.Option(help="Operations per second that one rank reaches: 3e14.")] = None,
    bench: Annotated[Path | None, typer.Option(help="Drives here as offload bench --json measured them.")] = None,
    host_memory: Annotated[
        int | None, byte_option("--host-memory", text="Memory for training; by default this machine's.")
    ] = None,
) -> None:
    """Write the fastest section that fits this machine and a model.

    It searches all places of state, gradients, parameters and activations, and both orders of micro-batches. Of what
    fits it takes the fastest with --flops and --bench, and else what moves fewest bytes. What other programs have in
    memory now does not matter.
    """
    if output.exists():
        raise typer.BadParameter(f"{output} exists; name another file, or move it away", param_hint="'--output'")
    try:
        shape, machine = ModelShape.of_config_file(model), this_machine(path, ranks, host_memory)
        machine = replace(machine, flops=flops, drives=None if bench is None else Drives.of_bench(bench))
        chooser = Chooser(machine, path, tokens, micro_batches=micro_batches)
        found = chooser.choose(shape)
    except (ShapeError, MachineError, ConfigError, OSError) as error:
        typer.echo(f"offload: {error}", err=True)
        raise typer.Exit(2) from None
    if missing := [f"{tier} is {format_bytes(size)} too small" for tier, size in found.tiers.missing.items()]:
        what = f"{shape.name} does not fit on {machine.ranks} rank(s) here, with everything on NVMe that can go there"
        typer.echo(f"offload: {what}: {', '.join(missing)}", err=True)
        for change in remedies(chooser, shape):
            typer.echo(f"it fits with {change}", err=True)
        raise typer.Exit(1)
    for line in _words(shape, machine, found):
        typer.echo(line, err=True)
    with failures_in_words():
        output.write_text(json.dumps(found.section, indent=2) + "\n", encoding="utf-8")
    steps = f"offload doctor --config {output}, offload plan --model {model} --config {output}"
    typer.echo(f"saved {output}; next: {steps}", err=True)


def this_machine(paths: list[Path], ranks: int | None, host_memory: int | None) -> Machine:
    """Return what training here runs on."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = (gpus or 1) if ranks is None else ranks
    folders = {folder.stat().st_dev: folder for folder in paths}
    return Machine(
        ranks=count,
        ranks_per_node=count,
        host_memory=total_bytes() if host_memory is None else host_memory,
        device_memory=torch.cuda.get_device_properties(0).total_memory if gpus else None,
        capacity=sum(shutil.disk_usage(folder).free for folder in folders.values()),
    )


def _words(shape: ModelShape, machine: Machine, found: ChosenSection) -> list[str]:
    tiers = found.tiers
    held = ", ".join(f"{tier} {format_bytes(tiers.bytes_on(tier))}" for tier in ("device", "host", "nvme"))
    return [
        f"{shape.name}, {shape.numel:,} parameters, on {machine.ranks} rank(s): {found.why}",
        f"one rank holds: {held}",
    ]
