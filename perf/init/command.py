"""`offload init`: write the section that suits a model and this machine."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.host.available_memory import total_bytes
from nvme_offload.offload.units import format_bytes
from ..measure.command_line import HERE, Paths, byte_option, failures_in_words
from ..plan.catalog import MICRO_BATCHES, MODEL, TOKENS, shape_of
from ..plan.choosing import Chooser, ChosenSection, step_of
from ..plan.lora import LoraOption
from ..plan.machine import Drives, Machine, PlanError
from ..plan.remedies import remedies
from ..plan.shape import ModelShape

SUFFIXES = (".json", ".toml", ".yaml", ".yml")


def init(
    model: Annotated[Path, MODEL],
    path: Paths = HERE,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File for the section. A file that exists is not overwritten.")
    ] = Path("offload.json"),
    ranks: Annotated[
        int | None, typer.Option(help="Ranks that share the model; by default one for each GPU, or one.")
    ] = None,
    tokens: Annotated[int | None, TOKENS] = None,
    micro_batches: Annotated[int | None, MICRO_BATCHES] = None,
    lora: LoraOption = None,
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
    if output.suffix not in SUFFIXES:
        raise typer.BadParameter(f"{output}: name it {', '.join(SUFFIXES)}", param_hint="'--output'")
    if output.exists():
        raise typer.BadParameter(f"{output} exists; name another file, or move it away", param_hint="'--output'")
    try:
        shape, machine = shape_of(model), this_machine(path, ranks, host_memory)
        shape = shape if lora is None else shape.with_lora(lora)
        machine = replace(machine, flops=flops, drives=None if bench is None else Drives.of_bench(bench))
        each, batches = step_of(tokens, micro_batches, machine.ranks)
        chooser = Chooser(machine, path, each, batches)
        found = chooser.choose(shape)
    except (PlanError, ConfigError, OSError) as error:
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
        output.write_text(_written(found.section, output.suffix), encoding="utf-8")
    steps = f"offload doctor --config {output}, offload plan --model {model} --config {output}"
    typer.echo(f"saved {output}; next: {steps}", err=True)


def _written(section: dict[str, Any], suffix: str) -> str:
    """Return a section as a file of this suffix has it: .json, .toml or .yaml."""
    if suffix == ".toml":
        return _as_toml(section)
    if suffix in (".yaml", ".yml"):
        return _as_yaml(section)
    return json.dumps(section, indent=2) + "\n"


def _as_toml(section: dict[str, Any], table: str = "") -> str:
    """Return tables of TOML; strings, numbers, words and lists of them are written as in JSON."""
    plain = [f"{key} = {json.dumps(value)}\n" for key, value in section.items() if not isinstance(value, dict)]
    head = f"[{table}]\n" if table and plain else ""
    tables = [_as_toml(value, f"{table}.{key}".strip(".")) for key, value in section.items() if isinstance(value, dict)]
    return "\n".join([head + "".join(plain)] * bool(plain) + tables)


def _as_yaml(section: dict[str, Any], indent: str = "") -> str:
    """Return nested keys of YAML; values are written as in JSON, which YAML contains."""
    return "".join(
        f"{indent}{key}:\n{_as_yaml(value, indent + '  ')}"
        if isinstance(value, dict)
        else f"{indent}{key}: {json.dumps(value)}\n"
        for key, value in section.items()
    )


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
