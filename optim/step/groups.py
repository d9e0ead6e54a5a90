"""Parameter groups: what may stand in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nvme_offload.optim.access.split import check_not_elsewhere
from nvme_offload.optim.layout.flat import check_no_overlap, check_param, storage_of
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.state.table import ParamRecord, ParamTable
from nvme_offload.optim.telemetry.warn import warn_user


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
    if len(set(group["params"])) < len(group["params"]):  # torch warns of it
        warn_user(f"parameter group {number} has a parameter twice: a step updates it once, where torch's does twice")
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
    if store.is_placed:
        return
    leaves = dict.fromkeys(leaf for group in groups for leaf in group["params"])
    if [*map(id, leaves)] == [*map(id, store.table.leaves)]:
        return
    store.table.drop(0)
    for number, group in enumerate(groups):
        take_on(store, rule, group, number)
