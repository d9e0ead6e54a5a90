"""Update subgroups of a durable run: after the updates in the log, and with what it takes to do this one again."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from nvme_offload.offload.durable.chain import Chain
from nvme_offload.offload.durable.seal import Sums
from nvme_offload.offload.errors import OutOfSpaceError
from nvme_offload.offload.storage.tier import Memory
from ..kernels import LoggedStep, Segment
from ..layout.master import num_tiles
from ..layout.subgroup import Run, Subgroup
from .entry import MAX_SCALARS, PartOfMemory
from .kept_segments import KeptSegments
from .log_state import Draft, LogState
from .logs import BaseTensors, SlotLogs
from .work import Means, RunTensors, SubgroupStep, Updater


@dataclass(frozen=True, kw_only=True)
class DurableMeans(Means):
    """The means that the updaters of a durable optimizer share."""

    logs: SlotLogs
    begin_writing: Callable[[], None]
    """Waits until extents may be chosen."""


class LoggedKernel(Updater):
    """The rule's kernel does what the log has, then the step. If no base is due, it drafts an entry.

    What cannot be put into the log is rewritten. Where all of it has a gradient, the update completes it for that, too.
    """

    def __init__(self, subgroup: Subgroup, means: Means, log: LogState | None) -> None:
        super().__init__(subgroup, means, log)
        assert isinstance(means, DurableMeans)
        assert log is not None
        self._logs, self._log, self._begin_writing = means.logs, log, means.begin_writing
        self._segments = KeptSegments()

    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """See `Updater.prepare`."""
        self._begin_writing()
        subgroup, memory, logs = self.subgroup, work.memory, self._logs
        steps = logs.steps(subgroup, self._chain if self._log.needs_replay else Chain(), memory)
        entry = self._begin_entry(work)
        completes = entry is None and all(run.param in work.grads for run in subgroup.runs)
        if entry is None and not any(steps):
            segments = self._segments.renewed(work, partial(self._made, memory, completes), completes)
        else:
            segments = self._described(work, steps, entry, completes)
        if entry is not None:
            return lambda: self._update_and_log(segments, entry)
        return lambda: self._update(segments, logs.parts(subgroup, memory) if completes else None)

    def _made(self, memory: Memory, completes: bool, tensors: RunTensors, run: Run) -> Segment:
        return self._logs.segment(self.subgroup, memory, run, tensors, [], None, completes=completes)

    def _described(
        self, work: SubgroupStep, steps: list[list[LoggedStep]], entry: PartOfMemory | None, completes: bool
    ) -> list[Segment]:
        segments = []
        for number, run in enumerate(self.subgroup.runs):
            tensors, its, offsets = work.runs.get(run.param), steps[number], None
            if tensors is not None and entry is not None:
                offsets = self._note(entry, number, tensors)
            if tensors is not None or its:
                made = self._logs.segment(self.subgroup, work.memory, run, tensors, its, offsets, completes=completes)
                segments.append(made)
        return segments

    @property
    def _chain(self) -> Chain:
        return self._logs.extents.slots[self.subgroup.index].current

    def _update(self, segments: list[Segment], parts: BaseTensors | None) -> int:
        """Update; with the state and the tail take the sums that they are written with."""
        if parts is None:
            changed, sums = self._logs.kernels.update(segments), None
        else:
            of_parts = [torch.empty(num_tiles(part.numel()), dtype=torch.int64, device="cpu") for part in parts]
            sums = Sums(*of_parts)
            changed = self._logs.kernels.update(segments, list(zip(parts, of_parts, strict=True)))
        self._log.end_update(sums=sums)
        return sum(changed)

    def _update_and_log(self, segments: list[Segment], entry: PartOfMemory) -> int:
        format_ = self._logs.format_of(self.subgroup)
        data = format_.data(entry, format_.most_bytes)
        changed, data_bytes = self._logs.kernels.update_and_log(segments, data)
        fits = data_bytes <= data.numel()
        draft = Draft(entry.start, format_.finish(entry, data_bytes), len(self._chain.log)) if fits else None
        self._log.end_update(draft=draft)
        return sum(changed)

    def _begin_entry(self, work: SubgroupStep) -> PartOfMemory | None:
        """Return the place for an entry of this update, or None to rewrite the subgroup. Either has room."""
        extents, index, format_ = self._logs.extents, self.subgroup.index, self._logs.format_of(self.subgroup)
        there = [run.param for run in self.subgroup.runs if run.param in work.grads]
        is_wide = any(work.grads[param].itemsize > format_.grad_itemsize for param in there)
        has_many = any(len(work.scalars[param].of_kernel) > MAX_SCALARS for param in there)
        if not (extents.is_due(index) or is_wide or has_many):
            try:
                extents.to_append(index)
            except OutOfSpaceError:
                pass
            else:
                # The next entry begins in the buffer behind those that an update still needs.
                log = self._chain.log if self._log.needs_replay else ()
                start = self._logs.base_of(self.subgroup).size_bytes
                entry = PartOfMemory(work.memory, start + sum(written.content.size_bytes for written in log))
                format_.begin(entry)
                return entry
        extents.to_rewrite(index)
        return None

    def _note(self, entry: PartOfMemory, number: int, run: RunTensors) -> torch.Tensor:
        return self._logs.format_of(self.subgroup).note_run(
            entry, number, grad_dtype=run.grad.dtype, grad_scale=run.scalars.grad_scale, scalars=run.scalars.of_kernel
        )
