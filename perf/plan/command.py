"""`offload plan`: will it fit, what will it move, how long will a step take."""

import json
import re
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.host.available_memory import total_bytes
from nvme_offload.offload.units import GiB
from ..measure.command_line import Json, byte_option, to_bytes
from ..measure.machine import device_here, facts_of
from .catalog import CARD, DRIVE, MICRO_BATCHES, MODEL, REACHED, TOKENS, card_of, drives_of, shape_of
from .choosing import Chooser, ChosenSection, step_of
from .lora import Lora, LoraOption
from .machine import UPDATE_RATE, Drives, Machine, PlanError
from .placing import may_fit
from .prediction import MAX_LAYERS, Prediction, fits, largest_model, predict
from .remedies import remedies
from .report import show
from .shape import ModelShape

_MOST = 10**15  # torch counts bytes in 63 bits


def _number(text: str) -> int:
    try:
        number = float(text.replace("_", "").replace(",", ""))
    except ValueError:
        number = nan
    if not (1 <= number <= _MOST and number.is_integer()):
        raise typer.BadParameter(f"{text!r} is no whole number from 1 to {_MOST:.0e}; write 2e9 or 2000000000")
    return int(number)


def _count(*names: str, text: str) -> Any:
    return typer.Option(*names, parser=_number, metavar="NUMBER", help=text)


def _size(*names: str, text: str) -> Any:
    return byte_option(*names, text=text, parser=lambda said: to_bytes(said.removesuffix("/s")))


