"""Say what a run is: all that must be equal to go on from it. It is written once, beside the manifests."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from nvme_offload.offload.weights.writer import named_tensors
from ..kernels import REVISION
from ..layout.geometry import Part
from ..rules.rule import UpdateRule
from ..state.body import StateBody
from ..state.table import ParamRecord, ParamTable
from .state import DurableState


class ModelRecord(NamedTuple):
    """A training engine knows this of its model, and an optimizer alone does not."""

    params: Mapping[int, str] = {}
    """Qualified names by index of the parameter, as the state dict has them first."""
    precision: str = ""
    """Mode in which the model computes: ``bf16``, ``autocast-bf16`` ..."""
    stage: int = 0
    """The model's stage in a pipeline."""

    @classmethod
    def of(cls, model: nn.Module, table: ParamTable, *, precision: str, stage: int) -> Self:
        """Return the record of a model whose parameters are in a table."""
        records = {name: table.find(tensor) for name, tensor in named_tensors(model)[0].items()}
        return cls(
            params={record.index: name for name, record in records.items() if record is not None},
            precision=precision,
            stage=stage,
        )


def identity_of(body: StateBody, durable: DurableState, model: ModelRecord) -> dict[str, Any]:
    """Return JSON that is equal for the same parameters, groups, rules, ranks, subgroups and kind of log."""
    table = body.table
    rules: list[dict[str, Any]] = []
    for rule in (_rule_as_json(record.rule) for record in table):
        rules += [rule] if rule not in rules else []
    return {
        "model": _in_words(table),
        "precision": model.precision,
        "optimizer": body.owner,
        "stage": model.stage,
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "num_ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "kernel_revision": REVISION,
        "rewrite_every": durable.period,
        "alignment": durable.run.space.alignment,
        "rules": rules,
        "parameters": {
            name: _param_as_json(record, rules) for name, record in zip(_named(table, model), table, strict=True)
        },
        "subgroups": [[list(run) for run in slot.subgroup.runs] for slot in body.slots],
    }


def _in_words(table: Iterable[ParamRecord]) -> str:
    leaves = [record.leaf for record in table]
    kinds = Counter(name_of(leaf.dtype) for leaf in leaves)
    listed = ", ".join(f"{count} in {dtype}" for dtype, count in sorted(kinds.items()))
    return f"{len(leaves)} parameters ({listed}), {sum(leaf.numel() for leaf in leaves):,} elements"


def _named(table: ParamTable, model: ModelRecord) -> list[str]:
    """Name each parameter, and no two alike: an optimizer alone may have been given one name for several."""
    named = [model.params.get(record.index, record.name) for record in table]
    known = Counter(named)
    return [name if known[name] == 1 else f"{name} ({index})" for index, name in enumerate(named)]


def _param_as_json(record: ParamRecord, rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    part = Part.of(record.leaf)
    return {
        "index": record.index,
        "shape": list(record.leaf.shape),
        "of_this_rank": list(record.param.shape),
        "offsets": list(part.offsets),
        "order": list(part.order),
        "dtype": name_of(record.param.dtype),
        "log_dtype": name_of(record.log_dtype),
        "group": record.group,
        "rule": rules.index(_rule_as_json(record.rule)),
        "has_state": record.is_placed,
    }


def _rule_as_json(rule: UpdateRule) -> dict[str, Any]:
    states = [
        {"name": state.name, "birth": state.birth, "dtype": name_of(state.dtype)}
        | ({"block": state.block} if state.block else {})
        for state in rule.states
    ]
    return {"name": rule.name, "kernel": rule.kernel, "whole": rule.whole, "states": states}


def name_of(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
