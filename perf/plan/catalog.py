"""Cards, drives and models by name, for a plan before there is one; docs/plan.md says whose the figures are."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import typer

from .machine import PlanError
from .shape import ModelShape, linears_of

REACHED = 0.4
"""Share of a card's operations that training reaches: what large runs report is 0.35 to 0.5."""


class Card(NamedTuple):
    """A GPU by its data sheet: memory, dense operations in bf16 with sums in fp32, and its bus."""

    memory: int  # GiB
    teraflops: float
    pcie: float = 22.0
    """10^9 bytes per second each way with both in use: PCIe 4.0 x16, or 45 of 5.0."""


CARDS = {
    "3090": Card(24, 71),
    "4090": Card(24, 165),
    "5090": Card(32, 209, 45),
    "a10": Card(24, 125),
    "a6000": Card(48, 155),
    "l4": Card(24, 121, 11),
    "l40s": Card(48, 362),
    "a100-40": Card(40, 312),
    "a100-80": Card(80, 312),
    "h100": Card(80, 989, 45),
    "h200": Card(141, 989, 45),
}


class DriveClass(NamedTuple):
    """One drive of a class: 10^9 bytes per second, size and endurance in 10^12 bytes."""

    read: float
    write: float
    size: float
    endurance: float


DRIVES = {
    "sata-consumer": DriveClass(0.56, 0.4, 2, 1200),
    "gen3-consumer": DriveClass(3.5, 1.75, 2, 1200),
    "gen4-consumer": DriveClass(7.45, 1.5, 2, 1200),
    "gen5-consumer": DriveClass(12.4, 3, 2, 1200),
    "gen4-consumer-qlc": DriveClass(7.1, 0.4, 2, 440),
    "gen3-enterprise": DriveClass(3.2, 1.8, 4, 4840),
    "gen4-enterprise": DriveClass(6.2, 4, 3.84, 7008),
    "gen5-enterprise": DriveClass(12, 6.8, 7.68, 14016),
    "gen4-enterprise-mixed": DriveClass(6.9, 4.2, 3.2, 17520),
    "gen5-enterprise-mixed": DriveClass(14, 10, 3.2, 17520),
}


class Decoder(NamedTuple):
    """A published model of the usual kind: attention of grouped queries, and an MLP of three matrices, or experts."""

    layers: int
    hidden: int
    intermediate: int  # of one expert, where there are experts
    queries: int  # heads x their size
    keys: int  # heads of keys x their size
    vocab: int
    experts: int = 0
    visited: int = 0  # experts that a token goes to
    beside: int = 0  # elements of a layer that are in no matrix: norms, biases, sinks
    bits: float = 16.0  # bits of an element of its layers, as published


MODELS = {
    "llama-3.1-8b": Decoder(32, 4096, 14336, 4096, 1024, 128256),
    "llama-3.1-70b": Decoder(80, 8192, 28672, 8192, 1024, 128256),
    "llama-3.1-405b": Decoder(126, 16384, 53248, 16384, 1024, 128256),
    "mistral-7b": Decoder(32, 4096, 14336, 4096, 1024, 32768),
    "mixtral-8x7b": Decoder(32, 4096, 14336, 4096, 1024, 32000, 8, 2),
    "qwen3-8b": Decoder(36, 4096, 12288, 4096, 1024, 151936, beside=256),
    "qwen3-14b": Decoder(40, 5120, 17408, 5120, 1024, 151936, beside=256),
    "qwen3-32b": Decoder(64, 5120, 25600, 8192, 1024, 151936, beside=256),
    "qwen3-30b-a3b": Decoder(48, 2048, 768, 4096, 512, 151936, 128, 8, 256),
    "qwen3-235b-a22b": Decoder(94, 4096, 1536, 8192, 512, 151936, 128, 8, 256),
    "gpt-oss-20b": Decoder(24, 2880, 2880, 4096, 512, 201088, 32, 4, 8064 + 32 * 8641, 4.25),
    "gpt-oss-120b": Decoder(36, 2880, 2880, 4096, 512, 201088, 128, 4, 8064 + 128 * 8641, 4.25),
}
"""Names as published, in small letters; each has an embedding and a head."""


CARD: Any = typer.Option(help=f"A GPU by name, its memory and rates: {', '.join(CARDS)}.")
DRIVE: Any = typer.Option(help="Drives by class, as docs/plan.md lists them: gen4-consumer, 2xgen5-enterprise.")
TOKENS: Any = typer.Option(min=1, help="Tokens of a micro-batch on a rank; by default 2048.", show_default=False)
MICRO_BATCHES: Any = typer.Option(
    min=1, help="Micro-batches of a step on a rank; by default 1 with --tokens, else 65,536 tokens together."
)
MODEL: Any = typer.Option(help="Hugging Face config.json, its folder, or a name: qwen3-8b, gpt-oss-120b.")


def card_of(name: str) -> Card:
    """Return a card by name; raises PlanError."""
    if found := CARDS.get(name.lower().removeprefix("rtx").strip(" -")):
        return found
    raise PlanError(f"--card {name}: known are {', '.join(CARDS)}; or give --gpu-memory, --flops and --pcie")


def drives_of(text: str) -> tuple[int, DriveClass]:
    """Return a number of drives and their class, of ``gen4-consumer`` or ``2xgen4-consumer``; raises PlanError."""
    number, name = re.fullmatch(r"(?:(\d+) ?x ?)?(.*)", text).groups()  # type: ignore[union-attr]  # always matches
    if (found := DRIVES.get(name)) and (count := int(number or 1)):
        return count, found
    raise PlanError(f"--drive {text}: write a class, or 2x and a class, of {', '.join(DRIVES)}")


def shape_of(model: Path) -> ModelShape:
    """Return the shape of a ``config.json``, of the folder that holds one, or of a name; raises PlanError."""
    is_name = not model.exists() and len(model.parts) == 1 and model.suffix != ".json"
    return model_of(str(model)) if is_name else ModelShape.of_config_file(model)


def model_of(name: str) -> ModelShape:
    """Return the shape of a published model; raises PlanError."""
    if (found := MODELS.get(name.lower())) is None:
        raise PlanError(f"{name}: there is no such file; give a config.json, its folder, or one of {', '.join(MODELS)}")
    hidden, keys, wide = found.hidden, (found.keys, found.hidden), (found.intermediate, found.hidden)
    attention = linears_of(q=(found.queries, hidden), k=keys, v=keys, o=(hidden, found.queries))
    mlp = linears_of(gate=wide, up=wide, down=wide[::-1])
    expert = sum(rows * columns for _, (rows, columns) in mlp)
    router = hidden * found.experts
    layer = tuple(rows * columns for _, (rows, columns) in attention)
    layer += (expert * (found.experts or 1), router + 2 * hidden + found.beside)
    vocabulary = found.vocab * hidden
    is_end = 2 * vocabulary >= sum(layer)  # see `find_ends`
    # Fused experts are parameters and no linear layers: all-linear passes them over.
    linears = attention if found.experts else attention + mlp
    return ModelShape(
        name=name,
        layers=(layer,) * found.layers,
        rest=(hidden,) if is_end else (vocabulary, vocabulary, hidden),
        hidden_size=hidden,
        intermediate_size=found.intermediate * max(1, found.visited),
        vocab_size=found.vocab,
        before=((vocabulary,),) * is_end,
        after=((vocabulary,),) * is_end,
        idle=(expert * (found.experts - found.visited),) * found.layers,
        linears=(linears,) * found.layers,
        base_bits=found.bits,
    )
