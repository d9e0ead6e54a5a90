"""Reach any value in one way: an entry of a parameter, a range of it, as it is now or as a commit has it.

Entries are ``master`` and the states of the rule. Everybody goes by slots and runs: what is read in their order is
read once, and the drive can read ahead. Here alone is it decided where in a subgroup an entry lies, in which dtype,
and what stands for state that was never born.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from nvme_offload.offload.devices.device import HOST
from nvme_offload.offload.durable.committed import PinnedReader
from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.storage.swap_space import SwapSpace
from nvme_offload.offload.storage.tier import Memory
from ..layout.codes import decoded, store_coded
from ..layout.subgroup import Run, Subgroup, section_view
from ..state.body import StateBody
from ..state.masters import read_master, write_master
from ..state.slots import Residency, SlotRecord
from ..updates.logs import SlotLogs

COMPUTED = "computed"
"""An entry that commits have besides: bf16 weights as forward computed with them; else the master."""


class Values(Protocol):
    """The values of all entries of all parameters that have state, as they were at one moment."""

    slots: Sequence[SlotRecord]
    """The slots of all subgroups, in the order in which they are read best."""

    def read(self, slot: SlotRecord, run: Run, name: str) -> torch.Tensor:
        """Return an entry of a run, or of a piece of one, fp32 [run.numel]; it is valid until another slot is read."""


class LiveValues:
    """The `Values` of now, which can also be written. Use it `StateBody.at_rest`.

    Args:
        ahead: subgroups in the order in which they are going to be read: reads of those that follow are under way. Of
            others one buffer is enough, even if the rest hold state that the drive does not take.
        anew: whether everything that is written to is going to be overwritten as a whole. Then nothing is read of it.
    """

    def __init__(self, body: StateBody, *, ahead: Sequence[SlotRecord] = (), anew: bool = False) -> None:
        self.slots: Sequence[SlotRecord] = body.slots
        self._body = body
        self._ahead = ahead
        self._positions = {slot.index: position for position, slot in enumerate(ahead)}
        self._anew = anew
        self._begun: set[int] = set()
        self._changed: tuple[SlotRecord, Memory] | None = None
        self._read: tuple[SlotRecord, Memory] | None = None

    def read(self, slot: SlotRecord, run: Run, name: str, *, copy: bool = False) -> torch.Tensor:
        """See `Values`. With `copy` it is in host memory of its own."""
        body = self._body
        # An fp32 parameter is its own master: there is no section of it.
        if slot.residency is Residency.UNBORN or name not in slot.subgroup.sections:
            return fresh_values(body, run, name)
        if self._read is None or self._read[0] is not slot:
            self._read = None  # its buffer may be another's from here on
            self._read = slot, self._acquire(slot)
        return read_run(body, slot, self._read[1], run, name, copy=copy)

    def _acquire(self, slot: SlotRecord) -> Memory:
        pipeline, position = self._body.pipeline, self._positions.get(slot.index)
        # What the drive did not take fills buffers, at rest: then those for reads ahead may be none.
        if position is None or any(other.residency is Residency.DIRTY for other in pipeline.residents):
            return pipeline.acquire([slot], 0, for_change=False)
        return pipeline.acquire(self._ahead, position, for_change=False)

    def open(self, slot: SlotRecord, run: Run, name: str) -> torch.Tensor:
        """Return an entry to be overwritten, in whole or in part, and then given to `write`."""
        if name not in slot.subgroup.sections:
            return fresh_values(self._body, run, name)
        return read_run(self._body, slot, self._change(slot), run, name)

    def write(self, slot: SlotRecord, run: Run, name: str, values: torch.Tensor) -> None:
        """Set an entry of a run, or of a piece of one; fp32 [run.numel] on the CPU.

        A subgroup stays in its buffer until another one is written to, or `release`, and is then written behind.
        """
        write_run(self._body, slot, self._change(slot), run, name, values)

    def release(self) -> None:
        """Let the subgroup that was changed last be written."""
        if self._changed is not None:
            slot, _ = self._changed
            self._changed = None
            self._body.pipeline.release(slot)

    def _change(self, slot: SlotRecord) -> Memory:
        if self._changed is not None and self._changed[0] is slot:
            return self._changed[1]
        self._read = None
        self.release()
        memory = self._body.pipeline.acquire([slot], 0, load=not self._anew or slot.index in self._begun)
        self._body.pipeline.will_change(slot)
        self._changed = slot, memory
        self._begun.add(slot.index)
        return memory


class CommittedValues:
    """The `Values` of a committed step, verified. One subgroup is in memory at a time, in memory of its own.

    Nothing that training changes is looked at after construction, so another thread may read. ResumeError: the
    manifest is not of such slots.

    Args:
        logs: of the run, with kernels of their own: with those of a step they would take turns.
        space: where the extents are. Somebody keeps what the step refers to until all is read.
    """

    def __init__(self, slots: Sequence[SlotRecord], logs: SlotLogs, space: SwapSpace, manifest: Manifest) -> None:
        self.slots = slots
        self._logs = logs
        self._reader = PinnedReader(space)
        layouts = [logs.layout_of(slot.subgroup) for slot in slots]
        self._chains = logs.extents.chains_of(manifest.tables, layouts)
        self._held: tuple[SlotRecord, Memory] | None = None

    def read(self, slot: SlotRecord, run: Run, name: str) -> torch.Tensor:
        """See `Values`. It returns `COMPUTED` in its own dtype."""
        memory = self._memory_of(slot)
        if name not in ("master", COMPUTED):
            return read_state(slot.subgroup, memory, run, name).float()
        section = section_view(slot.subgroup, memory, "master", run)
        tail = self._logs.base_view(slot.subgroup, memory, run)
        if tail is not None:
            return tail if name == COMPUTED else self._logs.kernels.joined(tail, section)
        assert section is not None
        return section.float()

    def _memory_of(self, slot: SlotRecord) -> Memory:
        if self._held is None or self._held[0] is not slot:
            self._held = None
            chain = self._chains[slot.index]
            memory = self._reader.read(chain, partial(self._logs.check, slot.subgroup, chain))
            self._logs.replay_chain(slot.subgroup, chain, memory)
            self._held = slot, memory
        return self._held[1]


def fresh_values(body: StateBody, run: Run, name: str) -> torch.Tensor:
    """Return an entry of a run that was never updated, fp32 [run.numel]: as born; the master from the parameter."""
    record = body.table[run.param]
    if name == "master":
        rest = record.first_rest
        return body.kernels.joined(record.copy_of(run), None if rest is None else run.part(rest))
    [birth] = (state.birth for state in record.rule.states if state.name == name)
    return torch.full((run.numel,), birth, dtype=torch.float32, device="cpu")


def read_run(
    body: StateBody, slot: SlotRecord, memory: Memory, run: Run, name: str, *, copy: bool = False
) -> torch.Tensor:
    """Return masters of a run, joined, or a state, where it lies if that is in fp32; fp32 [run.numel].

    With `copy` it is in host memory of its own.
    """
    if name == "master":
        return read_master(run, slot, memory, body.table, body.kernels)
    values = read_state(slot.subgroup, memory, run, name)
    is_own = slot.subgroup.rule.block > 0  # decoded
    return values.to(HOST, torch.float32, copy=not is_own) if copy else values.float()


def write_run(body: StateBody, slot: SlotRecord, memory: Memory, run: Run, name: str, values: torch.Tensor) -> None:
    """Set the masters of a run, also in the parameter, or a state; fp32 [run.numel]."""
    if name == "master":
        write_master(run, values, slot, memory, body.table, body.kernels)
        return
    write_state(slot.subgroup, memory, run, name, values)


def read_state(subgroup: Subgroup, memory: Memory, run: Run, name: str) -> torch.Tensor:
    """Return the values of a state of a run, 1D: where they lie, if they are kept as such."""
    section, exponents = (section_view(subgroup, memory, each, run) for each in (name, f"{name} exponents"))
    assert section is not None
    return section if exponents is None else decoded(section, exponents)


def write_state(subgroup: Subgroup, memory: Memory, run: Run, name: str, values: torch.Tensor) -> None:
    """Set a state of a run to values, fp32 [run.numel] on the CPU: the nearest that it can have."""
    section, exponents = (section_view(subgroup, memory, each, run) for each in (name, f"{name} exponents"))
    assert section is not None
    if exponents is not None:
        store_coded(section, exponents, values.to(section.device))
    elif section.data_ptr() != values.data_ptr():  # what was opened lies there already
        section.copy_(values)
