"""State and parameters as a commit has them, for a checkpoint that is written while training goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.durable.pinned import PinnedReader
from nvme_offload.offload.durable.ring import ExtentRing
from nvme_offload.offload.storage.swap_space import SwapSpace
from nvme_offload.offload.storage.tier import Memory
from nvme_offload.optim.checkpoint.places import Place
from nvme_offload.optim.kernels import KernelPool
from nvme_offload.optim.layout.master import MasterForm
from nvme_offload.optim.layout.subgroup import Run, section_view
from nvme_offload.optim.state.body import StateBody
from nvme_offload.optim.state.sealing import Sealing
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.updates.slot_logs import SlotLogs


class SealedSlots(NamedTuple):
    """The slots of a durable run, and all that is needed to read a committed step of them."""

    slots: Sequence[SlotRecord]
    extents: ExtentRing
    space: SwapSpace
    log_dtype_of: Callable[[int], torch.dtype]
    """Gives `ParamRecord.log_dtype` of a parameter, by its index."""
    period: int
    """Every how many steps a subgroup is rewritten."""

    @classmethod
    def of(cls, body: StateBody, sealing: Sealing) -> SealedSlots:
        """Those of a run that goes on."""
        run, table = sealing.run, body.table
        return cls(body.slots, run.extents, run.space, lambda index: table[index].log_dtype, sealing.logs.period)


class PinnedState:
    """The `Reach` of a checkpoint of a pinned step. One subgroup is in memory at a time, in memory of its own.

    Nothing that training changes is looked at after construction, so another thread may read.

    Args:
        sealed: what is read; somebody keeps the step until all is.
        manifest: of the step.

    Raises:
        ResumeError: it is not of such slots.
    """

    def __init__(self, sealed: SealedSlots, manifest: Manifest) -> None:
        self._extents = sealed.extents
        self._reader = PinnedReader(sealed.space)
        self.kernels = KernelPool(1)
        """Of this reader alone: with those of a step it would take turns."""
        self._logs = SlotLogs(self._extents, sealed.log_dtype_of, self.kernels, sealed.period)
        layouts = [self._logs.layout_of(slot.subgroup) for slot in sealed.slots]
        self._chains = self._extents.chains_of(manifest.tables, layouts)
        self._held: tuple[SlotRecord, Memory] | None = None
        self._own: defaultdict[int, list[tuple[SlotRecord, Run]]] = defaultdict(list)
        for slot in sealed.slots:
            if slot.subgroup.form is MasterForm.ITSELF:
                for run in slot.subgroup.runs:
                    self._own[run.param].append((slot, run))

    def section(self, slot: SlotRecord, run: Run, name: str) -> Place:
        """See `Reach`."""
        return _PinnedSection(self, slot, run, name)

    def part(self, param: int, start: int, stop: int) -> Place | None:
        """See `Reach`."""
        return self.part_of(param, start, stop) if param in self._own else None

    def part_of(self, param: int, start: int, stop: int) -> Place:
        """Of elements of a parameter that is known to be its own master."""
        return _PinnedPart(self, self._own[param], start, stop)

    def weights(self, slot: SlotRecord, run: Run, dtype: torch.dtype) -> torch.Tensor:
        """Weights of a run, 1D [run.numel]: where `dtype` is that of a split parameter what it was computed with.

        Else its master, or an fp32 parameter itself, in fp32. Valid until another subgroup is read.

        Raises:
            SwapIOError, CorruptionError: see `read`.
        """
        form = slot.subgroup.form
        if form is MasterForm.ITSELF or (form is MasterForm.SPLIT and dtype is torch.bfloat16):
            return self.tail(slot, run)
        return self.section(slot, run, "master").read()

    def read(self, slot: SlotRecord) -> Memory:
        """State, tail and trailer of a subgroup, verified; valid until another one is read.

        Raises:
            SwapIOError: it cannot be read.
            CorruptionError: it is not what was written.
        """
        if self._held is None or self._held[0] is not slot:
            self._held = None
            chain = self._chains[slot.index]
            memory = self._reader.read(chain)
            self._logs.check(slot.subgroup, chain, memory)
            self._logs.replay_chain(slot.subgroup, chain, memory)
            self._held = slot, memory
        return self._held[1]

    def tail(self, slot: SlotRecord, run: Run) -> torch.Tensor:
        """What parameters of a run have besides the state: bf16 upper halves or fp32, 1D [run.numel]."""
        tail = self._logs.base_view(slot.subgroup, self.read(slot), run)
        assert tail is not None
        return tail


class _ReadOnly:
    """A place of a step that is over."""

    def open(self) -> torch.Tensor:
        raise TypeError("a pinned step is read, and never written")

    def leave(self) -> None:
        """Do nothing: nothing was written."""


class _PinnedSection(_ReadOnly):
    """``master`` or a state of a piece of a run."""

    def __init__(self, pinned: PinnedState, slot: SlotRecord, run: Run, name: str) -> None:
        self._pinned, self._slot, self._run, self._name = pinned, slot, run, name
        self.start = run.start

    def read(self) -> torch.Tensor:
        """Give the state where it lies, or the master joined; fp32."""
        subgroup = self._slot.subgroup
        section = section_view(subgroup, self._pinned.read(self._slot), self._name, self._run)
        assert section is not None
        if self._name == "master" and subgroup.form is MasterForm.SPLIT:
            return self._pinned.kernels.joined(self._pinned.tail(self._slot, self._run), section)
        return section.float()


class _PinnedPart(_ReadOnly):
    """Elements of an fp32 parameter, which may have its state in several subgroups."""

    def __init__(self, pinned: PinnedState, runs: list[tuple[SlotRecord, Run]], start: int, stop: int) -> None:
        self._pinned, self._runs = pinned, runs
        self.start, self._stop = start, stop

    def read(self) -> torch.Tensor:
        """Give the values, copied from one subgroup after another; fp32."""
        values = torch.empty(self._stop - self.start, dtype=torch.float32, device="cpu")
        for slot, run in self._runs:
            first, last = max(run.start, self.start), min(run.stop, self._stop)
            if first < last:
                here = self._pinned.tail(slot, run)[first - run.start : last - run.start]
                values[first - self.start : last - self.start] = here
        return values
