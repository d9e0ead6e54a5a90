"""The precision plan as a table for people, and as plain data."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvme_offload.optim.layout.master import MasterForm
from nvme_offload.optim.precision.parameter import NAMES, ParameterPrecision

_MASTERS = {MasterForm.SPLIT: "split", MasterForm.FULL: "full fp32", MasterForm.ITSELF: "itself"}
_COLUMNS = ("storage", "compute", "gather", "reduce", "accumulate", "master")


@dataclass
class PlanRow:
    """Parameters whose names differ in numbers only, with one precision."""

    names: str
    """Names of the row's parameters, with ``*`` for a number."""
    trainable: bool
    precision: ParameterPrecision
    bytes: dict[str, int]
    """Bytes of each parameter, by tier."""
    states: str
    """Dtypes of what the optimizer keeps for it besides."""
    tensors: int = 0
    numel: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return one entry of ``parameters`` in the plan's JSON."""
        precision = self.precision
        dtypes = {name: name_of(getattr(precision, name)) for name in _COLUMNS[:-1]}
        if not self.trainable:
            dtypes |= dict.fromkeys(("reduce", "accumulate"), "-")
        if precision.gathered is precision.kept_as:  # nobody casts it
            dtypes |= dict.fromkeys(("compute", "gather"), dtypes["storage"])
        return {
            "names": self.names,
            "tensors": self.tensors,
            "parameters": self.numel,
            "trainable": self.trainable,
            **dtypes,
            "master": _MASTERS[precision.master],
            "states": self.states,
            "bytes_per_parameter": self.bytes,
        }


def name_of(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype in the plan; None is what autocast chooses."""
    return "autocast" if dtype is None else NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def name_pattern(name: str, most: int = 0) -> str:
    """Return a qualified name with ``*`` for each part that is a number, or for the first `most` of them."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name, count=most)


def as_text(plan: Mapping[str, Any]) -> str:
    """Return a plan, as `PrecisionPlan.to_dict` gives it, as a table."""
    tiers = list(dict.fromkeys(tier for row in plan["parameters"] for tier in row["bytes_per_parameter"]))
    head = ["parameters", "tensors", "numel", *_COLUMNS, "states", *(f"B/{tier}" for tier in tiers)]
    lines = [
        [
            row["names"],
            str(row["tensors"]),
            str(row["parameters"]),
            *(row[column] for column in (*_COLUMNS, "states")),
            *(str(row["bytes_per_parameter"].get(tier, 0)) for tier in tiers),
        ]
        for row in plan["parameters"]
    ]
    scaling = "the loss is scaled" if plan["loss_scaling"] else "no loss scaling"
    table = [f"precision {plan['mode']}, {scaling}", *_aligned([head, *lines])]
    if plan["buffers"]:
        buffers = [[name, dtype] for name, dtype in plan["buffers"].items()]
        table += ["", *_aligned([["buffers", "dtype"], *buffers])]
    return "\n".join(table)


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return ["  ".join(cells).rstrip() for cells in padded]
