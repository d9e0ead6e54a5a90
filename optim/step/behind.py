"""What is left of a step when `step()` returns: updates in the order of the next forward, then its first reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from nvme_offload.offload.devices.device import is_host
from nvme_offload.optim.state.pipeline import StepPipeline
from nvme_offload.optim.state.progress import StepInputs, UnfinishedStep
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.state.state_parts import StateParts
from nvme_offload.optim.state.store import StateStore
from nvme_offload.optim.state.table import ParamRecord
from nvme_offload.optim.stats import Meter
from nvme_offload.optim.step.update import read_update_write
from nvme_offload.optim.step.waiting_parameter import let_read
from nvme_offload.optim.tiers.parts import parts_of

LOOK_AHEAD = 256  # subgroups; most of them may be in host memory, past which the reads go on


def forward_order(slots: Sequence[SlotRecord], ranks: Mapping[int, int]) -> list[SlotRecord]:
    """Subgroups as the next forward will want them; those that no forward has used so far come last."""
    last = len(ranks)

    def rank(slot: SlotRecord) -> int:
        return min(ranks.get(run.param, last) for run in slot.subgroup.runs)

    return sorted(slots, key=rank)


def waits_for_updates(store: StateStore, record: ParamRecord) -> bool:
    """Whether whoever reads this parameter finds it updated, also where the update is done behind a step."""
    return store.config.hides_steps and hindrance(store, record) is None


def hindrance(store: StateStore, record: ParamRecord) -> str | None:
    """Why a parameter has to be updated inside `step()`; None where its gather can wait for the update."""
    if record.rule.whole:  # they are gathered over ranks, which no two threads of a process may do at once
        return f"{store.owner} updates whole parameters"
    if store.blocks.pass_through_buffers:
        return "parameters have a tier of their own (offload_param), or gradients are on NVMe (offload_gradients)"
    if isinstance(parts_of(record.leaf), StateParts) or (record.is_awaited and is_host(record.param.device)):
        return None
    return (
        "its parameters are neither in host memory and of a plain module that optimizer.overlap_with(model) was told, "
        "nor shards in parts, which initialize and split_parameters make"
    )


class UpdatesBehind:
    """The job of a worker: the updates of a step that are done behind it.

    Args:
        store: the optimizer's state.
        meter: of the optimizer.
        step: what is pending of it is done, in its order, and what somebody waits for before that.
        inputs: of the step. What is in there is kept, whatever becomes of ``p.grad``.
        following: subgroups as the next step will go through them.
        first: the same, as the next step will want to have them read.
    """

    must_end = True

    def __init__(
        self,
        store: StateStore,
        meter: Meter,
        step: UnfinishedStep,
        inputs: StepInputs,
        following: Sequence[SlotRecord],
        first: Sequence[SlotRecord],
    ) -> None:
        self._store = store
        self._meter = meter
        self._step = step
        self._inputs = inputs
        self._following = following
        self._first = first
        self._begun_in_backward = bool(step.done)
        self.is_done = False

    def turn(self) -> bool:
        """Update the first subgroup that is in memory, if any is."""
        pipeline, pending = self._store.pipeline, self._step.pending
        ahead = self._ahead()
        with pipeline.reads_first():
            pipeline.advance(ahead)
            slot = next((slot for slot in ahead if slot in pending and pipeline.is_here(slot)), None)
            if slot is None:
                return False
            update_captured(self._store, self._meter, self._step, self._inputs, slot, ahead)
        self._meter.updates_behind += 1
        if not pending:
            self._finish()
        return True

    def give_up(self, error: BaseException) -> None:
        """Say in the error, which somebody will see in quite another place, what it means."""
        error.add_note(f"This happened behind a step: {self._step.situation}. {self._step.way_on}")

    def _ahead(self) -> list[SlotRecord]:
        """The subgroups that will be needed next: those that somebody waits for, the rest, those of the next step."""
        return list(dict.fromkeys(islice(self._upcoming(), LOOK_AHEAD)))

    def _upcoming(self) -> Iterator[SlotRecord]:
        """Where updates began in backward, what is in memory already comes before the rest: it holds the buffers."""
        pending = self._step.pending
        for index in tuple(self._step.wanted):
            if self._step.concerns(index):
                yield from (slot for slot in pending if any(run.param == index for run in slot.subgroup.runs))
            else:
                self._step.wanted.remove(index)
        if self._begun_in_backward:
            yield from (slot for slot in self._store.pipeline.residents if slot in pending)
        yield from pending
        yield from self._following

    def _finish(self) -> None:
        store, step = self._store, self._step
        store.pipeline.start_writes()
        for index, count in step.counts.items():
            store.table[index].steps = count
        self._meter.changed_behind += step.changed_tiles
        store.unfinished = None
        store.after_updates()
        store.worker.pastime = FirstReads(store.pipeline, self._first)
        self.is_done = True


def update_captured(
    store: StateStore,
    meter: Meter,
    step: UnfinishedStep,
    inputs: StepInputs,
    slot: SlotRecord,
    ahead: Sequence[SlotRecord],
) -> None:
    """Update a subgroup in memory with gradients that were captured, and let go of them.

    Raises:
        StateError: somebody has changed one since.
    """
    params = {run.param for run in slot.subgroup.runs}
    step.check_grads(params)
    read_update_write(store, meter, step, inputs, [slot, *(other for other in ahead if other is not slot)])
    try:
        step.check_grads(params)
    except BaseException:
        step.updating = True  # with which gradient, nobody knows
        raise
    if not step.is_open:  # before: who finds nothing left to wait for finds an ordinary parameter
        let_read(store.table[index] for index in params if step.ends_with(slot, index))
    step.let_go_of(slot)


class FirstReads:
    """The pastime of a worker: what the next step begins with is read as soon as there are buffers for it.

    Args:
        pipeline: of the state.
        order: subgroups in the order in which the next step will need them.
    """

    must_end = False

    def __init__(self, pipeline: StepPipeline, order: Sequence[SlotRecord]) -> None:
        self._pipeline = pipeline
        self._window = pipeline.window(order)
        self._next = 0
        self.is_done = False

    def turn(self) -> bool:
        """Start one read after the other, as buffers come free; each once, also where it fails."""
        self._next = self._pipeline.read_into_free_buffers(self._window, self._next)
        self.is_done = self._next == len(self._window) and self._pipeline.is_quiet
        return False

    def give_up(self, error: BaseException) -> None:
        """Nothing was promised: who needs the state reads it again. A failed write is told in the error itself."""
