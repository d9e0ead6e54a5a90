"""Do the worker's part of a step: updates in backward and behind `step()`, then the first reads of the next one."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from nvme_offload.aio_native.interrupt import DeferredInterrupt
from ..state.body import StepState
from ..state.condition import StepPhase
from ..state.phase import StepRecord
from ..state.slots import SlotRecord
from ..telemetry.stats import Meter
from .schedule import Schedule, ahead, next_update
from .update import read_update_write
from .waiting_parameter import let_read

_WHERE = {StepPhase.BEGUN: "in backward", StepPhase.BEHIND: "behind a step"}


class Source(Protocol):
    """A source of gradients while backward goes on; see `Inbox`."""

    left: Collection[int]

    def take_in(self, record: StepRecord, *, waits: bool = True) -> bool:
        """Add one gradient to the step; return whether there was any. `waits`: for a device that computes it."""

    def allows(self, slot: SlotRecord) -> bool:
        """Return whether a subgroup that is ready may be updated now."""


class StepJob:
    """The worker's job for one step, BEGUN or BEHIND.

    Args:
        source: of gradients that are still to come; None: the record has them all.
        first: subgroups to read for the next step once this one is done, in this order.
    """

    def __init__(
        self,
        store: StepState,
        meter: Meter,
        record: StepRecord,
        schedule: Schedule[SlotRecord],
        source: Source | None = None,
        first: Sequence[SlotRecord] = (),
    ) -> None:
        self.record = record
        self.schedule = schedule
        self._store = store
        self._meter = meter
        self.source = source
        self._first = first
        self._window: list[SlotRecord] | None = None
        self._num_read = 0

    @property
    def must_end(self) -> bool:
        """Whether the worker finishes it, as far as it can, even if everybody has let go of the worker."""
        blocks, table = self._store.blocks, self._store.table
        left = self.record.left if self.record.phase is StepPhase.BEHIND else ()  # `pending` lacks what is in hand
        return not all(blocks.takes_turns(blocks.number_of(table[index].leaf)) for index in tuple(left))

    @property
    def is_done(self) -> bool:
        """Return whether nothing is left to do.

        Reads for the next step that found no buffer are left to that step when nothing is under way: then buffers have
        what could not be written, and no transfer that ends gives one back.
        """
        return self._window is not None and self._store.pipeline.is_quiet

    def shift(self) -> bool:
        """Update the first subgroup that is in memory, if any is; when all are updated, read for the next step."""
        if self.record.phase is StepPhase.DONE:
            self._read_first()
        if not self._goes_on:
            return False
        with self._store.pipeline.reads_first():
            has_updated = self._update_next()
        if self.record.phase is StepPhase.BEHIND and not self.record.pending:
            self._finish()
        return has_updated

    def take_turn(self, block: int | None = None) -> bool:
        """Update a block's subgroups in the thread that gathers it or has gone backward through it; return if any were.

        It needs the buffers that this thread uses. Ctrl-C is honoured between two subgroups. `block` None: the first
        one whose subgroups can be updated.
        """
        store, record, source = self._store, self.record, self.source
        if not self._goes_on:
            return False
        while source is not None and source.take_in(record):
            pass
        due = [slot for slot in record.pending if self._takes_turns(slot) and block in (None, slot.subgroup.block)]
        slots = [slot for slot in due if source is None or source.allows(slot)]
        slots = [slot for slot in slots if slot.subgroup.block == slots[0].subgroup.block]
        with DeferredInterrupt() as interrupt, store.pipeline.pausing(interrupt.deliver), store.pipeline.reads_first():
            for slot in slots:
                interrupt.deliver()
                self._update(slot, self._ahead())
        if slots:
            self._end_turn(slots[0].subgroup.block)
        return bool(slots)

    @property
    def _goes_on(self) -> bool:
        """Whether it is about updates. No kernel works while somebody looks: one that seems to was cut off."""
        if self.record.is_in_kernel:
            self.record.become(StepPhase.SPOILT)
        return self.record.phase in _WHERE

    def _end_turn(self, block: int) -> None:
        store, record, source = self._store, self.record, self.source
        if record.phase is StepPhase.BEHIND and not record.pending:
            self._finish()
        if source is not None and record.claims.way_back is None and block not in source.left:
            leaves = [store.table[index].leaf for index in record.inputs.grads]
            if all(store.blocks.number_of(leaf) != block for leaf in leaves):
                store.blocks.forget_gradients(block)
        store.worker.wake()

    def _takes_turns(self, slot: SlotRecord) -> bool:
        return self._store.blocks.takes_turns(slot.subgroup.block)

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
        """Take in a gradient, or update a subgroup; return whether there was either.

        While a device computes gradients, subgroups that have theirs are updated; only who has none waits for it.
        """
        store, record, source = self._store, self.record, self.source
        order: Iterable[SlotRecord] = self._ahead()
        if store.pipeline.pool is not None:  # else nothing is read, and nobody goes through what comes later
            order = list(order)
            store.pipeline.advance(order)
        if source is not None and source.take_in(record, waits=False):
            return True

        def may_begin(slot: SlotRecord) -> bool:
            is_ready = store.pipeline.is_here(slot) and not self._takes_turns(slot)
            return is_ready and (source is None or source.allows(slot))

        if (slot := next_update(order, record.pending, may_begin)) is None:
            return source is not None and source.take_in(record)
        self._update(slot, order)
        return True

    def _ahead(self) -> Iterator[SlotRecord]:
        return ahead(self.schedule, self.record, self._store.pipeline.residents)

    def _update(self, slot: SlotRecord, order: Iterable[SlotRecord]) -> None:
        """Update a subgroup in memory and let go of its gradients. StateError: one has changed since capture."""
        record, params = self.record, {run.param for run in slot.subgroup.runs}
        record.check_grads(params)
        following: Iterator[SlotRecord] = (other for other in order if other is not slot)
        if self._store.pipeline.pool is None:
            following = islice(filter(record.pending.__contains__, following), 1)
        read_update_write(self._store, self._meter, record, [slot, *following])
        try:
            record.check_grads(params)
        except BaseException:
            if record.claims.way_back is None:  # with which gradient, nobody knows
                record.become(StepPhase.SPOILT)
            raise
        if record.phase is not StepPhase.BEGUN:  # before: who finds nothing left to wait for finds a plain parameter
            let_read(self._store.table[index] for index in params if record.ends_with(slot, index))
        record.let_go_of(slot)
        self._meter.count_updates(behind=self.source is None, in_backward=self.source is not None)

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
        pipeline.settle_finished()
        self._num_read = pipeline.read_ahead(self._window, self._num_read)
