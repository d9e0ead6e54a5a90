"""The scalars of a step: what an update rule makes of the hyperparameters, for each parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nvme_offload.optim.rules.rule import UpdateRule, rounded
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.step.groups import check_group
from nvme_offload.optim.updates.work import StepScalars


def scalars_of(
    store: StateStore,
    rule: UpdateRule,
    groups: Sequence[Mapping[str, Any]],
    indices: Collection[int],
    grad_scale: float,
) -> dict[int, StepScalars]:
    """Scalars of the next update of these parameters, by index.

    Args:
        store: has the number of updates that each has had.
        rule: the optimizer's.
        groups: with hyperparameters, which schedulers write to.
        indices: of the parameters.
        grad_scale: what stored gradients are multiplied by.

    Raises:
        ValueError: a hyperparameter cannot be used.
    """
    scalars = {}
    by_step: dict[tuple[int, int], StepScalars] = {}  # most parameters of a group are at the same step
    for number, group in enumerate(groups):
        records = [store.table.of(param) for param in group["params"]]
        check_group(rule, group, number, records, store.owner)
        own = rule.of(group)
        for record in records:
            if record.index not in indices:
                continue
            key = number, record.steps + 1
            if key not in by_step:
                [scale] = rounded(-grad_scale if group.get("maximize") else grad_scale)
                by_step[key] = StepScalars(own.scalars(group, key[1]), scale)
            scalars[record.index] = by_step[key]
    return scalars
