"""Optimizer state seen from outside: read-through entries, state dicts, loading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import local_tensor, sharded_like
from nvme_offload.offload.errors import StateError
from nvme_offload.optim.layout.flat import flat_view, unflatten
from nvme_offload.optim.layout.master import FORM_OF_DTYPE, MasterForm
from nvme_offload.optim.layout.subgroup import Run
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.masters import read_master, section_view, write_master
from nvme_offload.optim.state.pipeline import Memory, holding
from nvme_offload.optim.state.progress import UnfinishedStep
from nvme_offload.optim.state.slots import Residency, SlotRecord
from nvme_offload.optim.tiers.gatherers import drop_gathered

if TYPE_CHECKING:
    from nvme_offload.optim.state.store import StateStore


class ParamState(MutableMapping[str, Any]):
    """State of one parameter: ``step``, the states of its rule and, beside a 16-bit parameter, ``master``.

    Reading a key fetches a copy from the tier: fp32 tensors in the parameter's shape on the CPU, ``step`` an fp32
    scalar as in torch. Assigning to a key writes through to the tier, ``master`` also to the parameter. Changing a
    fetched tensor in place changes nothing but the copy.
    """

    def __init__(self, store: StateStore, index: int) -> None:
        self._store = store
        self._index = index

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys():
            raise KeyError(key)
        if key == "step":
            return torch.tensor(float(self._store.steps[self._index]))
        return read_entries(self._store, {self._index: (key,)})[self._index][key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._keys():
            raise KeyError(f"{key!r} is not optimizer state here; it has {', '.join(self._keys())}")
        set_entries(self._store, {self._index: {key: value}})

    def __delitem__(self, key: str) -> None:
        raise TypeError("optimizer state cannot be removed from a parameter; make another optimizer instead")

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def __repr__(self) -> str:
        return f"ParamState({', '.join(self._keys())}; read from the tier on access)"

    def _keys(self) -> tuple[str, ...]:
        return entry_names(self._store, self._index)


class StateView(MutableMapping[torch.Tensor, ParamState]):
    """``optimizer.state``: every parameter has an entry from construction on.

    A parameter's state can be exchanged or dropped: it begins afresh then, with zero moments at step 0, as in torch.
    Master weights stay, and so does the (fresh) entry.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def __getitem__(self, param: torch.Tensor) -> ParamState:
        return ParamState(self._store, self._index_of(param))

    def __setitem__(self, param: torch.Tensor, value: Mapping[str, Any]) -> None:
        index = self._index_of(param)
        if not isinstance(value, Mapping):
            raise TypeError(f"the state of a parameter is a mapping of {', '.join(self[param])}, not {value!r}")
        if unknown := sorted(set(value) - set(self[param])):
            raise KeyError(f"{unknown[0]!r} is not optimizer state here; it has {', '.join(self[param])}")
        given = dict(value)  # fetched first: it may be of this parameter
        self._set(index, {**self._fresh(index), **given})

    def __delitem__(self, param: torch.Tensor) -> None:
        index = self._index_of(param)
        self._set(index, self._fresh(index))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._store.table.leaves)

    def __len__(self) -> int:
        return len(self._store.table.leaves)

    def __contains__(self, param: object) -> bool:
        return isinstance(param, torch.Tensor) and self._store.indices.get(param) is not None

    def clear(self) -> None:
        """Let the state of every parameter begin afresh."""
        for param in self:
            del self[param]

    def pop(self, param: torch.Tensor, *default: Any) -> Any:
        """The state of a parameter as a dict of copies; it begins afresh."""
        if default and param not in self:
            return default[0]
        entries = dict(self[param])
        del self[param]
        return entries

    def popitem(self) -> tuple[torch.Tensor, ParamState]:
        """Raises TypeError: there would always be another."""
        raise TypeError("every parameter keeps an entry in optimizer.state; use pop(parameter), or clear()")

    def _set(self, index: int, entries: Mapping[str, Any]) -> None:
        self._store.check_whole()
        if entries or self._store.is_placed(index):
            set_entries(self._store, {index: entries})

    def _fresh(self, index: int) -> dict[str, torch.Tensor]:
        """Everything but the master; nothing of a parameter that never had state."""
        if not self._store.is_placed(index):
            return {}
        names = entry_names(self._store, index)
        return {name: fresh_entry_of(self._store, index, name) for name in names if name != "master"}

    def _index_of(self, param: object) -> int:
        index = self._store.indices.get(param) if isinstance(param, torch.Tensor) else None
        if index is None:
            what = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
            raise KeyError(f"{what} is not a parameter of this optimizer: optimizer.state has no other keys")
        return index


