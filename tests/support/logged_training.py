"""A training whose state is bases and a log in files, made of the parts that the product has for that."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nvme_offload.offload.durable.chain import Chain, SlotLayout
from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.durable.ring import ExtentRing
from nvme_offload.offload.durable.seal import ExtentLayout, Sums, check_sums, num_sums
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.swap_space import SwapSpace
from nvme_offload.offload.storage.tier import Memory
from nvme_offload.optim.gradient_log.entry import EntryFormat, PartOfMemory
from nvme_offload.optim.kernels import KernelPool, LoggedStep, Segment, make_segment
from nvme_offload.optim.layout.master import DTYPE_OF_FORM, FORM_OF_DTYPE, MasterForm
from nvme_offload.optim.layout.subgroup import ParamToPlace, Run, Subgroup, plan_subgroups
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.masters import section_view, state_views
from nvme_offload.optim.tiles import StepScalars

NO_SUMS = torch.zeros(0, dtype=torch.int64)


@dataclass
class LoggedTraining:
    """Parameters in memory, their state in files.

    Args:
        space: swap files.
        params: bf16, fp16 or fp32, 1D; their group by place.
        groups: parameter group of each parameter.
        rule: of all of them.
        period: every how many steps a subgroup is rewritten.
        grad_dtypes: of each parameter's gradient.
        spare_bytes: of an entry, for parameters that are found changed.
    """

    space: SwapSpace
    params: list[torch.Tensor]
    groups: Sequence[int]
    rule: UpdateRule
    period: int
    grad_dtypes: Sequence[torch.dtype]
    pool: KernelPool
    spare_bytes: int = 0
    incarnation: int = 1
    sequence: int = 1
    manifests: list[bytes] = field(default_factory=list)
    read_bytes: int = 0
    written_bytes: int = 0
    num_overflows: int = 0

    def __post_init__(self) -> None:
        places = [
            ParamToPlace(number, group, param.numel(), param.dtype, self.rule)
            for number, (param, group) in enumerate(zip(self.params, self.groups, strict=True))
        ]
        self.subgroups = plan_subgroups(places, max_bytes=1 << 40, max_numel=2 * 65536)
        self.formats = [EntryFormat.of(s, self.grad_dtypes[s.runs[0].param]) for s in self.subgroups]
        self.layouts = [self._layout(*pair) for pair in zip(self.subgroups, self.formats, strict=True)]
        self.checksums = [self.pool.tile_checksums(param) for param in self.params]
        self.ring = ExtentRing(self.space, self.incarnation, self.sequence)

    def begin(self) -> None:
        """Nothing is there yet."""
        self.ring.add(self.layouts)

    def adopt(self, manifest: bytes) -> None:
        """Go on from a commit: parameters and checksums as they were then."""
        found = Manifest.decode(manifest)
        assert found is not None
        self.ring.adopt(found.tables, self.layouts, where="there")
        for slot, subgroup in enumerate(self.subgroups):
            memory = HostRegion(self._buffer_bytes(slot))
            steps = self._read(slot, self.ring.slots[slot].current, memory, whole=True)
            segments = [self._segment(slot, run, memory, steps[run], None, None) for run in range(len(subgroup.runs))]
            self.pool.update(segments)
            for run in subgroup.runs:
                self.params[run.param][run.start : run.stop] = self._rounded(slot, memory, run)
        self.checksums = [self.pool.tile_checksums(param) for param in self.params]

    def step(self, grads: Mapping[int, torch.Tensor], scalars: Mapping[int, StepScalars]) -> None:
        """Update what has a gradient, and write what it takes; not committed yet."""
        self.ring.begin_turn()
        for slot, subgroup in enumerate(self.subgroups):
            if any(run.param in grads for run in subgroup.runs):
                self._update(slot, grads, scalars)

    def commit(self) -> bytes:
        """The manifest of what there is now."""
        manifest = Manifest(1, self.ring.sequence, self.incarnation, "identity", self.ring.tables).encode()
        self.manifests = [*self.manifests[-1:], manifest]
        self.ring.note_commit()
        return manifest

    def state(self) -> list[list[torch.Tensor]]:
        """Master part and states of each parameter, from the files."""
        found = [[[] for _ in range(1 + len(self.rule.states))] for _ in self.params]
        for slot, subgroup in enumerate(self.subgroups):
            memory = HostRegion(self._buffer_bytes(slot))
            steps = self._read(slot, self.ring.slots[slot].current, memory, whole=True)
            self.pool.update(
                [self._segment(slot, run, memory, steps[run], None, None) for run in range(len(subgroup.runs))]
            )
            for run in subgroup.runs:
                master = section_view(subgroup, memory, "master", run)
                views = [torch.empty(0) if master is None else master, *state_views(subgroup, memory, run)]
                for parts, view in zip(found[run.param], views, strict=True):
                    parts.append(view.clone())
        return [[torch.cat(parts) for parts in of_param] for of_param in found]

    # One slot.

    def _update(self, slot: int, grads: Mapping[int, torch.Tensor], scalars: Mapping[int, StepScalars]) -> None:
        subgroup, layout, format_ = self.subgroups[slot], self.layouts[slot], self.formats[slot]
        memory = HostRegion(self._buffer_bytes(slot))
        chain = self.ring.slots[slot].current
        steps = [[] for _ in subgroup.runs]
        if chain.base is None:
            self._give_birth(slot, memory)
        else:
            steps = self._read(slot, chain, memory, whole=bool(chain.log))
        due = self.ring.is_due(slot)
        entry = PartOfMemory(memory, self._buffer_bytes(slot) - max(layout.entry_bytes, layout.base.alignment))
        if not due:
            format_.begin(entry)
        segments = [
            self._segment(slot, run, memory, steps[run], grads, scalars, None if due else entry)
            for run in range(len(subgroup.runs))
        ]
        if due:
            self.pool.update(segments)
        else:
            data = format_.data(entry, self._content_bytes(slot))
            _, data_bytes = self.pool.update_and_log(segments, data)
            due = data_bytes > data.numel()
            self.num_overflows += due
        if due:
            self._rewrite(slot, memory, grads if chain.log else range(len(self.params)))
        else:
            self._append(slot, entry, format_.finish(entry, data_bytes))

    def _segment(
        self,
        slot: int,
        number: int,
        memory: Memory,
        log: list[LoggedStep],
        grads: Mapping[int, torch.Tensor] | None,
        scalars: Mapping[int, StepScalars] | None,
        entry: Memory | None = None,
    ) -> Segment:
        subgroup, run = self.subgroups[slot], self.subgroups[slot].runs[number]
        grad = grads.get(run.param) if grads else None
        own = scalars[run.param] if scalars and grad is not None else StepScalars((), 1.0)
        offsets = None
        if entry is not None and grad is not None:
            offsets = self.formats[slot].note_run(
                entry, number, grad_dtype=grad.dtype, grad_scale=own.grad_scale, scalars=own.of_rule
            )
        first = run.start // 65536
        return make_segment(
            param=self.params[run.param][run.start : run.stop],
            grad=None if grad is None else grad[run.start : run.stop],
            master=section_view(subgroup, memory, "master", run),
            states=state_views(subgroup, memory, run),
            checksums=self.checksums[run.param][first : first + -(-run.numel // 65536)],
            rule=self.rule,
            scalars=own.of_rule,
            grad_scale=own.grad_scale,
            log=log,
            base=self._tail(slot, memory, run) if subgroup.form is not MasterForm.FULL else None,
            offsets=offsets,
        )

    def _give_birth(self, slot: int, memory: Memory) -> None:
        subgroup = self.subgroups[slot]
        for run in subgroup.runs:
            param = self.params[run.param][run.start : run.stop]
            if subgroup.form is MasterForm.FULL:
                section_view(subgroup, memory, "master", run).copy_(param)
            else:
                self._tail(slot, memory, run).copy_(param)
            for view, state in zip(state_views(subgroup, memory, run), self.rule.states, strict=True):
                view.fill_(state.birth)

    def _rewrite(self, slot: int, memory: Memory, changed: Container[int]) -> None:
        """Write a base: the upper halves of these parameters are in the model, those of others in memory."""
        subgroup, layout = self.subgroups[slot], self.layouts[slot].base
        for run in subgroup.runs:
            if run.param in changed and subgroup.form is not MasterForm.FULL:
                self._tail(slot, memory, run).copy_(self.params[run.param][run.start : run.stop])
        self.ring.drop_target(slot)
        extent = self.ring.to_rewrite(slot)
        sums = Sums(self._sums(memory, 0, layout.state_bytes), self._sums(memory, layout.tail_at, layout.tail_bytes))
        self.ring.seal_base(slot, memory, sums)
        self._move(os.pwritev, extent, memory, layout.size_bytes)
        self.written_bytes += layout.size_bytes

    def _append(self, slot: int, entry: Memory, size_bytes: int) -> None:
        extent = self.ring.to_append(slot)
        size_bytes = self.ring.seal_entry(slot, entry, size_bytes, Sums(self._sums(entry, 0, size_bytes), NO_SUMS))
        self._move(os.pwritev, extent, entry, size_bytes)
        self.written_bytes += size_bytes

    def _read(self, slot: int, chain: Chain, memory: HostRegion, *, whole: bool) -> list[list[LoggedStep]]:
        """Bring a chain into memory, check it, and say what is to be done again, by run."""
        layout = self.layouts[slot].base
        base_bytes = layout.size_bytes if whole else layout.state_span
        reading = chain.reading(base_bytes=base_bytes)
        self._move(os.preadv, reading, memory, reading.size_bytes)
        self.read_bytes += reading.size_bytes
        if whole:
            assert chain.base is not None
            sums = self.ring.open_sealed(slot, chain.base, memory)
            check_sums(sums.state, self._sums(memory, 0, layout.state_bytes), path="swap", what="state")
            check_sums(sums.tail, self._sums(memory, layout.tail_at, layout.tail_bytes), path="swap", what="tail")
        found: list[list[LoggedStep]] = [[] for _ in self.subgroups[slot].runs]
        at = base_bytes
        for written in chain.log:
            entry = PartOfMemory(memory, at)
            sums = self.ring.open_sealed(slot, written, entry)
            check_sums(sums.state, self._sums(entry, 0, written.content.state_bytes), path="swap", what="entry")
            for log, step in zip(found, self.formats[slot].steps(entry), strict=True):
                log += [step] if step is not None else []
            at += written.content.size_bytes
        return found

    def _rounded(self, slot: int, memory: Memory, run: Run) -> torch.Tensor:
        """What the parameter is, by its state."""
        if self.subgroups[slot].form is MasterForm.FULL:
            return self.pool.fp32_to_fp16(section_view(self.subgroups[slot], memory, "master", run))
        return self._tail(slot, memory, run)

    # Sizes and bytes.

    def _layout(self, subgroup: Subgroup, format_: EntryFormat) -> SlotLayout:
        held = 0 if subgroup.form is MasterForm.FULL else DTYPE_OF_FORM[subgroup.form].itemsize
        alignment = self.space.alignment
        entry = ExtentLayout(format_.most_bytes + self.spare_bytes, 0, alignment)
        base = ExtentLayout(subgroup.size_bytes, held * subgroup.padded_numel, alignment)
        return SlotLayout(base, entry.size_bytes if self.period > 1 else 0, self.period)

    def _content_bytes(self, slot: int) -> int:
        """Bytes that an entry may take, without its trailer."""
        return self.formats[slot].most_bytes + self.spare_bytes

    def _buffer_bytes(self, slot: int) -> int:
        layout = self.layouts[slot]
        return layout.base.size_bytes + max(layout.entry_bytes, layout.base.alignment) * layout.period

    def _tail(self, slot: int, memory: Memory, run: Run) -> torch.Tensor:
        dtype = DTYPE_OF_FORM[FORM_OF_DTYPE[self.params[run.param].dtype]]
        return memory.view(dtype, self.layouts[slot].base.tail_at + run.at * dtype.itemsize, run.numel)

    def _sums(self, memory: Memory, at: int, size_bytes: int) -> torch.Tensor:
        sums = self.pool.tile_checksums(memory.view(torch.int32, at, size_bytes // 4))
        assert len(sums) == num_sums(size_bytes)
        return sums

    def _move(self, move, extent: Extent, memory: Memory, size_bytes: int) -> None:
        at = 0
        for stripe in extent.stripes:
            length = min(stripe.size_bytes, size_bytes - at)
            if length > 0:
                view = memory.view(torch.uint8, at, length).numpy()
                assert move(stripe.fd, [view], stripe.offset) == length
            at += stripe.size_bytes
