"""Read, without a model, which subgroups and parameters a run has."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from nvme_offload.offload.durable.identity import Identity
from nvme_offload.offload.errors import ResumeError
from nvme_offload.optim.kernels import REVISION
from nvme_offload.optim.layout.flat import Origin
from nvme_offload.optim.layout.geometry import Part
from nvme_offload.optim.layout.master import FORM_OF_DTYPE
from nvme_offload.optim.layout.subgroup import Run, Subgroup
from nvme_offload.optim.rules.rule import State, UpdateRule
from nvme_offload.optim.state.slots import SlotRecord


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
    states = tuple(State(state["name"], state["birth"], _dtype(state["dtype"])) for state in said["states"])
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
