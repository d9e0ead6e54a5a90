"""Check parameter groups and make records of their parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nvme_offload.offload.warn import warn_user
from ..access.split import check_not_elsewhere
from ..layout.flat import check_no_overlap, check_param, storage_of
from ..layout.geometry import Part
from ..rules.rule import UpdateRule
from ..state.store import StateStore
from ..state.table import ParamRecord, ParamTable


def new_params(rule: UpdateRule, group: Mapping[str, Any], number: int, table: ParamTable) -> dict[torch.Tensor, str]:
    """Return a group's new parameters, with their names for messages. ValueError names what cannot be used."""
    rule.check(group, number)
    own = rule.of(group)
    names = group.get("param_names", ())
    if len(names) != len(group["params"]):  # some were taken out since, and torch leaves their names
        names = [f"parameter {place} of group {number}" for place in range(len(group["params"]))]
    if len(set(group["params"])) < len(group["params"]):  # torch warns of it
        warn_user(f"parameter group {number} has a parameter twice: a step updates it once, where torch's does twice")
    new = {leaf: name for leaf, name in zip(group["params"], names, strict=True) if table.find(leaf) is None}
    for leaf, name in new.items():
        check_param(storage_of(leaf), name)
        own.check_param(leaf, name)
    check_no_overlap([*table.params, *map(storage_of, new)], [*(record.name for record in table), *new.values()])
    return new


def take_on(store: StateStore, rule: UpdateRule, group: Mapping[str, Any], number: int) -> list[ParamRecord]:
    """Make records of a group's new parameters, and return them. Where one is refused none is taken."""
    new = new_params(rule, group, number, store.table)
    for leaf, name in new.items():
        check_not_elsewhere(store, leaf, name)
    table, own = store.table, rule.of(group)
    rules = [_rule_of(own, leaf, name) for leaf, name in new.items()]
    return [
        table.add(leaf, name, number, its, Part.of(leaf).origin(len(table)) if its.dithers else None)
        for (leaf, name), its in zip(new.items(), rules, strict=True)
    ]


def _rule_of(own: UpdateRule, leaf: torch.Tensor, name: str) -> UpdateRule:
    """Return the rule of a parameter of a group. ValueError: its shards cut what shares an exponent in 8 bits."""
    if not own.block:
        return own
    part = Part.of(leaf)
    its = own.of_param(part.whole, part.order)
    if its.block and not part.origin(0).has_whole_blocks(its.block):
        raise ValueError(
            f'{name}: state_dtype = "int8": each {its.block} elements of a row of {tuple(part.whole)} share an exponent'
            f", and this rank's part, {part.shape} from {part.offsets} on, cuts them: shard it over dimension 0, or "
            'give it a parameter group with state_dtype = "fp32"'
        )
    return its


def follow(store: StateStore, rule: UpdateRule, groups: Sequence[Mapping[str, Any]]) -> None:
    """Make records of the parameters that are in the groups now, until any state has its place. Call it `at_rest`.

    Whoever shards a model whose optimizer is made already, as accelerate does, puts other parameters into the groups.
    """
    if store.is_placed:
        return
    leaves = dict.fromkeys(leaf for group in groups for leaf in group["params"])
    if [*map(id, leaves)] == [*map(id, store.table.leaves)]:
        return
    store.table.drop(0)
    for number, group in enumerate(groups):
        take_on(store, rule, group, number)
