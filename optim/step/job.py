"""Do the worker's part of a step: updates in backward and behind `step()`, then the first reads of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nvme_offload.optim.state.body import StepState
from nvme_offload.optim.state.condition import StepPhase
from nvme_offload.optim.state.phase import StepRecord
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.step.schedule import Schedule, ahead, next_update
from nvme_offload.optim.step.update import read_update_write
from nvme_offload.optim.step.waiting_parameter import let_read
from nvme_offload.optim.telemetry.stats import Meter

_WHERE = {StepPhase.BEGUN: "in backward", StepPhase.BEHIND: "behind a step"}


class Source(Protocol):
    """A source of gradients while backward goes on; see `Inbox`."""

    def take_in(self, record: StepRecord) -> bool:
        """Add one gradient to the step; return whether there was any."""

    def allows(self, slot: SlotRecord) -> bool:
        """Return whether a subgroup that is ready may be updated now."""


class StepJob:
    """The worker's job for one step, BEGUN or BEHIND.

    Args:
        source: of gradients that are still to come; None: the record has them all.
        first: subgroups to read for the next step once this one is done, in this order.
        by_turns: the thread that runs backward updates in `catch_up`, block by block: it needs the same buffers.
    """

    def __init__(
        self,
        store: StepState,
        meter: Meter,
        record: StepRecord,
        schedule: Schedule[SlotRecord],
        source: Source | None = None,
        first: Sequence[SlotRecord] = (),
        *,
        by_turns: bool = False,
    ) -> None:
        self.record = record
        self.schedule = schedule
        self._store = store
        self._meter = meter
        self.source = source
        self._first = first
        self._window: list[SlotRecord] | None = None
        self._num_read = 0
        self._by_turns = by_turns

    @property
    def must_end(self) -> bool:
        """Whether the worker finishes it even if everybody has let go of the worker."""
        return self.record.phase is StepPhase.BEHIND

    @property
    def is_done(self) -> bool:
        """Return whether nothing is left to do."""
        window = self._window
        return window is not None and self._num_read == len(window) and self._store.pipeline.is_quiet

    def shift(self) -> bool:
        """Update the first subgroup that is in memory, if any is; when all are updated, read for the next step."""
        if self._by_turns:
            return False
        if self.record.phase is StepPhase.DONE:
            self._read_first()
        if self.record.phase not in _WHERE:
            return False
        with self._store.pipeline.reads_first():
            has_updated = self._update_next()
        if self.record.phase is StepPhase.BEHIND and not self.record.pending:
            self._finish()
        return has_updated

    def catch_up(self) -> None:
        """Take in all gradients that have come and update what is ready, waiting for its state; then read ahead."""
        store, record, source = self._store, self.record, self.source
        assert source is not None
        while source.take_in(record):
            pass
        updated = []
        for slot in [slot for slot in record.pending if source.allows(slot)]:
            self._update(slot, list(ahead(self.schedule, record, store.pipeline.residents)))
            self._meter.count_updates(in_backward=True)
            updated.append(slot.subgroup)
        left = {slot.subgroup.block for slot in record.pending}
        store.blocks.forget_gradients(subgroup for subgroup in updated if subgroup.block not in left)
        store.pipeline.advance(list(ahead(self.schedule, record, store.pipeline.residents)))

    def give_up(self, error: BaseException) -> None:
        """Add to an error, which may surface far from here, what it means for the step.

        An error of a read for the next step means nothing: whoever needs the state reads it again.
        """
        record, where = self.record, _WHERE.get(self.record.phase)
        if record.phase is StepPhase.BEHIND:
            record.become(StepPhase.STOPPED)
        if where is not None:
            error.add_note(f"This happened {where}: {record.situation}. {record.way_on}")

    def _update_next(self) -> bool:
        """Take in a gradient, or update a subgroup; return whether there was either."""
        store, record, source = self._store, self.record, self.source
        order = list(ahead(self.schedule, record, store.pipeline.residents))
        store.pipeline.advance(order)
        if source is not None and source.take_in(record):
            return True

        def may_begin(slot: SlotRecord) -> bool:
            return store.pipeline.is_here(slot) and (source is None or source.allows(slot))

        if (slot := next_update(order, record.pending, may_begin)) is None:
            return False
        self._update(slot, order)
        self._meter.count_updates(behind=source is None, in_backward=source is not None)
        return True

    def _update(self, slot: SlotRecord, order: Sequence[SlotRecord]) -> None:
        """Update a subgroup in memory and let go of its gradients. StateError: one has changed since capture."""
        record, params = self.record, {run.param for run in slot.subgroup.runs}
        record.check_grads(params)
        read_update_write(self._store, self._meter, record, [slot, *(other for other in order if other is not slot)])
        try:
            record.check_grads(params)
        except BaseException:
            record.become(StepPhase.SPOILT)  # with which gradient, nobody knows
            raise
        if record.phase is not StepPhase.BEGUN:  # before: who finds nothing left to wait for finds a plain parameter
            let_read(self._store.table[index] for index in params if record.ends_with(slot, index))
        record.let_go_of(slot)

    def _finish(self) -> None:
        store, record = self._store, self.record
        store.pipeline.start_writes()
        store.table.count_steps(record.inputs.counts)
        self._meter.note_changed(record.changed_tiles)
        record.become(StepPhase.DONE)
        store.be_whole()
        store.durability.end_updates(store.pipeline, store.worker.bell)

    def _read_first(self) -> None:
        """Start reads as buffers come free. Each starts once, also if it fails."""
        pipeline = self._store.pipeline
        if self._window is None:
            self._window = pipeline.window(self._first)
        self._num_read = pipeline.read_into_free_buffers(self._window, self._num_read)
