"""Turn hyperparameters into the scalars of a step, for each parameter."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from nvme_offload.offload.warn import warn_user
from ..rules.rule import UpdateRule, rounded
from ..state.body import StepState
from ..state.table import ParamRecord
from ..updates.work import StepScalars


def scalars_of(
    store: StepState, rule: UpdateRule, groups: Sequence[Mapping[str, Any]], indices: Collection[int], grad_scale: float
) -> dict[int, StepScalars]:
    """Return the scalars of the next update of these parameters, by index. `grad_scale` multiplies stored gradients."""
    scalars = {}
    by_step: dict[tuple[int, int, bool], StepScalars] = {}  # most parameters of a group are at the same step
    for number, group in enumerate(groups):
        records = [store.table.of(param) for param in group["params"]]
        check_group(rule, group, number, records, store.owner)
        own = rule.of(group)
        for record in records:
            if record.index not in indices:
                continue
            key = number, record.steps + 1, record.rule.dithers
            if key not in by_step:
                [scale] = rounded(-grad_scale if group.get("maximize") else grad_scale)
                by_step[key] = StepScalars(own.scalars(group, key[1]), scale, record.rule.dither(key[1]))
            scalars[record.index] = by_step[key]
    return scalars


def with_own_states(
    rule: UpdateRule, own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return saved groups, each with the ``state_dtype`` that its states have here; say where that is another."""
    groups = [dict(group) for group in saved]
    if "state_dtype" not in rule.shaping:
        return groups
    for number, (here, group) in enumerate(zip(own, groups, strict=False)):
        was, now = (each.get("state_dtype", "fp32") for each in (group, here))
        group |= {"state_dtype": now} if now != was or "state_dtype" in here else {}
        if now != was:
            warn_user(
                f'parameter group {number}: its states were kept with state_dtype = "{was}" and are with "{now}" here: '
                "each value is converted to the nearest, and training goes on from there as another optimizer"
            )
    return groups


def check_group(
    rule: UpdateRule, group: Mapping[str, Any], number: int, records: Iterable[ParamRecord], owner: str
) -> None:
    """Raise ValueError if a hyperparameter cannot be used, or asks for other states than a parameter has."""
    rule.check(group, number)
    other = rule.of(group)
    for record in records:
        if not record.rule.is_in(other):
            asked = ", ".join(f"{key} = {group.get(key)!r}" for key in rule.shaping)
            raise ValueError(
                f"parameter group {number}: {asked}: its state is then {_listed(other)}, and it was made with "
                f"{_listed(record.rule)}; make a new {owner} for that"
            )


def _listed(rule: UpdateRule) -> str:
    return ", ".join(f"{state.name} ({state.dtype}, from {state.birth:g})" for state in rule.states) or "none"