def _network(text: str) -> float:
    """Bytes per second of a rate that is said in bits, as networks are, or in bytes."""
    bits = re.fullmatch(r"([0-9.]+) ?([MGT])(bit/s|b/s|bps)", text)
    if bits is not None:
        return float(bits[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[bits[2]] / 8
    return to_bytes(text.removesuffix("/s"))


def _rate(*names: str, text: str) -> Any:
    return typer.Option(*names, parser=_network, metavar="RATE", help=text)


def plan(
    model: Annotated[Path | None, MODEL] = None,
    params: Annotated[int | None, _count("--params", text="Parameters, in place of --model: 2e9.")] = None,
    layers: Annotated[int | None, _count("--layers", text="Number of its layers, beside --params.")] = None,
    hidden: Annotated[int | None, _count("--hidden", text="Hidden size, beside --params.")] = None,
    vocab: Annotated[int | None, _count("--vocab", text="Entries of the embedding, beside --params.")] = None,
    lora: LoraOption = None,
    config: Annotated[Path | None, typer.Option(help="The section; by default as offload init writes it.")] = None,
    ranks: Annotated[int, typer.Option(help="Ranks that share the model.")] = 1,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks on a node; by default all, 8 at most.")] = None,
    card: Annotated[str | None, CARD] = None,
    drive: Annotated[str | None, DRIVE] = None,
    host_memory: Annotated[
        int | None, _size("--host", "--host-memory", text="Memory of a node; by default of this one.")
    ] = None,
    device_memory: Annotated[
        int | None,
        _size("--gpu-memory", "--device-memory", text="Memory of one rank's GPU; by default of this one. 0: no GPU."),
    ] = None,
    pcie: Annotated[int | None, _size("--pcie", text="Rate between a GPU and its host, each way: 55GB/s.")] = None,
    network: Annotated[float | None, _rate("--network", text="Rate between nodes: 100Gb/s, 12.5GB/s.")] = None,
    bench: Annotated[Path | None, typer.Option(help="A node's drives as offload bench --json measured them.")] = None,
    read_bw: Annotated[int | None, _size("--read-bw", text="Bytes that drives read in a second: 6.5GB.")] = None,
    write_bw: Annotated[int | None, _size("--write-bw", text="Bytes that they write in a second.")] = None,
    mixed_bw: Annotated[int | None, _size("--mixed-bw", text="Bytes of both in a second, if mixed.")] = None,
    capacity: Annotated[int | None, _size("--capacity", text="Free bytes of a node's drives.")] = None,
    tbw: Annotated[float | None, typer.Option(help="Terabytes that a node's drives may have written.")] = None,
    flops: Annotated[float | None, typer.Option(help="Operations per second that one rank reaches: 3e14.")] = None,
    update_rate: Annotated[float, typer.Option(help="Parameters per second of one rank's update.")] = UPDATE_RATE,
    tokens: Annotated[int | None, TOKENS] = None,
    sequence: Annotated[int, typer.Option(min=0, help="Tokens of a sequence; above 0, attention is counted, too.")] = 0,
    micro_batches: Annotated[int | None, MICRO_BATCHES] = None,
    checkpointing: Annotated[bool, typer.Option(help="Compute layers again in backward.")] = True,
    chunked_loss: Annotated[
        bool, typer.Option("--chunked-loss", help="Compute the loss of some tokens at a time.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict memory, traffic, time and wear of a training step.

    It also says which model of such layers is the largest that fits.
    """
    try:
        machine = Machine(
            ranks=ranks,
            ranks_per_node=min(ranks, 8) if ranks_per_node is None else ranks_per_node,
            host_memory=total_bytes() if host_memory is None else host_memory,
            update_rate=update_rate,
            network=network,
            **_card(card, device_memory, pcie, flops),
            **_drives(drive, capacity, bench, (read_bw, write_bw, mixed_bw), tbw),
        )
        shape = _shape(model, params, layers, hidden, vocab, lora)
        chooser = Chooser(
            machine, [Path()], *_step(config, tokens, micro_batches, ranks), checkpointing, sequence, chunked_loss
        )
        choice, prediction, largest = _planned(config, shape, chooser)
    except (PlanError, ConfigError, OSError) as error:
        typer.echo(f"offload: {error}", err=True)
        raise typer.Exit(2) from None
    changes = remedies(chooser, shape) if prediction.tiers.missing and choice is not None else []
    if as_json:
        typer.echo(json.dumps(_document(prediction, choice, largest) | {"fits_with": changes}))
    else:
        show(prediction, choice, largest, Console(), changes)
    if prediction.tiers.missing:
        raise typer.Exit(1)


def _step(config: Path | None, tokens: int | None, micro_batches: int | None, ranks: int) -> tuple[int, int]:
    """Return tokens of a micro-batch and micro-batches of a step; the latter are as a section says, if there is one."""
    if config is not None and micro_batches:
        raise PlanError("--config says gradient_accumulation_steps: leave out --micro-batches")
    return step_of(tokens, micro_batches if config is None else 1, ranks)


def _card(name: str | None, memory: int | None, pcie: float | None, flops: float | None) -> dict[str, Any]:
    """Return fields of a `Machine`: of a GPU as given, else those of its name, else this machine's memory.

    Without memory ranks compute on the CPU.
    """
    if name is not None:
        found = card_of(name)
        memory = found.memory * GiB if memory is None else memory
        pcie = found.pcie * 1e9 if pcie is None else pcie
        flops = found.teraflops * 1e12 * REACHED if flops is None else flops
    if memory is None and (here := device_here()) is not None:
        memory = facts_of(here)["memory_bytes"]
    if not memory and pcie is not None:
        raise PlanError("--pcie is between a GPU and its host: give --gpu-memory, too")
    return {"device_memory": memory or None, "pcie": pcie, "flops": flops}


def _planned(
    file: Path | None, shape: ModelShape, chooser: Chooser
) -> tuple[ChosenSection | None, Prediction, ModelShape | None]:
    """Return the section that is chosen where none is given, what it comes to, and the deepest model that fits so."""
    machine, largest = chooser.machine, None
    if file is None:
        choice = chooser.choose(shape)
        prediction = predict(choice.job, machine)
        if machine.capacity is not None:
            largest = largest_model(shape, chooser.may_fit, chooser.fits)
        return choice, prediction, largest
    job = chooser.job(file, shape)
    prediction = predict(job, machine)
    if machine.capacity is not None or not job.config.paths_of_tiers:
        may, does = (lambda other, found=found: found(replace(job, shape=other), machine) for found in (may_fit, fits))
        largest = largest_model(shape, may, does)
    return None, prediction, largest


def _document(prediction: Prediction, choice: ChosenSection | None, largest: ModelShape | None) -> dict[str, Any]:
    found = largest and {
        "parameters": largest.numel,
        "layers": largest.num_layers,
        "deepest": largest.num_layers <= MAX_LAYERS,
    }
    chosen = {"section": choice.section, "why": choice.why} if choice is not None else {}
    return {**chosen, **prediction.to_dict(), "largest_model": found}


def _shape(
    model: Path | None, params: int | None, layers: int | None, hidden: int | None, vocab: int | None, lora: Lora | None
) -> ModelShape:
    if model is not None:
        if params or layers or hidden or vocab:
            raise PlanError("--model says it all; leave out --params, --layers, --hidden and --vocab")
        shape = shape_of(model)
    elif params and layers:
        shape = ModelShape.of_numbers(params, layers, hidden, vocab or 0)
    else:
        raise PlanError("which model? Give --model, or --params and --layers")
    return shape if lora is None else shape.with_lora(lora)


def _drives(
    name: str | None,
    capacity: int | None,
    bench: Path | None,
    rates: tuple[int | None, int | None, int | None],
    tbw: float | None,
) -> dict[str, Any]:
    """Return fields of a `Machine`: of a node's drives by name, as they were measured, or from their rates."""
    (read, write, mixed), has_rates, drives = rates, rates != (None, None, None), None
    if name is not None:
        if bench is not None or has_rates:
            raise PlanError(f"--drive {name} has its rates; leave out --bench, --read-bw and the like")
        count, each = drives_of(name)
        endurance = each.endurance * count if tbw is None else tbw
        drives = Drives.of_rates(each.read * count * 1e9, each.write * count * 1e9, terabytes_written=endurance)
        capacity = round(each.size * count * 1e12) if capacity is None else capacity
    elif bench is not None:
        if has_rates:
            raise PlanError("rates of drives come from --bench, or from --read-bw and the like: give one")
        drives = Drives.of_bench(bench, tbw)
    elif read is not None and write is not None:
        drives = Drives.of_rates(read, write, mixed, tbw)
    elif has_rates or tbw is not None:
        raise PlanError("drives need --bench, or both --read-bw and --write-bw")
    return {"drives": drives, "capacity": capacity}
