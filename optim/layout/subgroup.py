"""Cut parameters into subgroups, the units of read, update and write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch

from nvme_offload.offload.storage.tier import Memory
from nvme_offload.offload.units import round_up
from ..rules.rule import KeptSection, UpdateRule
from .master import FORM_OF_DTYPE, MASTER_DTYPE, TAIL_DTYPE, TILE_NUMEL, MasterForm, sealed_itemsize, state_itemsize


def _alignment(rule: UpdateRule) -> int:
    """Return the elements that each run in a section starts at a multiple of.

    That is a cache line, 64 bytes of the narrowest section, and where states are in 8 bits a block.
    """
    return max(32, rule.block)


class Run(NamedTuple):
    """A contiguous run of elements of one parameter."""

    param: int
    """Index of the parameter in the optimizer."""
    start: int
    """First element within the parameter; a multiple of `TILE_NUMEL`."""
    stop: int
    at: int
    """Position of the run's first element within each section of the subgroup."""

    @property
    def numel(self) -> int:
        """Elements of the run."""
        return self.stop - self.start

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """Return its part of the values of the whole parameter, 1D."""
        return values if self.numel == values.numel() else values[self.start : self.stop]

    def pieces(self, max_numel: int) -> list[Run]:
        """Cut it into pieces of at most so many elements, whole tiles but for the last."""
        step = max_numel // TILE_NUMEL * TILE_NUMEL
        starts = range(self.start, self.stop, step)
        return [Run(self.param, at, min(at + step, self.stop), self.at + at - self.start) for at in starts]


@dataclass(frozen=True)
class Subgroup:
    """A fixed set of runs whose state is read, updated and written together.

    Its extent is the master section, then one for each state of the rule, each `padded_numel` elements long, and the
    exponents of those in 8 bits. The master section holds the lower halves of split master weights (uint16), full
    master weights (fp32), or nothing where the parameter is fp32 itself.
    """

    index: int
    group: int
    """Index of the parameter group; a subgroup never crosses two."""
    form: MasterForm
    rule: UpdateRule
    runs: tuple[Run, ...]
    block: int = -1
    """Block of the parameter and gradient tiers; a subgroup never crosses two. -1: of none."""

    @property
    def numel(self) -> int:
        """Elements of the subgroup that belong to parameters."""
        return sum(run.numel for run in self.runs)

    @cached_property
    def padded_numel(self) -> int:
        """Elements of one section of the subgroup, padding included."""
        last = self.runs[-1]
        return last.at + round_up(last.numel, _alignment(self.rule))

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the subgroup's extent."""
        return int(self.padded_numel * state_itemsize(self.form, self.rule.states))

    @property
    def tail_dtype(self) -> torch.dtype | None:
        """The dtype of what the parameters have besides the state; None where the state has all."""
        return TAIL_DTYPE[self.form]

    @cached_property
    def sections(self) -> dict[str, PlacedSection]:
        """Say where ``master``, if there is such a section, each state, and exponents are, by name."""
        dtype = MASTER_DTYPE[self.form]
        kept = [KeptSection("master", dtype, 1)] if dtype else []
        found, offset = {}, 0
        for name, dtype, per in (*kept, *self.rule.kept):
            found[name] = PlacedSection(dtype, per, offset)
            offset += self.padded_numel // per * dtype.itemsize
        return found

    @property
    def entry_names(self) -> set[str]:
        """Names of what it has of each element: ``master``, where there is such a section, and states."""
        return self.sections.keys() & {"master", *(state.name for state in self.rule.states)}


class PlacedSection(NamedTuple):
    """A part of a subgroup's memory, with an item for each `per` elements."""

    dtype: torch.dtype
    per: int
    offset: int
    """Bytes from the beginning of the subgroup."""

    def view(self, memory: Memory, run: Run) -> torch.Tensor:
        """Return a run's part of it, 1D."""
        return memory.view(self.dtype, self.offset + run.at // self.per * self.dtype.itemsize, run.numel // self.per)


def section_view(subgroup: Subgroup, memory: Memory, name: str, run: Run) -> torch.Tensor | None:
    """Return a run's part of the section ``master`` or of a state; None where there is no such section."""
    section = subgroup.sections.get(name)
    return None if section is None else section.view(memory, run)


def state_views(subgroup: Subgroup, memory: Memory, run: Run) -> list[torch.Tensor]:
    """Return a run's part of what is kept of the rule's states: see `UpdateRule.kept`."""
    return [subgroup.sections[kept.name].view(memory, run) for kept in subgroup.rule.kept]


_NO_RULE = UpdateRule()


class ParamToPlace(NamedTuple):
    """The planner needs to know this of a parameter."""

    number: int
    group: int
    numel: int
    dtype: torch.dtype
    rule: UpdateRule
    block: int = -1
    log_itemsize: int = 0
    """Bytes per element of the log that is read beside the state."""


def plan_subgroups(
    params: Iterable[ParamToPlace], max_bytes: int, max_numel: int, first: int = 0, *, sealed: bool = False
) -> list[Subgroup]:
    """Cut parameters, in their order, into subgroups.

    A subgroup holds parameters of one group, one master form, one block of the tiers and one kind of log, at most
    `max_numel` elements (rounded up to `TILE_NUMEL`) and at most `max_bytes` of state, which must hold a block of the
    widest state. Parameters are cut at multiples of `TILE_NUMEL` only, those of a rule that needs them whole not at
    all: each has a subgroup of its own, so that ranks whose shards differ in size agree on the order. Empty ones are
    left out.

    `first` is the index of the first subgroup made. `sealed`: parameters have a place beside their state, which counts
    as state in `max_bytes`.
    """
    subgroups: list[Subgroup] = []
    pending: list[Run] = []
    current: tuple[int, MasterForm, UpdateRule, int, int] | None = None

    def close() -> None:
        if pending and current:
            group, form, rule, block, _ = current
            subgroups.append(Subgroup(first + len(subgroups), group, form, rule, tuple(pending), block))
        pending.clear()

    for param in _side_by_side(params):
        kind = (param.group, FORM_OF_DTYPE[param.dtype], param.rule, param.block, param.log_itemsize)
        if kind != current or param.rule.whole:
            close()
            current = kind
            itemsize = (sealed_itemsize if sealed else state_itemsize)(kind[1], param.rule.states) + param.log_itemsize
            capacity = min(int(max_bytes // max(itemsize, 1)), round_up(max_numel, TILE_NUMEL))
            alignment = _alignment(param.rule)
        start = 0
        while start < param.numel:
            at = pending[-1].at + round_up(pending[-1].numel, alignment) if pending else 0
            numel = param.numel if param.rule.whole else _fitting(param.numel - start, capacity - at, alignment)
            if numel == 0:
                close()
                continue
            pending.append(Run(param.number, start, start + numel, at))
            start += numel
    close()
    return subgroups


def _side_by_side(params: Iterable[ParamToPlace]) -> Iterator[ParamToPlace]:
    """Yield neighbours that could share subgroups but for their rules in the order of these.

    In 8 bits a layer's small parameters have another rule than its matrices.
    """
    for _, near in groupby(params, lambda param: param._replace(number=0, numel=0, rule=_NO_RULE)):
        alike = list(near)
        rules = [param.rule for param in alike]
        yield from sorted(alike, key=lambda param: rules.index(param.rule))


def _fitting(wanted: int, room: int, alignment: int) -> int:
    if round_up(wanted, alignment) <= room:
        return wanted
    return max(0, room) // TILE_NUMEL * TILE_NUMEL
