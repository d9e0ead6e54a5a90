"""Adapters of low rank over a frozen base: what of a model is trained, and how many bits the rest has in its files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import typer

_BITS_OF_METHOD = {"mxfp4": 4.25, "nvfp4": 4.5, "fp8": 8.0, "fbgemm_fp8": 8.0}
_OF_SCALES = 16  # bits of a scale in gptq, awq and bitsandbytes, one for each group of elements
FULL_BITS = 16.0
"""Bits of an element of a base that is not packed."""


@dataclass(frozen=True)
class Lora:
    """LoRA (Hu et al., arXiv:2106.09685): each chosen matrix gets two trained ones, of `rank` rows and columns."""

    rank: int
    bits: float | None = None
    """Bits of an element of the layers in the base's files, scales included; None: as the files or their config say."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers, as PEFT's ``target_modules``; none: all of them, PEFT's ``all-linear``."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``r=16``, ``r=16,bits=4.25`` or ``r=16,targets=q_proj+v_proj``. Raises typer.BadParameter."""
        found = dict(re.findall(r"(?:^|,)(r|bits|targets)=([^,]+)", text))
        try:
            rank, bits = int(found["r"]), found.get("bits")
            lora = cls(
                rank, None if bits is None else float(bits), tuple(filter(None, found.get("targets", "").split("+")))
            )
        except (LookupError, ValueError):
            how = "write r=16, r=16,bits=4.25 or r=16,targets=q_proj+v_proj"
            raise typer.BadParameter(f"--lora {text}: {how}") from None
        if lora.rank < 1 or not 1 <= (lora.bits or FULL_BITS) <= 32 or len(found) != text.count("="):
            what = "r is 1 or more, bits is 1 to 32, and nothing else is known but targets"
            raise typer.BadParameter(f"--lora {text}: {what}")
        return lora

    def takes(self, name: str) -> bool:
        """Whether a linear layer of this name gets an adapter."""
        return not self.targets or any(name == each or name.endswith(f".{each}") for each in self.targets)


def bits_of_files(folder: Path, at_full: int, packable: int) -> float | None:
    """Return the bits of an element of the layers by the size of safetensors files; None where there are none.

    `packable` elements are in layers; `at_full` others, which no quantizer packs, have two bytes each.
    """
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files or not packable:
        return None
    size = sum(file.stat().st_size for file in files)
    return min(32.0, max(1.0, 8 * (size - 2 * at_full) / packable))


def bits_of_config(said: Mapping[str, Any]) -> float:
    """Return the bits of an element of quantized layers by ``quantization_config``, scales included."""
    section = said.get("quantization_config") or {}
    method = section.get("quant_method", "bitsandbytes" if section.get("load_in_4bit") else "")
    if method == "bitsandbytes":
        return 4 + 2 * _OF_SCALES / 64 if section.get("load_in_4bit") else 8.0
    if bits := section.get("bits"):  # gptq, awq
        return float(bits + (_OF_SCALES + bits) / max(1, section.get("group_size", 128)))
    return float(_BITS_OF_METHOD.get(method, FULL_BITS))


LoraOption = Annotated[
    Lora | None,
    typer.Option(
        "--lora",
        parser=Lora.parse,
        metavar="r=N[,bits=B][,targets=A+B]",
        help="Train adapters of this rank; all else is frozen.",
    ),
]