def entry_names(store: StateStore, index: int) -> tuple[str, ...]:
    """Names of a parameter's state entries."""
    form = FORM_OF_DTYPE[store.table.params[index].dtype]
    master = () if form is MasterForm.ITSELF else ("master",)
    return ("step", *master, *(state.name for state in store.rule_of(index).states))


def read_entries(store: StateStore, wanted: Mapping[int, Iterable[str]]) -> dict[int, dict[str, torch.Tensor]]:
    """Copies of state entries by parameter index and name, reading every subgroup at most once."""
    store.check_whole()
    store.table.check_layouts()
    params = store.table.params
    flat = {
        index: {name: flat_view(_room_for(store, index, name)) for name in names if name != "step"}
        for index, names in wanted.items()
    }
    for slot in _slots_of(store, wanted):
        if slot.residency is Residency.UNBORN:
            continue
        with holding(store.pipeline, slot, change=False) as memory:
            for run in slot.subgroup.runs:
                for name, target in flat.get(run.param, {}).items():
                    target[run.start : run.stop] = read_run(store, slot, memory, run, name)
    return {
        index: {
            name: _as_sharded(unflatten(values, params[index]), store.table.leaves[index])
            for name, values in entries.items()
        }
        for index, entries in flat.items()
    }


def _as_sharded(local: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """State of a sharded parameter is sharded like it, as checkpoints expect."""
    return sharded_like(local, leaf) if isinstance(leaf, DTensor) else local


def fresh_entry(param: torch.Tensor, name: str, rule: UpdateRule) -> torch.Tensor:
    """An entry of a parameter that was never updated: as the rule begins, and the master, which is the parameter."""
    if name == "step":
        return torch.zeros(())
    if name == "master":
        return unflatten(flat_view(param).cpu().float(), param)
    [birth] = (state.birth for state in rule.states if state.name == name)
    return unflatten(torch.full((param.numel(),), birth, dtype=torch.float32), param)


def _room_for(store: StateStore, index: int, name: str) -> torch.Tensor:
    """A fresh entry, perhaps to be overwritten. What is on a tier and has state is born: nothing needs to be read."""
    if index in store.table.uppers and store.is_placed(index):
        return torch.empty(store.table.params[index].shape)
    return fresh_entry_of(store, index, name)


def fresh_entry_of(store: StateStore, index: int, name: str) -> torch.Tensor:
    """`fresh_entry` of a parameter wherever it is; the master of a split shard is both of its halves.

    Raises:
        SwapIOError: it is on a tier and cannot be read.
    """
    param, lower = store.table.params[index], store.table.first_lower.get(index)
    if lower is None or name != "master":
        return fresh_entry(param, name, store.rule_of(index))
    upper = store.table.copy_of(Run(index, 0, param.numel(), 0))
    return unflatten(store.kernels.join(upper, lower), param)


def prepare_entries(store: StateStore, given: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, torch.Tensor]]:
    """Entries by parameter index and name as `write_entries` takes them, with a place for each; no state changes.

    Raises:
        ValueError: an entry has the wrong shape or is not a number.
        OutOfSpaceError: parameters that had no state so far find no place for it.
    """
    store.check_usable()
    store.table.check_layouts()
    entries = {
        index: {name: _check_entry(store, index, name, value) for name, value in named.items()}
        for index, named in given.items()
    }
    store.ensure_placed(entries)
    return entries


