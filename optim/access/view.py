"""Offer ``optimizer.state``: entries that are read from their tier on access and written through."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nvme_offload.offload.warn import warn_user
from ..ranks.collective import reachable
from ..state.body import StateBody
from ..state.condition import Need
from ..state.store import StateStore
from ..state.table import ParamRecord, step_entry
from ..tiers.parts import split_shard
from .entries import fresh_entry, has_entries, read_entries, set_entries


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
    kept = {state.name: state.shown_dtype for state in record.rule.states}
    return [
        f"{name} of {record.name}"
        for name, value in entries.items()
        if name in kept and isinstance(value, torch.Tensor) and value.dtype.itemsize < kept[name].itemsize
    ]


class ParamState(MutableMapping[str, Any]):
    """The state of one parameter: ``step``, the states of its rule and, beside a 16-bit parameter, ``master``.

    Reading a key fetches a copy from the tier: fp32 tensors in the parameter's shape on the CPU (of a sharded one
    whose ranks can only gather on a device, there), ``step`` an fp32 scalar as in torch, fp64 beyond 2**24. Assigning
    to a key writes through to the tier, ``master`` also to the parameter. Changing a fetched tensor in place changes
    nothing but the copy.
    """

    def __init__(self, body: StateBody, index: int) -> None:
        self._body = body
        self._index = index

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys():
            raise KeyError(key)
        if key == "step":
            with self._body.at_rest():
                return step_entry(self._body.table[self._index].steps)
        entry = read_entries(self._body, {self._index: (key,)})[self._index][key]
        return reachable(entry) if isinstance(entry, DTensor) else entry

    def __setitem__(self, key: str, value: Any) -> None:
        record = self._body.table[self._index]
        if key not in record.shown_names:
            raise KeyError(_not_state(key, record))
        given = record.rule.adopted({key: value})
        # Trainers that move state to a device (Lightning at both ends of a fit) assign every entry that they have read.
        if not has_entries(self._body, self._index, given):
            set_entries(self._body, {self._index: given})

    def __delitem__(self, key: str) -> None:
        raise TypeError("optimizer state cannot be removed from a parameter; make another optimizer instead")

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def __repr__(self) -> str:
        return f"ParamState({', '.join(self._keys())}; read from the tier on access)"

    def _keys(self) -> tuple[str, ...]:
        return self._body.table[self._index].shown_names


class StateView(MutableMapping[torch.Tensor, ParamState]):
    """``optimizer.state``: every parameter has an entry from construction on.

    A parameter's state can be exchanged or dropped: it begins afresh then, with zero moments at step 0, as in torch.
    Master weights stay, and so does the (fresh) entry.
    """

    def __init__(self, body: StateBody) -> None:
        self._body = body

    def __getitem__(self, param: torch.Tensor) -> ParamState:
        return ParamState(self._body, self._index_of(param))

    def __setitem__(self, param: torch.Tensor, value: Mapping[str, Any]) -> None:
        index = self._index_of(param)
        if not isinstance(value, Mapping):
            raise TypeError(f"the state of a parameter is a mapping of {', '.join(self[param])}, not {value!r}")
        record = self._body.table[index]
        if unknown := sorted(set(value) - set(record.shown_names)):
            raise KeyError(_not_state(unknown[0], record))
        given = record.rule.adopted(value)  # fetched first: it may be of this parameter
        self._set(index, {**self._fresh(index), **given})

    def __delitem__(self, param: torch.Tensor) -> None:
        index = self._index_of(param)
        self._set(index, self._fresh(index))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._body.table.leaves)

    def __len__(self) -> int:
        return len(self._body.table.leaves)

    def clear(self) -> None:
        """Let the state of every parameter begin afresh."""
        for param in self:
            del self[param]

    def pop(self, param: torch.Tensor, *default: Any) -> Any:
        """Return the state of a parameter as a dict of copies; it begins afresh."""
        if default and param not in self:
            return default[0]
        entries = dict(self[param])
        del self[param]
        return entries

    def popitem(self) -> tuple[torch.Tensor, ParamState]:
        """Raise TypeError: there would always be another."""
        raise TypeError("every parameter keeps an entry in optimizer.state; use pop(parameter), or clear()")

    def _set(self, index: int, entries: Mapping[str, Any]) -> None:
        with self._body.at_rest():
            self._body.check(Need.STATE)
        if entries or self._body.table[index].is_placed:
            set_entries(self._body, {index: entries})

    def _fresh(self, index: int) -> dict[str, torch.Tensor]:
        """Return values of fresh state, without the master; nothing of a parameter that never had state."""
        if not self._body.table[index].is_placed:
            return {}
        names = self._body.table[index].entry_names
        return {name: fresh_entry(self._body, index, name) for name in names if name != "master"}

    def _index_of(self, param: object) -> int:
        record = self._body.table.find(param)
        if record is None:
            what = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
            raise KeyError(f"{what} is not a parameter of this optimizer: optimizer.state has no other keys")
        return record.index


def _not_state(key: str, record: ParamRecord) -> str:
    known = f"{key!r} is not optimizer state here; {record.rule.name} has {', '.join(record.shown_names)}"
    return f"{known}. A wrapper that keeps values of its own in optimizer.state needs an optimizer in memory"
