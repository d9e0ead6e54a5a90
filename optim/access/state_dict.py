"""Make and take state dicts as torch lays them out: parameters are numbered as they stand in the groups."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nvme_offload.offload.warn import warn_user
from nvme_offload.optim.access.entries import fresh_entry, read_entries
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.state.table import ParamRecord, step_entry
from nvme_offload.optim.tiers.parts import split_shard


def packed_state(store: StateStore, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of what is in the groups, without that of others or what was let go. Call it `at_rest`.

    Returns:
        ``state`` by number, fp32 copies in host memory, and ``param_groups`` with numbers in place of parameters.
    """
    leaves = dict.fromkeys(leaf for group in groups for leaf in group["params"])
    numbers = {leaf: number for number, leaf in enumerate(leaves)}
    members = [] if store.has_let_go else store.table.members(groups)
    records = {numbers[record.leaf]: record for record in members if store.has_state(record)}
    tensors = read_entries(store, {record.index: record.shown_names for record in records.values()})
    state: dict[int, dict[str, torch.Tensor]] = {}
    for number, record in records.items():
        step = {"step": step_entry(record.steps)} if record.rule.counts_steps else {}
        state[number] = step | tensors[record.index]
    numbered = [{**group, "params": [numbers[param] for param in group["params"]]} for group in groups]
    return {"state": state, "param_groups": numbered}


def matched_state(
    store: StateStore,
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any],
    check: Callable[[Mapping[str, Any], int], None],
) -> dict[int, dict[str, Any]]:
    """Return the entries of a state dict by parameter index; what it does not hold of a parameter with state is fresh.

    `check` gets each of its groups with the number of the optimizer's group, and raises ValueError for one that cannot
    replace that. So does this if groups or entries do not fit.
    """
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    own_sizes = [len(group["params"]) for group in groups]
    if sizes != own_sizes:
        raise ValueError(f"the state dict has parameter groups of {sizes} parameters, this optimizer of {own_sizes}")
    for number, group in enumerate(state_dict["param_groups"]):
        check(group, number)
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    own = [store.table.of(param) for group in groups for param in group["params"]]
    given, rounded = {}, []
    for record, key in zip(own, saved, strict=True):
        entries = record.rule.adopted(state_dict["state"].get(key, {}))
        known = record.entry_names
        if unknown := sorted(set(entries) - {*known, "master"}):
            raise ValueError(f"state of {record.name} holds {unknown[0]!r}; {record.rule.name} has {', '.join(known)}")
        rounded += _rounded_states(record, entries)
        if entries or record.is_placed:
            # The master of a split shard is the parameter itself: not given, it stays.
            stays = {"master"} - set(entries) if split_shard(record.leaf) is not None else set()
            given[record.index] = {
                name: entries[name] if name in entries else fresh_entry(store, record.index, name)
                for name in known
                if name not in stays
            }
    if rounded:
        warn_user(
            f"{rounded[0]} and {len(rounded) - 1} further states of the state dict have 16 bits, as torch.optim keeps "
            "them over 16-bit parameters, and are taken as they are. If they were fp32 once, torch's load_state_dict "
            "has rounded them: then load the state dict that it was given"
        )
    return given


def _rounded_states(record: ParamRecord, entries: Mapping[str, Any]) -> list[str]:
    """Name states of a parameter that came in a narrower dtype than the rule keeps them in."""
    kept = {state.name: state.dtype for state in record.rule.states}
    return [
        f"{name} of {record.name}"
        for name, value in entries.items()
        if name in kept and isinstance(value, torch.Tensor) and value.dtype.itemsize < kept[name].itemsize
    ]
