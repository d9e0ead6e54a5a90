"""Complete what is written of subgroups so that another process can go on with them, and bring them back from there."""

import torch

from nvme_offload.offload.devices.device import copy_alone
from nvme_offload.offload.durable.chain import Chain
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.durable.seal import Sums, check_sums
from nvme_offload.offload.errors import CorruptionError
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.staging.mover import WriteTarget
from nvme_offload.offload.storage.tier import Memory
from ..layout.master import TILE_NUMEL, MasterForm
from ..layout.subgroup import section_view
from ..state.durability import Ground
from ..state.pipeline import StepPipeline
from ..state.slots import SlotRecord
from ..updates.entry import PartOfMemory
from ..updates.log_state import Draft, LogState
from ..updates.logs import SlotLogs
from .latest import LatestCommit

_NO_SUMS = torch.zeros(0, dtype=torch.int64, device="cpu")


class Sealing:
    """Completes what is written of a subgroup, and takes it up again: the `Seal` of a durable optimizer's pipeline.

    ::

                            a base                                      an entry
        a step reads        its state; all of it where a log is behind  what is in it, behind the base
        a step trusts       its state, by sums kept in memory; with a   the trailer that the chain has the root of,
                            log as an entry                             and what is as the trailer says
        who resumes reads   all of it                                   the same
        who resumes trusts  as an entry: a manifest has the root        the same
        is written over     never while a manifest refers to it         the same

    Args:
        run: says where each subgroup is written to.
        latest: the commit that a write waits for.
    """

    def __init__(self, run: DurableRun, logs: SlotLogs, latest: LatestCommit, ground: Ground) -> None:
        self.run = run
        self.logs = logs
        self._latest = latest
        self._mirror = ground.mirror
        self._table = ground.table
        self._kernels = ground.kernels
        self._tail_sums: dict[int, torch.Tensor] = {}
        self._copies_read: dict[int, int] = {}
        """The copy that was read last of each slot."""

    @property
    def discards(self) -> bool:
        """Whether what changes is given up: there is a run whose state will take its place."""
        return self.run.is_under_way

    def begin_read(self, slot: SlotRecord) -> int | None:
        """See `Sealer`."""
        self._copies_read[slot.index] = self.run.space.copies.whole[0]  # another slot's error may change it
        return _log_of(slot).read_bytes

    def read_elsewhere(self, slot: SlotRecord, error: CorruptionError) -> bool:
        """See `Sealer`."""
        return self.run.space.copies.lose(self._copies_read[slot.index], error)

    def seal(self, slot: SlotRecord) -> WriteTarget:
        """Choose what of a slot's buffer is written where, and complete it for that: an entry of its log, or all."""
        log = _log_of(slot)
        if log.target is not None:  # the drive did not take it, and what it was sealed from is no longer known
            return log.target
        self._latest.begin_writing()  # before an extent is chosen: a commit under way says what is free
        assert slot.buffer is not None
        if log.draft is not None:
            target = self._seal_entry(slot, slot.buffer, log.draft)
        else:
            target = self._seal_base(slot, log, slot.buffer)
        self.point(slot)
        log.end_version(target)  # last: what cuts this short has it sealed once more, in its place
        return target

    def point(self, slot: SlotRecord) -> None:
        """Say where the newest of a slot is read from."""
        chain = self._chain_of(slot)
        assert chain.base is not None
        slot.lie_in(chain.reading(base_bytes=chain.base.content.size_bytes) if chain.log else chain.base.extent)
        # Of a base at least a page, also where the rule has no state.
        least_bytes = self.logs.base_of(slot.subgroup).state_span or self.run.space.alignment
        _log_of(slot).point(len(chain.log), None if chain.log else least_bytes)

    def _seal_entry(self, slot: SlotRecord, memory: Memory, draft: Draft) -> WriteTarget:
        part, extents = PartOfMemory(memory, draft.start), self.run.extents
        # Whole lines are in it (`EntryFormat`), so no byte is left over.
        sums = Sums(self._kernels.tile_checksums(part.view(torch.int32, 0, draft.size_bytes // 4)), _NO_SUMS)
        extent = extents.to_append(slot.index, draft.place)
        size_bytes = extents.seal_entry(slot.index, part, draft.size_bytes, sums, place=draft.place)
        return WriteTarget(extent, draft.start, size_bytes)

    def _seal_base(self, slot: SlotRecord, log: LogState, memory: Memory) -> WriteTarget:
        sums = log.sums or self._completed(slot, log, memory)  # those of the update: all of it was in the cache
        extent = self.run.extents.to_rewrite(slot.index)
        self.run.extents.seal_base(slot.index, memory, sums)
        slot.note_checksums(sums.state)  # what `verify` compares with: the trailer is not read in a step
        self._note_tail(slot, sums)
        return WriteTarget(extent)

    def _completed(self, slot: SlotRecord, log: LogState, memory: Memory) -> Sums:
        """Put what the parameters have besides the state into the tail, where the update has not, and take the sums.

        One that somebody changed and that had no gradient is its own master from here on, as its next update would
        have it: what it was split from is nowhere any more.
        """
        self.replay(slot)  # first: it needs the tail of the base, which the next line writes over
        self._fill_tail(slot, memory)
        for run, tail in self.logs.tails(slot.subgroup, memory):
            # The update itself looks for changes, and notes the sums of what it wrote.
            known = None if run.param in log.updated else self._table[run.param].checksums_of(run)
            if known is None:
                continue
            found = self._kernels.tile_checksums(tail[: run.numel])
            lower = section_view(slot.subgroup, memory, "master", run)
            assert lower is not None
            for tile in (found != known).nonzero().flatten().tolist():
                lower[tile * TILE_NUMEL : (tile + 1) * TILE_NUMEL] = 0
            known.copy_(found)
        return self.logs.sums(slot.subgroup, memory)

    def _fill_tail(self, slot: SlotRecord, memory: Memory) -> None:
        self._mirror.end_step()  # updated parameters may still be on their way to the device
        for run, tail in self.logs.tails(slot.subgroup, memory):
            with self._table[run.param].reaching(run, change=False) as param:
                copy_alone(tail[: run.numel], param)
            tail[run.numel :].zero_()  # the buffer was another's, and equal parameters are to have equal sums

    def replay(self, slot: SlotRecord) -> None:
        """Apply the log that was read with the state, if that is not done."""
        assert slot.buffer is not None
        self.logs.replay(slot.subgroup, _log_of(slot), slot.buffer)

    def verify(self, slot: SlotRecord) -> None:
        """Raise CorruptionError if what a step reads of a slot is not what was written."""
        is_found = slot.checksums is None  # who takes it up looks at all of it, and cannot read another copy
        if slot.buffer is None or (is_found and not self.run.space.copies.several):
            return
        if is_found or _log_of(slot).needs_replay:
            self.logs.check(slot.subgroup, self._chain_of(slot), slot.buffer)
            return
        base = self._chain_of(slot).base
        assert base is not None
        path = self.run.extents.path_of(base)
        # The state alone was read, so no trailer is there to open.
        actual = self._kernels.tile_checksums(slot.buffer.view(torch.int32, 0, slot.size_bytes // 4))
        assert slot.checksums is not None
        check_sums(slot.checksums, actual, path=path, what=f"the state of subgroup {slot.index}")

    def is_changed(self, slot: SlotRecord) -> bool:
        """Return whether somebody changed parameters of a subgroup since it was last written."""
        with self._mirror.looking():
            return self._differs(slot)

    def _differs(self, slot: SlotRecord) -> bool:
        subgroup = slot.subgroup
        if subgroup.form is not MasterForm.ITSELF:  # fp32 parameters have no sums of their own
            runs = [(self._table[run.param], run) for run in subgroup.runs]
            return any(
                not torch.equal(self._kernels.tile_checksums(record.copy_of(run)), known)
                for record, run in runs
                if (known := record.checksums_of(run)) is not None
            )
        layout = self.logs.base_of(subgroup)
        room = HostRegion(layout.tail_bytes)  # not the slot's buffer, which it may not have
        self._fill_tail(slot, PartOfMemory(room, -layout.tail_at))
        words = room.view(torch.int32, 0, layout.tail_bytes // 4)
        known = self._tail_sums.get(slot.index)
        return known is None or not torch.equal(self._kernels.tile_checksums(words), known)

    def find(self, slot: SlotRecord, pipeline: StepPipeline) -> bool:
        """Have all of the newest that is written of a slot read next, its log too; return False if there is nothing."""
        chain = self._chain_of(slot)
        if chain.base is not None:
            pipeline.adopt(slot, chain.reading(base_bytes=chain.base.content.size_bytes), len(chain.log))
        return chain.base is not None

    def bring_back(self, slot: SlotRecord, memory: Memory) -> None:
        """Verify all that was read of a slot, apply its log, and give its parameters the values that it says."""
        sums = self.logs.check(slot.subgroup, self._chain_of(slot), memory)  # before parameters are written
        self.replay(slot)  # what `_restore` gives parameters is the newest
        self._restore(slot, memory)
        slot.note_checksums(sums.state)  # those of the base, as it is on the drive: the next read has that
        self._note_tail(slot, sums)
        self.point(slot)

    def _chain_of(self, slot: SlotRecord) -> Chain:
        return self.run.extents.slots[slot.index].current

    def _restore(self, slot: SlotRecord, memory: Memory) -> None:
        subgroup = slot.subgroup
        tails = dict(self.logs.tails(subgroup, memory))
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
            if checksums is not None:  # or the next update would take these values for somebody's change
                self._kernels.tile_checksums(values, out=checksums)

    def _note_tail(self, slot: SlotRecord, sums: Sums) -> None:
        """Note that the parameters are as these sums say, where nobody else does: those in fp32 have no log."""
        if slot.subgroup.form is MasterForm.ITSELF:
            self._tail_sums[slot.index] = sums.tail


def _log_of(slot: SlotRecord) -> LogState:
    assert slot.log is not None
    return slot.log
