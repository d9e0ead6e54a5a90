"""Parameter groups: what may stand in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nvme_offload.optim.access.split import check_not_elsewhere
from nvme_offload.optim.layout.flat import check_no_overlap, check_no_repeats, check_param, storage_of
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.state.table import ParamRecord, ParamTable


def check_group(
    rule: UpdateRule, group: Mapping[str, Any], number: int, records: Iterable[ParamRecord], owner: str
) -> None:
    """Check hyperparameters of parameters that have been taken on.

    Args:
        rule: the optimizer's.
        group: hyperparameters by name.
        number: of the group.
        records: the parameters in it.
        owner: the optimizer's name.

    Raises:
        ValueError: one cannot be used, or asks for other states than a parameter has.
    """
    rule.check(group, number)
    other = rule.of(group)
    for record in records:
        if record.rule != other:
            asked = ", ".join(f"{key} = {group[key]!r}" for key in rule.shaping)
            raise ValueError(
                f"parameter group {number}: {asked}: its state is then {_listed(other)}, and it was made with "
                f"{_listed(record.rule)}; make a new {owner} for that"
            )


def new_params(rule: UpdateRule, group: Mapping[str, Any], number: int, table: ParamTable) -> dict[torch.Tensor, str]:
    """Parameters of a group that the optimizer does not know yet, with their names for messages.

    Raises:
        ValueError: a hyperparameter or a parameter cannot be used; names it.
    """
    rule.check(group, number)
    own = rule.of(group)
    names = group.get("param_names") or [
        f"parameter {place} of group {number}" for place in range(len(group["params"]))
    ]
    check_no_repeats(group["params"], names)
    new = {leaf: name for leaf, name in zip(group["params"], names, strict=True) if table.find(leaf) is None}
    for leaf, name in new.items():
        check_param(storage_of(leaf), name)
        own.check_param(leaf, name)
    known = [record.name for record in table]
    check_no_overlap([*table.params, *map(storage_of, new)], [*known, *new.values()])
    return new


def take_on(store: StateStore, rule: UpdateRule, group: Mapping[str, Any], number: int) -> list[ParamRecord]:
    """Have a record of each parameter of a group; returns those that are new.

    Raises:
        ValueError: see `new_params`; or another optimizer has half of one of them. None was taken.
    """
    new = new_params(rule, group, number, store.table)
    for leaf, name in new.items():
        check_not_elsewhere(store, leaf, name)
    return store.add_params(number, rule.of(group), new)


def follow(store: StateStore, rule: UpdateRule, groups: Sequence[Mapping[str, Any]]) -> None:
    """Until any state has its place, have records of what is in the groups by now. Call it at rest.

    Whoever shards a model whose optimizer is made already, as accelerate does, puts other parameters into the groups.

    Raises:
        ValueError: one of the others cannot be used; names it.
    """
    if store.is_settled:
        return
    leaves = dict.fromkeys(leaf for group in groups for leaf in group["params"])
    if [*map(id, leaves)] == [*map(id, store.table.leaves)]:
        return
    store.table.drop(0)
    for number, group in enumerate(groups):
        take_on(store, rule, group, number)


def _listed(rule: UpdateRule) -> str:
    return ", ".join(f"{state.name} (from {state.birth:g})" for state in rule.states) or "none"
