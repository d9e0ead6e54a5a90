"""Subgroups that another process can go on with: what is written beside their state, and brought back from there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import torch

from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.durable.seal import ExtentLayout, Sums, check_sums
from nvme_offload.offload.storage.tier import Memory
from nvme_offload.optim.kernels import KernelPool
from nvme_offload.optim.layout.master import MasterForm
from nvme_offload.optim.layout.subgroup import Run, Subgroup
from nvme_offload.optim.state.masters import section_view
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.state.table import ParamTable


class Sealing:
    """Completes what is written of a subgroup, and takes it up again: the `Seal` of a durable optimizer's pipeline.

    Args:
        run: says where each subgroup is written to.
        table: the parameters.
        kernels: for checksums, and to round masters.
    """

    def __init__(self, run: DurableRun, table: ParamTable, kernels: KernelPool) -> None:
        self.run = run
        self.before_write: Callable[[], None] = lambda: None
        """Called before an extent is chosen: waits until the commit under way is done."""
        self.is_held = False
        """Whether a commit is under way, so that a write would wait."""
        self.settle_params: Callable[[], None] = lambda: None
        """Called before parameters are read: those on a device may be on their way there."""
        self._alignment = run.space.alignment
        self._table = table
        self._kernels = kernels
        self._tail_sums: dict[int, torch.Tensor] = {}

    def layout_of(self, subgroup: Subgroup) -> ExtentLayout:
        """Where state, tail and trailer of a subgroup are in its extents."""
        dtype = subgroup.tail_dtype
        tail_bytes = subgroup.padded_numel * dtype.itemsize if dtype else 0
        return ExtentLayout(subgroup.size_bytes, tail_bytes, self._alignment)

    def read_bytes_of(self, subgroup: Subgroup) -> int:
        """How much of an extent a step reads. At least a page, also where the rule has no state."""
        return self.layout_of(subgroup).state_span or self._alignment

    def complete(self, slot: SlotRecord, memory: Memory) -> None:
        """Put what the parameters have besides the state into the tail."""
        self.settle_params()
        for run, tail in self._tails(slot.subgroup, memory):
            record = self._table[run.param]
            with record.reaching(run, change=False) as param:
                _copy(tail[: run.numel], param)
            tail[run.numel :].zero_()

    def seal(self, slot: SlotRecord) -> None:
        """Choose the extent that the buffer of a slot is written to, and write the trailer."""
        self.before_write()
        assert slot.buffer is not None
        sums = self._sums(slot.subgroup, slot.buffer, slot.checksums)
        extent = self.run.extents.to_write(slot.index)
        self.run.extents.seal(slot.index, slot.buffer, sums)
        slot.extent = extent
        if slot.subgroup.form is MasterForm.ITSELF:
            self._tail_sums[slot.index] = sums.tail

    def is_changed(self, slot: SlotRecord) -> bool:
        """Whether somebody changed parameters of a subgroup since it was last written.

        Raises:
            SwapIOError: one is on a tier and cannot be read.
        """
        subgroup = slot.subgroup
        if subgroup.form is not MasterForm.ITSELF:
            runs = [(self._table[run.param], run) for run in subgroup.runs]
            return any(
                not torch.equal(self._kernels.tile_checksums(record.copy_of(run)), known)
                for record, run in runs
                if (known := record.checksums_of(run)) is not None
            )
        layout = self.layout_of(subgroup)
        scratch = _Scratch(layout.tail_at, layout.tail_bytes)
        self.complete(slot, scratch)
        known = self._tail_sums.get(slot.index)
        return known is None or not torch.equal(self._kernels.tile_checksums(scratch.words), known)

    def open(self, slot: SlotRecord, memory: Memory) -> Sums:
        """Verify the whole of an extent that was read.

        Raises:
            CorruptionError: it is not what the table of the adopted manifest refers to.
        """
        expected = self.run.extents.open_sealed(slot.index, memory)
        actual = self._sums(slot.subgroup, memory, None)
        assert slot.extent is not None
        path = str(self.run.space.path_of(slot.extent.stripes[0].fd))
        check_sums(expected.state, actual.state, path=path, what=f"the state of subgroup {slot.index}")
        check_sums(expected.tail, actual.tail, path=path, what=f"the parameters of subgroup {slot.index}")
        return expected

    def restore(self, slot: SlotRecord, memory: Memory) -> None:
        """Give the parameters of a subgroup the values that were committed with its state.

        Raises:
            SwapIOError: one is on a tier that fails.
        """
        subgroup = slot.subgroup
        tails = dict(self._tails(subgroup, memory))
        for run in subgroup.runs:
            record = self._table[run.param]
            if subgroup.form is MasterForm.FULL:
                master = section_view(subgroup, memory, "master", run)
                assert master is not None
                values = self._kernels.fp32_to_fp16(master)
            else:
                values = tails[run][: run.numel]
            with record.reaching(run, change=True) as param:
                param.copy_(values)
            checksums = record.checksums_of(run)
            if checksums is not None:
                self._kernels.tile_checksums(values, out=checksums)

    def bring_back(self, slot: SlotRecord, memory: Memory) -> None:
        """Take the whole of an extent that was read for the state of a subgroup, and give its parameters their values.

        Raises:
            CorruptionError: see `open`.
            SwapIOError: see `restore`.
        """
        sums = self.open(slot, memory)
        self.restore(slot, memory)
        if slot.subgroup.form is MasterForm.ITSELF:
            self._tail_sums[slot.index] = sums.tail
        slot.read_bytes = self.read_bytes_of(slot.subgroup)
        slot.checksums = sums.state

    def _tails(self, subgroup: Subgroup, memory: Memory) -> Iterator[tuple[Run, torch.Tensor]]:
        """The part of the tail of every run, up to the next one's; none where the state has all."""
        dtype = subgroup.tail_dtype
        if dtype is None:
            return
        at = self.layout_of(subgroup).tail_at
        ends = [*(run.at for run in subgroup.runs[1:]), subgroup.padded_numel]
        for run, end in zip(subgroup.runs, ends, strict=True):
            yield run, memory.view(dtype, at + run.at * dtype.itemsize, end - run.at)

    def _sums(self, subgroup: Subgroup, memory: Memory, of_state: torch.Tensor | None) -> Sums:
        layout = self.layout_of(subgroup)
        state = memory.view(torch.int32, 0, layout.state_bytes // 4)
        tail = memory.view(torch.int32, layout.tail_at, layout.tail_bytes // 4)
        checksums = self._kernels.tile_checksums
        return Sums(checksums(state) if of_state is None else of_state, checksums(tail))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy 1D tensors of one dtype.

    From host memory in this thread alone: torch's threads meet at a barrier, for which a busy machine needs 20 ms
    where the copy itself needs one.
    """
    if source.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
    else:
        target.copy_(source)


class _Scratch:
    """Memory for a tail alone, at the place that it has in an extent."""

    def __init__(self, at: int, size_bytes: int) -> None:
        self.words = torch.empty(size_bytes // 4, dtype=torch.int32, device="cpu")
        self._at = at

    def view(self, dtype: torch.dtype, byte_offset: int, numel: int) -> torch.Tensor:
        start = byte_offset - self._at
        return self.words.view(torch.uint8)[start : start + numel * dtype.itemsize].view(dtype)
