"""`offload init`: write the section that suits a model and this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.host.available_memory import available_bytes
from nvme_offload.offload.units import GiB, format_bytes
from nvme_offload.perf.measure.command_line import HERE, Paths, byte_option, failures_in_words
from nvme_offload.perf.plan.command import plannable
from nvme_offload.perf.plan.machine import Machine, MachineError
from nvme_offload.perf.plan.placing import Job
from nvme_offload.perf.plan.prediction import Prediction, predict
from nvme_offload.perf.plan.shape import ModelShape, ShapeError
from nvme_offload.perf.tune.command import Search, run_tune


def init(
    model: Annotated[Path, typer.Option(help="Hugging Face config.json, or its folder.")],
    path: Paths = HERE,
    output: Annotated[Path, typer.Option("--output", "-o", help="The section; must not exist yet.")] = Path(
        "offload.json"
    ),
    seconds: Annotated[float, typer.Option(help="Time to find the aio section; 0 takes the defaults.")] = 60.0,
    ranks: Annotated[int | None, typer.Option(help="By default one for each GPU, or one.")] = None,
    tokens: Annotated[int, typer.Option(help="Of one micro-batch on one rank.")] = 2048,
    host_memory: Annotated[int | None, byte_option("--host-memory", text="By default what is available here.")] = None,
) -> None:
    """Write a section for this machine and a model: the fastest that fits, with an aio section measured here.

    What moves least comes first: all in memory, the state on NVMe as far as memory does not hold it, then parameters
    and gradients too.
    """
    if output.exists():
        raise typer.BadParameter(f"{output} exists; name another file, or move it away", param_hint="'--output'")
    try:
        shape, machine = ModelShape.of_config_file(model), this_machine(path, ranks, host_memory)
        found = recommend(shape, machine, path, tokens)
    except (ShapeError, MachineError, ConfigError, OSError) as error:
        typer.echo(f"offload: {error}", err=True)
        raise typer.Exit(2) from None
    except NothingFitsError as error:
        typer.echo(f"offload: {error}; offload plan says what would", err=True)
        raise typer.Exit(1) from None
    for line in _words(shape, machine, found):
        typer.echo(line, err=True)
    with failures_in_words():
        section = found.section | _measured(found, path, seconds)
        output.write_text(json.dumps(section, indent=2) + "\n", encoding="utf-8")
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
        host_memory=available_bytes() if host_memory is None else host_memory,
        device_memory=torch.cuda.get_device_properties(0).total_memory if gpus else None,
        capacity=sum(shutil.disk_usage(folder).free for folder in folders.values()),
    )


def _measured(found: Recommendation, paths: list[Path], seconds: float) -> dict[str, Any]:
    """The section ``aio``, where anything goes to NVMe and there is time to measure."""
    if not uses_nvme(found.section) or seconds <= 0:
        return {}
    typer.echo(f"now {seconds:g} s to find the aio section for these drives; --seconds says how many", err=True)
    search = Search(paths=tuple(paths), size=GiB, seconds=seconds, direct="required", output=Path("aio.json"))
    document = run_tune(search)
    return {"aio": document["section"]["aio"]}


def _words(shape: ModelShape, machine: Machine, found: Recommendation) -> list[str]:
    tiers = found.prediction.tiers
    held = ", ".join(f"{tier} {format_bytes(tiers.bytes_on(tier))}" for tier in ("device", "host", "nvme"))
    return [
        f"{shape.name}, {shape.numel:,} parameters, on {machine.ranks} rank(s): {found.why}",
        f"one rank holds: {held}",
    ]


class NothingFitsError(RuntimeError):
    """No section lets this model be trained here; the message says what is missing."""


@dataclass(frozen=True)
class Recommendation:
    """A section, and why it is this one."""

    section: dict[str, Any]
    why: str
    prediction: Prediction


def recommend(shape: ModelShape, machine: Machine, paths: Sequence[Path], tokens: int) -> Recommendation:
    """The first section of `candidates` that fits, with folders on the drives and so many tokens in a micro-batch.

    Raises:
        NothingFitsError: none does.
    """
    missing = ""
    for found, why in candidates(paths):
        try:
            config = plannable(OffloadConfig.from_dict(found), machine)
            job = Job(shape=shape, config=config, tokens=tokens, checkpointing=True)
            prediction = predict(job, machine)
        except ConfigError as error:  # a budget of "auto" that comes to less than the staging buffers
            missing = str(error)
            continue
        if not prediction.excess:
            return Recommendation(found, why, prediction)
        missing = ", ".join(f"{tier} is {format_bytes(size)} too small" for tier, size in prediction.excess.items())
    everything = "with everything on NVMe that can go there"
    raise NothingFitsError(f"{shape.name} does not fit on {machine.ranks} rank(s) here, {everything}: {missing}")


def uses_nvme(section: Mapping[str, Any]) -> bool:
    """Whether anything of a section is on NVMe."""
    return bool(section["zero_optimization"]["offload_optimizer"]["device"] == "nvme")


def candidates(paths: Sequence[Path]) -> Iterator[tuple[dict[str, Any], str]]:
    """Sections from what moves least to what needs least memory, each with the reason to take it."""
    drive = {"device": "nvme", "nvme_path": [str(path.absolute()) for path in paths]}
    common = {"bf16": {"enabled": True}, "gradient_clipping": 1.0}
    memory = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    yield common | {"zero_optimization": memory}, "everything fits into memory: no byte has to move to a drive"
    state = {"stage": 3, "offload_optimizer": drive}
    yield (
        common | {"zero_optimization": state, "host_budget": "auto"},
        "the optimizer state does not fit into memory: as much of it as fits stays there, the rest goes to NVMe",
    )
    yield (
        common | {"zero_optimization": state},
        "beside parameters and gradients no memory is left for the optimizer state",
    )
    blocks = {"zero_optimization": state | {"offload_param": drive}, "offload_gradients": drive}
    yield (
        common | blocks | {"host_budget": "auto"},
        "parameters and gradients do not fit beside it: they share what memory there is with the state",
    )
    yield common | blocks, "memory is scarce: everything is on NVMe that can go there"
