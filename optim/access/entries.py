"""Read, check and write entries of the optimizer's state, by parameter and name."""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import local_tensor, sharded_like
from nvme_offload.offload.devices.device import HOST
from nvme_offload.offload.progress import tracked
from ..layout.flat import flat_view, room_like, unflatten
from ..layout.subgroup import Run
from ..state.body import StateBody
from ..state.condition import Need
from ..state.pipeline import HeldState
from ..state.slots import SlotRecord
from ..tiers.parts import drop_gathered
from .values import LiveValues, fresh_values, write_run


def read_entries(body: StateBody, wanted: Mapping[int, Iterable[str]]) -> dict[int, dict[str, torch.Tensor]]:
    """Return copies of state entries by parameter index and name, reading every subgroup at most once."""
    with body.at_rest():
        body.check(Need.STATE)
        body.table.check_layouts()
        names = {index: [name for name in named if name != "step"] for index, named in wanted.items()}
        read: dict[int, dict[str, torch.Tensor]] = {index: {} for index in wanted}
        slots = body.slots_of(wanted)
        values = LiveValues(body, ahead=slots)
        for slot in tracked("reading the state", slots, attrgetter("size_bytes")):
            for run in slot.subgroup.runs:
                for name in names.get(run.param, ()):
                    _read_run(values, slot, run, name, read[run.param], body.table[run.param].param.numel())
        return {
            index: {name: _as_entry(body, index, name, entries.get(name)) for name in names[index]}
            for index, entries in read.items()
        }


def _read_run(
    values: LiveValues, slot: SlotRecord, run: Run, name: str, entries: dict[str, torch.Tensor], numel: int
) -> None:
    """Put a run of an entry of `numel` elements to the parts of it that are read."""
    if run.numel == numel:
        entries[name] = values.read(slot, run, name, copy=True)
        return
    if name not in entries:
        entries[name] = torch.empty(numel, dtype=torch.float32, device="cpu")
    run.part(entries[name]).copy_(values.read(slot, run, name))


def _as_entry(body: StateBody, index: int, name: str, flat: torch.Tensor | None) -> torch.Tensor:
    """Shape a flat entry as its parameter; shard it like a sharded one. Without slots it is as it would be born."""
    record = body.table[index]
    local = fresh_entry(body, index, name) if flat is None else unflatten(flat, record.param)
    return sharded_like(local, record.leaf) if isinstance(record.leaf, DTensor) else local


def fresh_entry(body: StateBody, index: int, name: str) -> torch.Tensor:
    """Return an entry of a parameter, wherever it is, that was never updated: see `fresh_values`."""
    if name == "step":
        return torch.zeros((), device="cpu")
    param = body.table[index].param
    return unflatten(fresh_values(body, Run(index, 0, param.numel(), 0), name), param)


def prepare_entries(body: StateBody, given: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, torch.Tensor]]:
    """Return entries as `write_entries` takes them, each with a place. No state changes. ValueError: one is unfit."""
    with body.at_rest():
        body.table.check_layouts()
        entries = {
            index: {name: _check_entry(body, index, name, value) for name, value in named.items()}
            for index, named in given.items()
        }
        body.ensure_placed([body.table[index] for index in entries])
        return entries


def has_entries(body: StateBody, index: int, given: Mapping[str, Any]) -> bool:
    """Return whether a parameter has these entries already, bit for bit. ValueError: one is unfit."""
    with body.at_rest():
        held = read_entries(body, {index: given})[index] | {"step": body.table[index].steps}

        def bits(entries: Mapping[str, Any]) -> list[torch.Tensor]:
            checked = {name: _check_entry(body, index, name, entries[name]) for name in given}
            return [
                value.double().view(torch.int64) if name == "step" else value.view(torch.int32)
                for name, value in checked.items()
            ]

        return all(map(torch.equal, bits(held), bits(given)))


def set_entries(body: StateBody, given: Mapping[int, Mapping[str, Any]]) -> None:
    """Set entries by parameter index and name. Where that stops after the first change, the state says so."""
    with body.at_rest():
        body.check(Need.STATE)
        write_entries(body, prepare_entries(body, given))
        body.be_whole()


def write_entries(body: StateBody, entries: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    """Set what `prepare_entries` made, visiting every subgroup at most once. Call it `at_rest`.

    From the first change on the state is said to be neither old nor new; the caller takes that back with `be_whole`.
    """
    masters = any("master" in named for named in entries.values())
    changing = body.slots_of(index for index, named in entries.items() if named.keys() - {"step"})
    for slot in tracked("writing the state", changing, attrgetter("size_bytes")):
        names = slot.subgroup.entry_names
        # Where nothing of what the slot holds now is kept, it need not be readable either.
        load = not all(names <= entries.get(run.param, {}).keys() for run in slot.subgroup.runs)
        with HeldState(body.pipeline, slot, load=load) as memory:
            # What fails in here is undone on NVMe, where the drive has the state as it was. A master is also in the
            # parameter, and the two only agree again when both are written.
            if masters or not slot.home.is_visited:
                body.note_half_written()
            for run in slot.subgroup.runs:
                for name, values in entries.get(run.param, {}).items():
                    if name != "step":
                        write_run(body, slot, memory, run, name, run.part(values))
            body.note_half_written()
    for index, named in entries.items():
        if "step" in named:
            body.table.count_steps({index: int(named["step"])})
        if "master" in named:
            drop_gathered(body.table[index].leaf)


def _check_entry(body: StateBody, index: int, name: str, value: Any) -> torch.Tensor:
    record = body.table[index]
    param = record.param
    exact = torch.float64 if isinstance(value, float) else None
    tensor = local_tensor(value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=exact, device="cpu"))
    if tensor.is_complex():
        raise ValueError(f"{name} of {record.name} is {tensor.dtype}: optimizer state is real")
    if name == "step":
        if tensor.numel() != 1 or not ((number := float(tensor)) >= 0 and number.is_integer()):
            raise ValueError(f"step of {record.name} = {value!r}: the step is one whole number, 0 or more")
        if tensor.is_floating_point() and number > (last := 2 / torch.finfo(tensor.dtype).eps):
            raise ValueError(
                f"step of {record.name} = {value!r}: {tensor.dtype} rounds whole numbers past {last:.0f}, so it may "
                "be another one: give it as the optimizer's own state dict has it, as int, or in torch.float64"
            )
        return tensor
    if name == "master" and tensor.dtype.itemsize < torch.float32.itemsize:
        raise ValueError(
            f"master of {record.name} is {tensor.dtype}: the lower bits of the fp32 master weights are gone. "
            "load_state_dict of torch's optimizers casts every entry to the dtype of its parameter: load the state "
            'dict that it was given. Or delete "master" from the entries: then masters start from the parameters'
        )
    if tensor.shape != param.shape:
        shapes = f"{tuple(tensor.shape)}; the parameter has {tuple(param.shape)}"
        raise ValueError(f"{name} of {record.name} has shape {shapes}")
    if tensor.dtype is torch.float32 and tensor.is_cpu and tensor.stride() == param.stride():
        return flat_view(tensor)
    return flat_view(room_like(param, torch.float32, HOST).copy_(tensor.detach()))
