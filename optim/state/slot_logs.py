"""Updates of subgroups that are written completely or logged: what a step did is kept beside a base, and done again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from nvme_offload.offload.durable.chain import Chain, SlotLayout, Written
from nvme_offload.offload.durable.ring import ExtentRing
from nvme_offload.offload.durable.seal import ExtentLayout, Sums, check_sums
from nvme_offload.offload.errors import OutOfSpaceError
from nvme_offload.offload.storage.tier import Memory
from nvme_offload.optim.gradient_log.entry import MAX_SCALARS, EntryFormat, PartOfMemory
from nvme_offload.optim.kernels import KernelPool, LoggedStep, Segment, make_segment
from nvme_offload.optim.layout.master import DTYPE_OF_FORM, MasterForm, num_tiles
from nvme_offload.optim.layout.subgroup import Run, Subgroup
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.masters import section_view, state_views
from nvme_offload.optim.state.slots import Draft, SlotRecord
from nvme_offload.optim.state.table import ParamRecord
from nvme_offload.optim.tiles import RunTensors, StepScalars

Parts = tuple[torch.Tensor, torch.Tensor]
"""State and tail of a base, 1D int32 each."""


class SlotLogs:
    """Reads, replays and drafts the entries of a durable optimizer's logs.

    Args:
        extents: where bases and entries are.
        log_dtype_of: gives `ParamRecord.log_dtype` of a parameter, by its index.
        kernels: that update.
        period: every how many steps a subgroup is rewritten.
    """

    def __init__(
        self, extents: ExtentRing, log_dtype_of: Callable[[int], torch.dtype], kernels: KernelPool, period: int
    ) -> None:
        self.period = period
        self._extents = extents
        self._alignment = extents.alignment
        self._log_dtype_of = log_dtype_of
        self._kernels = kernels
        self._formats: dict[int, tuple[Subgroup, EntryFormat]] = {}

    def is_logged(self, record: ParamRecord) -> bool:
        """Whether updates of a parameter are logged, and not its subgroup rewritten in every step.

        One in fp32 could be changed by somebody unnoticed: it has no checksums. And a rule has to be one of the kernel.
        """
        return self.period > 1 and _is_replayable(record.form, record.rule)

    def itemsize_of(self, record: ParamRecord) -> int:
        """Bytes of log that are read beside an element's state, at most."""
        return (self.period - 1) * record.log_dtype.itemsize if self.is_logged(record) else 0

    def base_of(self, subgroup: Subgroup) -> ExtentLayout:
        """Where state, tail and trailer are in the base of a subgroup."""
        dtype = subgroup.tail_dtype
        tail_bytes = subgroup.padded_numel * dtype.itemsize if dtype else 0
        return ExtentLayout(subgroup.size_bytes, tail_bytes, self._alignment)

    def layout_of(self, subgroup: Subgroup) -> SlotLayout:
        """What a subgroup takes on the drive: its base, and entries of its log."""
        base = self.base_of(subgroup)
        if self.period == 1 or not _is_replayable(subgroup.form, subgroup.rule):
            return SlotLayout(base)
        entry = ExtentLayout(self._format_of(subgroup).most_bytes, 0, base.alignment)
        return SlotLayout(base, entry.size_bytes, self.period)

    def replay(self, slot: SlotRecord, memory: Memory) -> None:
        """Do the updates of the log that was read behind a base: the state, and the tail, are then the newest.

        Raises:
            CorruptionError: the log is not what was written.
        """
        if slot.is_behind:
            self.replay_chain(slot.subgroup, self._extents.slots[slot.index].current, memory)
        slot.is_behind = False

    def replay_chain(self, subgroup: Subgroup, chain: Chain, memory: Memory) -> None:
        """`replay` of a chain that was read into any memory: all of its base, then each entry."""
        steps = self._steps(subgroup, chain, memory)
        runs = list(enumerate(subgroup.runs))
        self._kernels.update([self._segment(subgroup, memory, run, None, steps[number], None) for number, run in runs])

    def update_of(self, slot: SlotRecord, memory: Memory, work: Mapping[int, RunTensors]) -> Callable[[], int]:
        """What updates a subgroup, after what the log has; where it is not due to be rewritten, an entry is drafted.

        Nothing is changed before it is called. What the update cannot be put into the log of is rewritten: where all of
        it has a gradient, the update completes it for that, too.

        Args:
            slot: of the subgroup.
            memory: its buffer.
            work: what has a gradient, by parameter index.

        Returns:
            To be called once. Returns how many tiles of 65536 elements somebody else had changed since the last update.

        Raises:
            CorruptionError: the log is not what was written.
            OutOfSpaceError: the subgroup is rewritten out of its turn, and there is no room.
        """
        chain = self._extents.slots[slot.index].current if slot.is_behind else Chain()
        steps = self._steps(slot.subgroup, chain, memory)
        entry = self._begin_entry(slot, memory, work)
        completes = entry is None and all(run.param in work for run in slot.subgroup.runs)
        segments = []
        for number, run in enumerate(slot.subgroup.runs):
            tensors, offsets = work.get(run.param), None
            if tensors is not None and entry is not None:
                offsets = self._note(slot, entry, number, tensors)
            if tensors is not None or steps[number]:
                segments.append(
                    self._segment(slot.subgroup, memory, run, tensors, steps[number], offsets, completes=completes)
                )
        if entry is not None:
            return lambda: self._update_and_log(slot, segments, entry)
        return lambda: self._update(slot, segments, self._parts(slot.subgroup, memory) if completes else None)

    def _update(self, slot: SlotRecord, segments: list[Segment], parts: Parts | None) -> int:
        """Update; with the state and the tail take the sums that they are written with."""
        sums = None
        if parts is None:
            changed = self._kernels.update(segments)
        else:
            sums = Sums(*(torch.empty(num_tiles(part.numel()), dtype=torch.int64, device="cpu") for part in parts))
            changed = self._kernels.update(segments, list(zip(parts, (sums.state, sums.tail), strict=True)))
        # No call in between: a signal handler sees state with what it is written as.
        slot.is_behind = False
        slot.sums = sums
        return sum(changed)

    def _update_and_log(self, slot: SlotRecord, segments: list[Segment], entry: PartOfMemory) -> int:
        format_ = self._format_of(slot.subgroup)
        data = format_.data(entry, format_.most_bytes)
        changed, data_bytes = self._kernels.update_and_log(segments, data)
        fits = data_bytes <= data.numel()
        place = len(self._extents.slots[slot.index].current.log)
        draft = Draft(entry.start, format_.finish(entry, data_bytes), place) if fits else None
        # No call in between, as in `_update`.
        slot.is_behind = False
        slot.draft = draft
        return sum(changed)

    def _begin_entry(self, slot: SlotRecord, memory: Memory, work: Mapping[int, RunTensors]) -> PartOfMemory | None:
        """Where an entry of this update goes; None where the subgroup is rewritten. Either way there is room for it."""
        format_ = self._format_of(slot.subgroup)
        is_wide = any(run.grad.dtype.itemsize > format_.grad_itemsize for run in work.values())
        has_many = any(len(run.scalars.of_rule) > MAX_SCALARS for run in work.values())
        if not (self._extents.is_due(slot.index) or is_wide or has_many):
            try:
                self._extents.to_append(slot.index)
            except OutOfSpaceError:
                pass
            else:
                entry = PartOfMemory(memory, self._end_of_log(slot))
                format_.begin(entry)
                return entry
        self._extents.to_rewrite(slot.index)
        return None

    def _note(self, slot: SlotRecord, entry: PartOfMemory, number: int, run: RunTensors) -> torch.Tensor:
        return self._format_of(slot.subgroup).note_run(
            entry,
            number,
            grad_dtype=run.grad.dtype,
            grad_scale=run.scalars.grad_scale,
            scalars=run.scalars.of_rule,
        )

    def _segment(
        self,
        subgroup: Subgroup,
        memory: Memory,
        run: Run,
        tensors: RunTensors | None,
        log: list[LoggedStep],
        offsets: torch.Tensor | None,
        *,
        completes: bool = False,
    ) -> Segment:
        base = self._base_view(subgroup, memory, run)
        scalars = tensors.scalars if tensors is not None else StepScalars((), 1.0)
        return make_segment(
            param=tensors.param if tensors is not None else self._any_param(subgroup, memory, run),
            grad=tensors.grad if tensors is not None else None,
            master=section_view(subgroup, memory, "master", run),
            states=state_views(subgroup, memory, run),
            checksums=tensors.checksums if tensors is not None else None,
            rule=subgroup.rule,
            scalars=scalars.of_rule,
            grad_scale=scalars.grad_scale,
            log=log,
            base=base,
            offsets=offsets,
            tail=base if completes else None,
        )

    def _base_view(self, subgroup: Subgroup, memory: Memory, run: Run) -> torch.Tensor | None:
        """The parameter as the base has it, where the state does not say it."""
        dtype = subgroup.tail_dtype
        if dtype is None:
            return None
        return memory.view(dtype, self.base_of(subgroup).tail_at + run.at * dtype.itemsize, run.numel)

    def tails(self, subgroup: Subgroup, memory: Memory) -> Iterator[tuple[Run, torch.Tensor]]:
        """The part of the tail of every run, up to the next one's; none where the state has all."""
        dtype = subgroup.tail_dtype
        if dtype is None:
            return
        at = self.base_of(subgroup).tail_at
        ends = [*(run.at for run in subgroup.runs[1:]), subgroup.padded_numel]
        for run, end in zip(subgroup.runs, ends, strict=True):
            yield run, memory.view(dtype, at + run.at * dtype.itemsize, end - run.at)

    def _parts(self, subgroup: Subgroup, memory: Memory) -> Parts:
        """State and tail, in which nothing is left of what was between runs before."""
        for run, tail in self.tails(subgroup, memory):
            tail[run.numel :].zero_()
        layout = self.base_of(subgroup)
        state = memory.view(torch.int32, 0, layout.state_bytes // 4)
        return state, memory.view(torch.int32, layout.tail_at, layout.tail_bytes // 4)

    def _any_param(self, subgroup: Subgroup, memory: Memory, run: Run) -> torch.Tensor:
        """Memory of the parameter's kind, which a replay alone does not look at."""
        base = self._base_view(subgroup, memory, run)
        return memory.view(DTYPE_OF_FORM[subgroup.form], 0, run.numel) if base is None else base

    # Entries in a buffer.

    def check(self, subgroup: Subgroup, chain: Chain, memory: Memory) -> None:
        """Verify every byte of the log of a chain that was read into memory: all of its base, then each entry.

        Raises:
            CorruptionError: one is not what was written.
        """
        for written, part in _entries(chain, memory):
            expected = self._extents.open_sealed(subgroup.index, written, part)
            actual = self._kernels.tile_checksums(part.view(torch.int32, 0, written.content.state_bytes // 4))
            path = self._extents.path_of(written)
            check_sums(expected.state, actual, path=path, what=f"the log of subgroup {subgroup.index}")

    def _steps(self, subgroup: Subgroup, chain: Chain, memory: Memory) -> list[list[LoggedStep]]:
        """What is to be done again, by run, the oldest first."""
        found: list[list[LoggedStep]] = [[] for _ in subgroup.runs]
        for written, part in _entries(chain, memory):
            self._extents.open_sealed(subgroup.index, written, part)
            for of_run, step in zip(found, self._format_of(subgroup).steps(part), strict=True):
                of_run += [step] if step is not None else []
        return found

    def _end_of_log(self, slot: SlotRecord) -> int:
        """Where the next entry begins in the buffer: behind those that an update still needs."""
        log = self._extents.slots[slot.index].current.log if slot.is_behind else ()
        return self.base_of(slot.subgroup).size_bytes + sum(written.content.size_bytes for written in log)

    def _format_of(self, subgroup: Subgroup) -> EntryFormat:
        known = self._formats.get(subgroup.index)
        if known is None or known[0] is not subgroup:
            dtype = self._log_dtype_of(subgroup.runs[0].param)
            known = self._formats[subgroup.index] = subgroup, EntryFormat.of(subgroup, dtype)
        return known[1]


def _entries(chain: Chain, memory: Memory) -> Iterator[tuple[Written, PartOfMemory]]:
    """The entries of a chain, each with the memory that it was read into."""
    start = chain.base.content.size_bytes if chain.base is not None else 0
    for written in chain.log:
        yield written, PartOfMemory(memory, start)
        start += written.content.size_bytes


def _is_replayable(form: MasterForm, rule: UpdateRule) -> bool:
    return form is not MasterForm.ITSELF and bool(rule.kernel) and not rule.whole
