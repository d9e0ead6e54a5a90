"""Parameter groups: what may stand in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nvme_offload.optim.layout.flat import check_no_overlap, check_no_repeats, check_param, storage_of
from nvme_offload.optim.rules.rule import UpdateRule
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


def check_torch_arguments(rule: UpdateRule, arguments: Mapping[str, Any], owner: str) -> None:
    """Check arguments that torch's optimizer has and ours does not name.

    ``fused`` and ``foreach`` choose among torch's implementations; there is one here, so either value will do.

    Args:
        rule: the optimizer's.
        arguments: by name.
        owner: the optimizer's name.

    Raises:
        TypeError: one asks for what is not supported, or torch has no such argument either.
    """
    for name, value in arguments.items():
        if name not in ("fused", "foreach", *rule.refused):
            raise TypeError(f"{owner} has no argument {name!r}")
        if value and name in rule.refused:
            raise TypeError(f"{owner}: {name} = {value!r} is not supported; leave it out")


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


def _listed(rule: UpdateRule) -> str:
    return ", ".join(f"{state.name} (from {state.birth:g})" for state in rule.states) or "none"
