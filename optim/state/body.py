"""Give everybody one way to read and write an optimizer's state. `optim.state.store` decides where it is placed."""

import gc
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from itertools import count

import torch

from nvme_offload.offload.errors import ClosedError, CorruptionError, ForkError, StateError
from ..kernels import KernelPool
from ..updates.mirrored import DeviceMirror
from ..updates.work import Means
from .asked import Blocks, Commitments, StepSettings
from .condition import Condition, LoadingState, Need, StepPhase, WholeState, way_back_text
from .phase import StepRecord
from .pipeline import StepPipeline
from .slots import SlotRecord
from .table import ParamRecord, ParamTable
from .visits import FirstUses
from .worker import Worker, WorkerJob

_BEHIND = StepPhase.BEHIND  # to look an enum's member up would call Python


class StateBody(ABC):
    """Records of parameters, slots of subgroups, and how to reach them; see `StateStore`."""

    def __init__(
        self,
        owner: str,
        table: ParamTable,
        kernels: KernelPool,
        pipeline: StepPipeline,
        blocks: Blocks,
        mirror: DeviceMirror,
    ) -> None:
        self.owner = owner
        self.table = table
        self.kernels = kernels
        self.pipeline = pipeline
        self.blocks: Blocks = blocks
        self.mirror = mirror
        self.slots: list[SlotRecord] = []
        """All subgroups that have a place."""
        self.condition: Condition = WholeState(owner)
        """Whether all state is of one step, and what leads there if not; see `enter`."""
        self.is_closed = False
        self.worker = Worker(pipeline.waiting, lambda: table.device)
        """Does what is left of a step when it returns."""
        pipeline.ring_also(self.worker.bell)
        self.uses = FirstUses()
        """The order in which the latest forward used the parameters."""
        self._owner_pid = os.getpid()
        _bodies[next(_numbers)] = self

    @abstractmethod
    def ensure_placed(self, records: Iterable[ParamRecord]) -> None:
        """Give parameters whose state has no place yet one, with all of its space promised. Call it `at_rest`.

        The first that need one bring all along that require a gradient. After an error nothing was placed:
        OutOfSpaceError names bytes needed and free, ConfigError says that the host budget is too small, SwapIOError
        that a write failed.
        """

    def place_trainable(self, records: Iterable[ParamRecord] | None = None) -> None:
        """Call `ensure_placed` for those of `records`, by default of all, that require a gradient now."""
        wanted = self.table if records is None else records
        self.ensure_placed([record for record in wanted if record.leaf.requires_grad])

    @property
    def is_placed(self) -> bool:
        """Whether any state has its place. Until then whoever shards the model may exchange all parameters."""
        return bool(self.slots)

    @property
    def has_let_go(self) -> bool:
        """Whether it holds no parameter until somebody needs one; see `StateStore.foresee`."""
        return not len(self.table)

    def has_state(self, record: ParamRecord) -> bool:
        """Return whether a parameter's state has a place, or will have one with its first gradient."""
        return record.is_placed or record.leaf.requires_grad

    @property
    def _trainable(self) -> list[ParamRecord]:
        return [record for record in self.table if record.leaf.requires_grad]

    def slots_of(self, indices: Iterable[int]) -> list[SlotRecord]:
        """Return slots that hold state of any of these parameters."""
        wanted = set(indices)
        return [slot for slot in self.slots if any(run.param in wanted for run in slot.subgroup.runs)]

    def enter(self, condition: Condition, job: WorkerJob | None = None) -> None:
        """Begin a condition, with what the worker does in it. What the worker has done of the job before stays done."""
        # No call in between: a signal handler sees both or neither.
        self.condition = condition
        self.worker.job = job

    def note_half_written(self) -> None:
        """Note, in a load or where entries are set, that the state is neither old nor new until `be_whole`."""
        if not isinstance(self.condition, LoadingState):
            self.condition = LoadingState(self.owner, self.way_back)

    @property
    def way_back(self) -> str:
        """Say what brings whole state back where a load or a step stopped."""
        return way_back_text(split=self.table.has_split_params, is_durable=self.pipeline.seal is not None)

    def be_whole(self) -> None:
        """Note that all state and all parameters are of one step."""
        self.condition = WholeState(self.owner)

    @property
    def is_whole(self) -> bool:
        """Whether all state and all parameters are of one step."""
        return Need.STATE not in self.condition.lacks

    @property
    def record(self) -> StepRecord | None:
        """The step that is not done, if there is one."""
        return self.condition if isinstance(self.condition, StepRecord) else None

    def record_in(self, phase: StepPhase) -> StepRecord | None:
        """Return the step, if it is in this phase."""
        record = self.record
        return record if record is not None and record.phase is phase else None

    @abstractmethod
    def come_back(self) -> None:
        """Bring back what is parked away from a device. OutOfMemoryError: it has no room; nothing is lost."""

    def at_rest(
        self, *, forgiving: bool = False, meanwhile: Callable[[], None] = lambda: None, parked: bool = False
    ) -> AbstractContextManager[None]:
        """Hold the state as it is between two steps: nobody updates, reads or writes it meanwhile. Re-entrant.

        It waits for the updates behind the latest step, and raises once what stopped them or a write behind them.
        Whoever reaches for state or its pipeline does it in here.

        Args:
            forgiving: do not raise what stopped them; for whoever makes good for it.
            meanwhile: called now and then while it waits; what it raises ends that.
            parked: leave what is away from a device there: for whoever needs nothing of that.
        """
        return _AtRest(self, partial(self.wait_for_updates, forgiving=forgiving, meanwhile=meanwhile, parked=parked))

    def wait_for_updates(
        self, *, forgiving: bool = False, meanwhile: Callable[[], None] = lambda: None, parked: bool = False
    ) -> None:
        """Wait until all updates behind the latest step are done; see `at_rest`."""
        self.check_usable()
        begun_record = self.record_in(StepPhase.BEGUN)
        if begun_record is not None and not self._goes_back(begun_record):
            begun = "updates that have begun in backward (overlap_step)"
            raise StateError(self.owner, "parameters and state as they are between two steps", f"{begun}: call step()")
        self.end_updates(meanwhile)
        if forgiving:
            self.worker.note_failure(None)
        self.worker.raise_failure()
        self.mirror.end_step()
        if not parked:
            self.come_back()

    def end_updates(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until no updates are behind the latest step, some of which are this thread's; what failed is not raised.

        Args:
            meanwhile: as in `at_rest`.
        """

        def is_done() -> bool:
            return self.condition.phase is not StepPhase.BEHIND

        meanwhile()
        while not is_done() and self.worker.take_turn():
            meanwhile()
        self.worker.wait_until(is_done, meanwhile)

    def wait_until_quiet(self) -> None:
        """Wait until nothing is done behind the latest step, no reads for the next one either; see `at_rest`."""
        self.wait_for_updates(parked=True)
        worker = self.worker
        worker.wait_until(lambda: worker.is_idle)
        worker.raise_failure()

    def wait_for_updates_of(self, indices: Iterable[int], *, overwrites: bool = False) -> None:
        """Wait until parameters are as the latest step leaves them; call it before their bytes are read.

        It raises what stopped the updates before they came to one of these; in a forked process ForkError. Whoever
        `overwrites` all of them hears of that once, and then need not wait for a step that nobody finishes.
        """
        for index in indices:
            self._wait_for_update_of(index, overwrites=overwrites)
        self.mirror.end_step()

    def _wait_for_update_of(self, index: int, *, overwrites: bool) -> None:
        self.uses.note(index)
        record = self.record
        if record is None:
            return
        if record.phase is StepPhase.BEGUN and index in record.claims.final and not self._goes_back(record):
            begun = f"{self.table[index].name}, whose gradient was final, is used once more before step()"
            raise StateError(self.owner, 'one use in backward, or overlap_step = "forward"', begun)
        if record.phase in (StepPhase.BEGUN, StepPhase.RUNNING):
            return
        block = self.blocks.number_of(self.table[index].leaf)
        if record.phase is StepPhase.BEHIND and self.blocks.takes_turns(block) and self.is_own_process:
            self.worker.take_turn(block)  # whole: others that are gathered with this one may be asked for later
        if not record.concerns(index):
            return
        self.check_process()
        record.wanted.append(index)
        self.worker.wait_until(lambda: record.phase is not StepPhase.BEHIND or not record.concerns(index))
        if record.concerns(index):
            self.worker.raise_failure()
            if not overwrites:
                raise record.refusal("updated parameters")
            record.note_overwritten()

    def end_begun(self) -> None:
        """Give up what has begun in backward of a step that nobody will call; what can be taken back is."""
        record = self.record_in(StepPhase.BEGUN)
        if record is None:
            return
        with self.worker.kept_away():
            self.worker.drop_job()
            try:
                self._goes_back(record)
            except (OSError, CorruptionError) as error:
                self.worker.note_failure(error)

    def _goes_back(self, begun: StepRecord) -> bool:
        """Take back what has begun in backward, if that is possible; return whether it was."""
        if begun.claims.way_back is None:
            return False
        begun.claims.way_back()
        return True

    @property
    def has_unfinished_step(self) -> bool:
        """Whether the latest step, or a load, stopped halfway. A step whose updates go on behind it has not."""
        condition = self.condition
        if isinstance(condition, StepRecord):
            return condition.phase in (StepPhase.RUNNING, StepPhase.STOPPED, StepPhase.SPOILT)
        return isinstance(condition, LoadingState)

    @property
    def is_own_process(self) -> bool:
        """Whether this is the process that made it: a forked child has neither its threads nor its rings."""
        return os.getpid() == self._owner_pid

    def check_usable(self) -> None:
        """Raise ClosedError after ``close``, ForkError in another process."""
        if self.is_closed:
            raise ClosedError(self.owner)
        self.check_process()

    def check_process(self) -> None:
        """Raise ForkError in another process. Before a lock is taken: a thread that is not there may hold it."""
        if not self.is_own_process:
            raise ForkError(self.owner, self._owner_pid, os.getpid())

    def check(self, need: Need) -> None:
        """Raise what refuses this need in the present condition. Call it `at_rest`."""
        self.check_usable()
        if (error := self.condition.refuses(need)) is not None:
            raise error


class StepState(StateBody):
    """The state as a step finds it, with what the step asks of all that the state is placed in."""

    config: StepSettings
    durability: Commitments
    means: Means

    @abstractmethod
    def updated_inside(self, record: ParamRecord) -> str:
        """Say why a parameter is updated inside `step()`, wherever it is; empty if it need not be: `Updater.inside`."""


class _AtRest(AbstractContextManager[None]):
    """See `StateBody.at_rest`. As in `optim.state.worker` nothing is called with the lock held, and C gives it back.

    `wait` returns when no updates are under way; it is called again where another thread has taken a step since.
    """

    def __init__(self, body: StateBody, wait: Callable[[], None]) -> None:
        self._body = body
        self._lock = body.worker.lock
        self._wait = wait

    def __enter__(self) -> None:
        while True:
            self._wait()
            for _ in map(self._lock.acquire, (True,)):
                if self._body.condition.phase is not _BEHIND:
                    return
                self._lock.release()

    @property
    def __exit__(self) -> Callable[..., None]:
        return self._lock.__exit__


# Neither attributes of the parameters, which would be copied and pickled with them, nor weak references to them, with
# which `Module.to` cannot exchange a sharded parameter.
_bodies: weakref.WeakValueDictionary[int, StateBody] = weakref.WeakValueDictionary()
_numbers = count()


def known_bodies() -> list[StateBody]:
    """List all that are still there, the latest first."""
    at_once = _bodies.valuerefs()  # one call: other threads make optimizers meanwhile
    return [body for known in reversed(at_once) if (body := known()) is not None]


def bodies_of(param: torch.Tensor) -> list[StateBody]:
    """List those that have a parameter, the latest first."""
    return [body for body in known_bodies() if body.table.find(param) is not None]


def body_of(param: torch.Tensor) -> StateBody | None:
    """Return where the state of a parameter is, if it is anywhere; the latest counts."""
    return next(iter(bodies_of(param)), None)


def check_sole(body: StateBody, records: Iterable[ParamRecord]) -> None:
    """Raise ValueError if another optimizer that is still open has state of one of these parameters.

    Closed ones have let go, and so have those that nobody holds: the garbage collector runs before this refuses.
    """
    records = list(records)
    if _other_of(body, records) is None:
        return
    gc.collect()  # a learning rate scheduler and its optimizer hold each other
    if (found := _other_of(body, records)) is not None:
        record, owner = found
        raise ValueError(
            f"{record.name} is trained by another {owner}, which is still open: each would undo what the other does. "
            "close() that one before this one is used, or give all parameters to one optimizer"
        )


def _other_of(body: StateBody, records: Iterable[ParamRecord]) -> tuple[ParamRecord, str] | None:
    for other in known_bodies():
        if other is body or other.is_closed or not other.is_own_process:
            continue
        for record in records:
            if (its := other.table.find(record.leaf)) is not None and its.is_placed:
                return record, other.owner
    return None
