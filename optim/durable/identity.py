"""Say what a run is: all that must be equal to go on from it, and all that is needed to read it alone.

It is written once, beside the manifests, and has the layout of every extent: whoever has no model reads what was
committed by it (`RecordedRun`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from nvme_offload.offload.durable.identity import Identity
from nvme_offload.offload.errors import ResumeError
from nvme_offload.offload.weights.writer import named_tensors
from ..kernels import REVISION
from ..layout.flat import Origin
from ..layout.geometry import Part
from ..layout.master import FORM_OF_DTYPE
from ..layout.subgroup import Run, Subgroup
from ..rules.rule import State, UpdateRule
from ..state.body import StateBody
from ..state.slots import SlotRecord
from ..state.table import ParamRecord, ParamTable
from .state import DurableState


class ModelRecord(NamedTuple):
    """A training engine knows this of its model, and an optimizer alone does not."""

    params: Mapping[int, str] = {}
    """Qualified names by index of the parameter, as the state dict has them first."""
    tied: Mapping[str, str] = {}
    """Further names of parameters and buffers, with the first one."""
    elsewhere: tuple[str, ...] = ()
    """Parameters that the optimizer does not have."""
    precision: str = ""
    """Mode in which the model computes: ``bf16``, ``autocast-bf16`` ..."""
    rule: str = ""
    """Name of the optimizer's rule; single groups may have others."""
    stage: int = 0
    """The model's stage in a pipeline."""

    @classmethod
    def of(cls, model: nn.Module, table: ParamTable, *, precision: str, rule: str, stage: int) -> Self:
        """Return the record of a model whose parameters are in a table."""
        tensors, tied = named_tensors(model)
        records = {name: table.find(tensor) for name, tensor in tensors.items()}
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return cls(
            params={record.index: name for name, record in records.items() if record is not None},
            tied=tied,
            elsewhere=tuple(name for name, record in records.items() if record is None and name not in buffers),
            precision=precision,
            rule=rule,
            stage=stage,
        )


def identity_of(body: StateBody, durable: DurableState, model: ModelRecord) -> dict[str, Any]:
    """Return JSON that is equal for the same parameters, groups, rules, ranks, subgroups and kind of log."""
    table = body.table
    rules, numbers = list[dict[str, Any]](), dict[int, int]()
    for rule in {id(record.rule): record.rule for record in table}.values():
        said = _rule_as_json(rule)
        rules += [said] if said not in rules else []
        numbers[id(rule)] = rules.index(said)
    return {
        "model": _in_words(table),
        "precision": model.precision,
        "optimizer": body.owner,
        "rule": model.rule,
        "stage": model.stage,
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "num_ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "kernel_revision": REVISION,
        "rewrite_every": durable.period,
        "alignment": durable.run.space.alignment,
        "rules": rules,
        "parameters": {
            name: _param_as_json(record, numbers[id(record.rule)])
            for name, record in zip(_named(table, model), table, strict=True)
        },
        "tied": dict(model.tied),
        "elsewhere": list(model.elsewhere),
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


def _param_as_json(record: ParamRecord, rule: int) -> dict[str, Any]:
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
        "rule": rule,
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


@dataclass(frozen=True)
class RecordedRule(UpdateRule):
    """A rule as it was written down: which states it keeps, and which kernel does its updates again."""

    name: str
    kernel: str
    whole: bool
    states: tuple[State, ...]


@dataclass(frozen=True)
class RecordedParam:
    """A parameter, and the part of it that one rank had."""

    name: str
    """Qualified if there was a training engine, else as the optimizer called it."""
    part: Part
    dtype: torch.dtype
    """The dtype of what is kept of it beside the state; its master is as `FORM_OF_DTYPE` says."""
    log_dtype: torch.dtype
    """See `ParamRecord.log_dtype`."""
    group: int
    rule: RecordedRule
    has_state: bool
    """Whether the run keeps it; not a parameter that was always frozen."""


@dataclass(frozen=True)
class RecordedRun:
    """One rank of a run, as `identity_of` wrote it down."""

    params: list[RecordedParam]
    """By their index."""
    slots: list[SlotRecord]
    """The slots of the subgroups; none has a place or a buffer."""
    tied: dict[str, str]
    """Further names of parameters and buffers, with the first one."""
    elsewhere: list[str]
    """Parameters of the model that the optimizer did not have."""
    rule: str
    """Name of a training engine's optimizer; empty where there was none."""
    stage: int
    """The rank's stage in a pipeline."""
    num_ranks: int
    period: int
    """Every how many steps a subgroup was rewritten."""
    alignment: int
    """The alignment of extents, in bytes."""

    @classmethod
    def of(cls, identity: Identity, folder: Path) -> Self:
        """Read what a run was. ResumeError: it is no such thing, or its log cannot be replayed by this version."""
        try:
            revision = int(identity["kernel_revision"])
            if revision != REVISION and identity["rewrite_every"] > 1:
                what = f"has a log of kernel revision {revision}, and this version replays {REVISION}"
                raise ResumeError(folder, what)
            rules = [_rule_of(rule) for rule in identity["rules"]]
            params = [_param_of(name, param, rules) for name, param in identity["parameters"].items()]
            order = [int(param["index"]) for param in identity["parameters"].values()]
            by_index = [param for _, param in sorted(zip(order, params, strict=True), key=lambda pair: pair[0])]
            return cls(
                params=by_index,
                slots=[_slot_of(index, runs, by_index) for index, runs in enumerate(identity["subgroups"])],
                tied=dict(identity["tied"]),
                elsewhere=list(identity["elsewhere"]),
                rule=str(identity["rule"]),
                stage=int(identity["stage"]),
                num_ranks=int(identity["num_ranks"]),
                period=int(identity["rewrite_every"]),
                alignment=int(identity["alignment"]),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise ResumeError(folder, f"does not say how its state is laid out: {error!r}") from error

    def log_dtype_of(self, index: int) -> torch.dtype:
        """Return `ParamRecord.log_dtype` of a parameter."""
        return self.params[index].log_dtype

    def origin_of(self, index: int) -> Origin | None:
        """Return the origin of the part that the rank had of a parameter whose rule dithers."""
        return self.params[index].part.origin(index) if self.params[index].rule.dithers else None


def _rule_of(said: Mapping[str, Any]) -> RecordedRule:
    states = tuple(
        State(state["name"], state["birth"], _dtype(state["dtype"]), int(state.get("block", 0)))
        for state in said["states"]
    )
    return RecordedRule(said["name"], said["kernel"], said["whole"], states)


def _param_of(name: str, said: Mapping[str, Any], rules: list[RecordedRule]) -> RecordedParam:
    whole, own = torch.Size(said["shape"]), tuple(said["of_this_rank"])
    return RecordedParam(
        name=name,
        part=Part(whole, tuple(said["offsets"]), own, tuple(said["order"])),
        dtype=_dtype(said["dtype"]),
        log_dtype=_dtype(said["log_dtype"]),
        group=int(said["group"]),
        rule=rules[said["rule"]],
        has_state=bool(said["has_state"]),
    )


def _slot_of(index: int, said: list[list[int]], params: list[RecordedParam]) -> SlotRecord:
    runs = tuple(Run(*run) for run in said)
    first = params[runs[0].param]
    return SlotRecord(Subgroup(index, first.group, FORM_OF_DTYPE[first.dtype], first.rule, runs))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
