"""Keep logs of subgroups: what steps did since a base was written, to do it again."""

from collections.abc import Iterator
from typing import Protocol

import torch

from nvme_offload.offload.durable.chain import Chain, SlotLayout, Written
from nvme_offload.offload.durable.ring import ExtentRing
from nvme_offload.offload.durable.seal import ExtentLayout, Sums, check_sums
from nvme_offload.offload.storage.tier import Memory
from ..kernels import KernelPool, LoggedStep, Segment, make_segment
from ..layout.flat import Origin
from ..layout.master import DTYPE_OF_FORM, MasterForm
from ..layout.subgroup import Run, Subgroup, section_view, state_views
from ..rules.rule import UpdateRule
from .entry import EntryFormat, PartOfMemory
from .log_state import LogState
from .work import RunTensors, StepScalars

BaseTensors = tuple[torch.Tensor, torch.Tensor]
"""State and tail of a base, 1D int32 each."""


class LoggedParams(Protocol):
    """The logs need to know this of parameters, by index."""

    def log_dtype_of(self, index: int) -> torch.dtype:
        """Return the dtype that its gradients are expected to have: wider ones are not logged."""

    def origin_of(self, index: int) -> Origin | None:
        """Return the origin of this rank's part, where the rule dithers."""


class SlotLogs:
    """Reads, replays and drafts the entries of a durable optimizer's logs.

    Args:
        extents: where bases and entries are.
        params: those whose updates are logged.
        period: every how many steps a subgroup is rewritten.
    """

    def __init__(self, extents: ExtentRing, params: LoggedParams, kernels: KernelPool, period: int) -> None:
        self.period = period
        self.extents = extents
        self.kernels = kernels
        self._params = params
        self._formats: dict[int, tuple[Subgroup, EntryFormat]] = {}

    def base_of(self, subgroup: Subgroup) -> ExtentLayout:
        """Return where state, tail and trailer are in the base of a subgroup."""
        dtype = subgroup.tail_dtype
        tail_bytes = subgroup.padded_numel * dtype.itemsize if dtype else 0
        return ExtentLayout(subgroup.size_bytes, tail_bytes, self.extents.alignment)

    def layout_of(self, subgroup: Subgroup) -> SlotLayout:
        """Return what a subgroup takes on the drive: its base, and entries of its log."""
        base = self.base_of(subgroup)
        if self.period == 1 or not is_loggable(subgroup.form, subgroup.rule):
            return SlotLayout(base)
        entry = ExtentLayout(self.format_of(subgroup).most_bytes, 0, base.alignment)
        return SlotLayout(base, entry.size_bytes, self.period)

    def replay(self, subgroup: Subgroup, log: LogState, memory: Memory) -> None:
        """Apply the log that was read behind a base: state and tail are then the newest."""
        if log.needs_replay:
            self.replay_chain(subgroup, self.extents.slots[subgroup.index].current, memory)
            log.end_update()

    def replay_chain(self, subgroup: Subgroup, chain: Chain, memory: Memory) -> None:
        """Replay a chain that was read into any memory: all of its base, then each entry."""
        steps = self.steps(subgroup, chain, memory)
        runs = zip(subgroup.runs, steps, strict=True)
        self.kernels.update([self.segment(subgroup, memory, run, None, its, None) for run, its in runs])

    def segment(
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
        """Describe a run to the kernels.

        Args:
            subgroup: the one that has the run.
            memory: the base, with the log behind it.
            run: a run of it.
            tensors: of the update; None: there is none but those of the log.
            log: updates to be done before.
            offsets: gets where the update puts its tiles; None: it is not logged.
            completes: the tail becomes what the update makes of the parameter.
        """
        base = self.base_view(subgroup, memory, run)
        scalars = tensors.scalars if tensors is not None else StepScalars((), 1.0)
        # A replay alone does not look at the parameter: any memory of its kind will do.
        param = memory.view(DTYPE_OF_FORM[subgroup.form], 0, run.numel) if base is None else base
        return make_segment(
            param=tensors.param if tensors is not None else param,
            grad=tensors.grad if tensors is not None else None,
            master=section_view(subgroup, memory, "master", run) if tensors is None else tensors.master,
            states=state_views(subgroup, memory, run) if tensors is None else tensors.states,
            checksums=tensors.checksums if tensors is not None else None,
            rule=subgroup.rule,
            scalars=scalars.of_kernel,
            grad_scale=scalars.grad_scale,
            log=log,
            base=base,
            offsets=offsets,
            tail=base if completes else None,
            marks=tensors.marks if tensors is not None else None,
            origin=self._params.origin_of(run.param),
            start=run.start,
        )

    def base_view(self, subgroup: Subgroup, memory: Memory, run: Run) -> torch.Tensor | None:
        """Return the parameter as the base has it, 1D; None where the state says it."""
        dtype = subgroup.tail_dtype
        if dtype is None:
            return None
        return memory.view(dtype, self.base_of(subgroup).tail_at + run.at * dtype.itemsize, run.numel)

    def tails(self, subgroup: Subgroup, memory: Memory) -> Iterator[tuple[Run, torch.Tensor]]:
        """Yield the part of the tail of every run, up to the next one's; none where the state has all."""
        dtype = subgroup.tail_dtype
        if dtype is None:
            return
        at = self.base_of(subgroup).tail_at
        ends = [*(run.at for run in subgroup.runs[1:]), subgroup.padded_numel]
        for run, end in zip(subgroup.runs, ends, strict=True):
            yield run, memory.view(dtype, at + run.at * dtype.itemsize, end - run.at)

    def parts(self, subgroup: Subgroup, memory: Memory) -> BaseTensors:
        """Return state and tail, with nothing left of what was between runs before."""
        for run, tail in self.tails(subgroup, memory):
            tail[run.numel :].zero_()
        return self._state_and_tail(subgroup, memory)

    def _state_and_tail(self, subgroup: Subgroup, memory: Memory) -> BaseTensors:
        layout = self.base_of(subgroup)
        state = memory.view(torch.int32, 0, layout.state_bytes // 4)
        return state, memory.view(torch.int32, layout.tail_at, layout.tail_bytes // 4)

    # Entries in a buffer.

    def check(self, subgroup: Subgroup, chain: Chain, memory: Memory) -> Sums:
        """Verify every byte of a chain, base and log, that was read into memory; return the base's sums."""
        assert chain.base is not None
        index, path = subgroup.index, self.extents.path_of(chain.base)
        base, actual = self.extents.open_sealed(index, chain.base, memory), self.sums(subgroup, memory)
        check_sums(base.state, actual.state, path=path, what=f"the state of subgroup {index}")
        check_sums(base.tail, actual.tail, path=path, what=f"the parameters of subgroup {index}")
        for written, part in _entries(chain, memory):
            expected = self.extents.open_sealed(index, written, part)
            found = self.kernels.tile_checksums(part.view(torch.int32, 0, written.content.state_bytes // 4))
            path = self.extents.path_of(written)
            check_sums(expected.state, found, path=path, what=f"the log of subgroup {index}")
        return base

    def sums(self, subgroup: Subgroup, memory: Memory) -> Sums:
        """Return the sums of a base as it is in memory."""
        return Sums(*map(self.kernels.tile_checksums, self._state_and_tail(subgroup, memory)))

    def steps(self, subgroup: Subgroup, chain: Chain, memory: Memory) -> list[list[LoggedStep]]:
        """Return what is to be done again, by run, the oldest first."""
        found: list[list[LoggedStep]] = [[] for _ in subgroup.runs]
        for written, part in _entries(chain, memory):
            self.extents.open_sealed(subgroup.index, written, part)
            for of_run, step in zip(found, self.format_of(subgroup).steps(part), strict=True):
                of_run += [step] if step is not None else []
        return found

    def format_of(self, subgroup: Subgroup) -> EntryFormat:
        """Return the format of a subgroup's entries."""
        known = self._formats.get(subgroup.index)
        if known is None or known[0] is not subgroup:
            dtype = self._params.log_dtype_of(subgroup.runs[0].param)
            known = self._formats[subgroup.index] = subgroup, EntryFormat.of(subgroup, dtype)
        return known[1]


def _entries(chain: Chain, memory: Memory) -> Iterator[tuple[Written, PartOfMemory]]:
    """Yield the entries of a chain, each with the memory that it was read into."""
    start = chain.base.content.size_bytes if chain.base is not None else 0
    for written in chain.log:
        yield written, PartOfMemory(memory, start)
        start += written.content.size_bytes


def is_loggable(form: MasterForm, rule: UpdateRule) -> bool:
    """Return whether updates can be logged, so that a subgroup need not be rewritten in every step.

    Somebody could change an fp32 parameter unnoticed: it has no checksums. And the rule has to be one of the kernel.
    """
    return form is not MasterForm.ITSELF and bool(rule.kernel)