def set_entries(store: StateStore, given: Mapping[int, Mapping[str, Any]]) -> None:
    """Set entries by parameter index and name. Where that stops after the first change, the state says so."""
    store.check_whole()
    entries = prepare_entries(store, given)
    write_entries(store, entries)
    store.unfinished = None


def write_entries(store: StateStore, entries: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    """Set what `prepare_entries` made, visiting every subgroup at most once.

    From the first change on the state is said to be unfinished; the caller takes that back.
    """
    broken = store.unfinished or UnfinishedStep.of_load(split=store.has_split_params, owner=store.owner)
    masters = any("master" in named for named in entries.values())
    for slot in _slots_of(store, (index for index, named in entries.items() if named.keys() - {"step"})):
        with holding(store.pipeline, slot, change=True, load=not _sets_everything(slot, entries)) as memory:
            # What fails in here is undone on NVMe, where the drive has the state as it was. A master is also in the
            # parameter, and the two only agree again when both are written.
            if masters or slot.extent is None:
                store.unfinished = broken
            for run in slot.subgroup.runs:
                for name, values in entries.get(run.param, {}).items():
                    if name != "step":
                        write_run(store, slot, memory, run, name, values[run.start : run.stop])
            store.unfinished = broken
    for index, named in entries.items():
        if "step" in named:
            store.steps[index] = int(named["step"])
        if "master" in named:
            drop_gathered(store.table.leaves[index])


def _sets_everything(slot: SlotRecord, entries: Mapping[int, Mapping[str, torch.Tensor]]) -> bool:
    """Whether nothing of what the slot holds now is kept. Then it need not be readable either."""
    sections = slot.subgroup.sections.keys()
    return all(sections <= entries.get(run.param, {}).keys() for run in slot.subgroup.runs)


def _slots_of(store: StateStore, indices: Iterable[int]) -> list[SlotRecord]:
    wanted = set(indices)
    return [slot for slot in store.slots if any(run.param in wanted for run in slot.subgroup.runs)]


def read_run(store: StateStore, slot: SlotRecord, memory: Memory, run: Run, name: str) -> torch.Tensor:
    """Masters of a run, joined, or a state, where it lies if that is in fp32; fp32 [run.numel]."""
    if name == "master":
        return read_master(run, slot.subgroup, memory, store.table, store.kernels)
    section = section_view(slot.subgroup, memory, name, run)
    if section is None:
        raise StateError(name, "a section of this subgroup", "none")
    return section.float()


def write_run(store: StateStore, slot: SlotRecord, memory: Memory, run: Run, name: str, values: torch.Tensor) -> None:
    """Set the masters of a run, also in the parameter, or a state; fp32 [run.numel]."""
    if name == "master":
        write_master(run, values, slot.subgroup, memory, store.table, store.kernels)
        return
    section = section_view(slot.subgroup, memory, name, run)
    if section is not None:
        section.copy_(values)


def _check_entry(store: StateStore, index: int, name: str, value: Any) -> torch.Tensor:
    """The entry as flat fp32 on the CPU, in the parameter's order of memory."""
    param, where = store.table.params[index], f"{name} of {store.table.names[index]}"
    tensor = local_tensor(torch.as_tensor(value))
    if tensor.is_complex():
        raise ValueError(f"{where} is {tensor.dtype}: optimizer state is real")
    if name == "step":
        if tensor.numel() != 1 or not (float(tensor) >= 0 and float(tensor).is_integer()):
            raise ValueError(f"{where} = {value!r}: the step is one whole number, 0 or more")
        return tensor.reshape(())
    if tensor.shape != param.shape:
        raise ValueError(f"{where} has shape {tuple(tensor.shape)}; the parameter has {tuple(param.shape)}")
    if (tensor.dtype, tensor.device.type, tensor.stride()) == (torch.float32, "cpu", param.stride()):
        return flat_view(tensor)
    target = torch.empty_like(param, dtype=torch.float32, device="cpu", memory_format=torch.preserve_format)
    return flat_view(target.copy_(tensor.detach()))
