"""Begin updates in backward, as gradients become final."""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import base_of, local_tensor, num_backwards_left, version_of
from nvme_offload.offload.devices.device import HOST, Event, is_host, is_reached, queued
from nvme_offload.offload.errors import StateError
from nvme_offload.optim.layout.flat import PartitionStandIn, flat_grad
from nvme_offload.optim.layout.master import TILE_NUMEL
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.state.body import StepState
from nvme_offload.optim.state.condition import StepPhase
from nvme_offload.optim.state.phase import Claims, StepInputs, StepRecord, count_parts
from nvme_offload.optim.state.slots import SlotRecord
from nvme_offload.optim.state.table import ParamRecord
from nvme_offload.optim.step.guess import Guess, Guesses
from nvme_offload.optim.step.hiding import Schedules
from nvme_offload.optim.step.job import StepJob
from nvme_offload.optim.step.norm import sums_from_device, sums_on_device, tile_sums
from nvme_offload.optim.step.scalars import scalars_of
from nvme_offload.optim.step.schedule import InBackward, forward_order, learnt_early
from nvme_offload.optim.step.waiting_parameter import let_read, let_wait
from nvme_offload.optim.telemetry.stats import Meter
from nvme_offload.optim.tiers.parts import parts_of
from nvme_offload.optim.updates.whole_params import WholeParams


class StepCommits(Protocol):
    """A durable run has commits, which make its steps last."""

    @property
    def is_settled(self) -> bool:
        """Whether it is known of the step before that it lasts."""

    def settle(self) -> object:
        """Know it. Collective where several ranks step together."""

    def explain(self, error: BaseException) -> None:
        """Add to an error that a step ends with what it means for the run."""


class Backward(NamedTuple):
    """The backward that runs, or runs next."""

    is_last: bool
    """Whether it is the last one of its step for the parameters that it comes to."""
    by_turns: bool = False
    """Whether it goes block by block, and `FinalGradients.catch_up` is called after each."""


class _Arrived(NamedTuple):
    """A flat gradient; of one on a device its tile sums there, too, and a mark behind both."""

    param: int
    grad: torch.Tensor
    sums: torch.Tensor | None
    final: Event | None


class Inbox:
    """Carries gradients that are final from the thread that runs backward to the worker.

    Args:
        expected: indices of parameters that may get a gradient. A subgroup waits for all of its own.
        order: subgroups that may be updated in backward.
        guess: None where the step is certain.
        left: blocks of which `step()` needs gradients, too: of whole matrices.
    """

    def __init__(
        self,
        store: StepState,
        expected: Collection[int],
        order: Sequence[SlotRecord],
        guess: Guess | None,
        left: Collection[int],
    ) -> None:
        self.guess, self.left = guess, left
        self.sums: dict[int, torch.Tensor] = {}
        """Sums of squares of the tiles of each gradient that was taken, by index."""
        self.device = HOST
        """The device of the gradients that were handed in."""
        self._store = store
        self._arrived: deque[_Arrived] = deque()
        self._missing = {slot: {run.param for run in slot.subgroup.runs} & set(expected) for slot in order}
        self._num_parts = count_parts(store.slots_of(expected))  # some may have to wait for the step itself
        self._slots: dict[int, list[SlotRecord]] = {}
        for slot, params in self._missing.items():
            for index in params:
                self._slots.setdefault(index, []).append(slot)

    def put(self, index: int, grad: torch.Tensor) -> None:
        """Hand in a flat gradient. The thread that runs backward calls this.

        A device sums its squares right behind what computes it: on another stream that would wait for a device that
        backward keeps busy, a kernel at a time.
        """
        sums = mark = None
        if not is_host(grad.device):
            sums = sums_on_device(grad, self._store.means.fused)
            mark, self.device = queued(grad.device), grad.device
        self._arrived.append(_Arrived(index, grad, sums, mark))
        self._store.worker.wake()

    def take_in(self, record: StepRecord, *, waits: bool = True) -> bool:
        """Add the oldest gradient to the step; return whether there was one. ValueError: it is not finite.

        `waits`: for a device that has yet to compute it. The host hands in gradients long before.
        """
        if not self._arrived or not (waits or is_reached(self._arrived[0].final)):
            return False
        arrived = self._arrived.popleft()
        index, grad = arrived.param, arrived.grad
        self.sums[index] = sums = self._sums_of(arrived)
        if self.guess is not None:
            self.guess.see(sums)
        elif not bool(sums.isfinite().all()):
            if record.done:
                record.become(StepPhase.SPOILT)
            raise ValueError(
                f"the gradient of {self._store.table[index].name} is not finite, and with skip_non_finite = false that "
                "is an error"
            )
        ready = []
        for slot in self._slots.get(index, ()):
            self._missing[slot].discard(index)
            if not self._missing[slot]:
                ready.append(slot)
        record.take_on(index, grad, self._num_parts[index], ready)
        return True

    def allows(self, slot: SlotRecord) -> bool:
        """Return False until the step before is known to last, and where the guess is wrong."""
        return self._store.durability.may_write and (self.guess is None or self.guess.allows(slot))

    def _sums_of(self, arrived: _Arrived) -> torch.Tensor:
        if arrived.sums is None or arrived.final is None:
            return tile_sums(arrived.grad, self._store.kernels)
        with self._store.mirror.come_after(arrived.final):
            return arrived.sums.cpu()


class _HeldBack:
    """Gradients that were added up in one tensor, `whole`, to which more may be added."""

    def __init__(self, whole: torch.Tensor | None = None) -> None:
        self.whole = whole
        self.records: dict[torch.Tensor, ParamRecord] = {}


class FinalGradients:
    """Notices when a gradient is final, and has its parameter's subgroups updated.

    Args:
        commits: of a durable run on several ranks: none of them writes before all know of the latest one.
    """

    def __init__(
        self, store: StepState, meter: Meter, rule: UpdateRule, schedules: Schedules, commits: StepCommits | None = None
    ) -> None:
        self.backward = Backward((store.config.gradient_accumulation_steps or 1) == 1)
        self._store = store
        self._meter = meter
        self._rule = rule
        self._schedules = schedules
        # What is begun with a wrong guess, or would be an error because of what came after backward, is taken back.
        self._guesses = Guesses() if (asked := store.config.overlap) is not None and asked.needs_durable else None
        self._commits = commits if self.is_asked else None
        self._groups: Sequence[Mapping[str, Any]] = ()
        self._begun_with: list[dict[str, Any]] = []
        self._inbox: Inbox | None = None
        self._found: dict[int, tuple[int, ...]] = {}
        self._is_taken_back = False
        self._hooked: set[int] = set()
        self._places: dict[int, int] = {}
        self._held = _HeldBack()
        self._num_early: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether the section asks for updates in backward; nothing begins there if it does not."""
        return (asked := self._store.config.overlap) is not None and asked.begins_in_backward

    def expect_step(self, backward: Backward) -> None:
        """Know what backward comes next."""
        self.backward = backward
        if self.is_asked:
            self._store.blocks.keep_gathered(backward.by_turns)

    def catch_up(self) -> None:
        """Update what is final in `StepJob.take_turn`. No backward is under way."""
        if not self.is_asked:
            return
        self._hand_in_held()
        worker = self._store.worker
        while self._begun is not None and worker.take_turn():
            pass
        worker.raise_failure()

    def watch(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Look at the gradients of all parameters of these groups when they arrive."""
        if not self.is_asked:
            return
        self._groups = groups
        for param in (param for group in groups for param in group["params"]):
            record = self._store.table.of(param)
            if record.index not in self._hooked and param.requires_grad:
                self._hooked.add(record.index)
                param.register_post_accumulate_grad_hook(_hook(weakref.ref(self)))

    @property
    def must_agree(self) -> bool:
        """Whether the ranks must agree that the step before lasts on all of them before an update begins."""
        return self._commits is not None and not self._commits.is_settled

    @property
    def _begins_next(self) -> bool:
        """Whether the next step begins in backward."""
        if self._guesses is None:
            return self.is_asked
        return self._guesses.factor is not None and not self._is_taken_back

    def begins_with(self, slots: Iterable[SlotRecord]) -> bool:
        """Return whether the next step begins in backward with any of these, if that goes as the latest one did."""
        if not self._begins_next:
            return False
        params = (run.param for slot in slots for run in slot.subgroup.runs)
        return any(self._may_begin(self._store.table[index]) for index in params)

    def arrive(self, leaf: torch.Tensor) -> None:
        """Note that a gradient was added to ``leaf.grad``, and hand it in if it is final.

        It raises StateError if the gradient was final before, and an I/O error if what was updated with it cannot be
        taken back.
        """
        store = self._store
        record, parts = store.table.of(leaf), parts_of(leaf)
        whole = self._added_up_in(record, leaf)
        if whole is not self._held.whole:
            self._hand_in_held()
        begun = self._begun
        if begun is not None and record.index in begun.claims.final:
            if self._guess is None:
                way_on = 'one backward before step() (write gradient_accumulation_steps, or overlap_step = "forward")'
                raise StateError(record.name, way_on, "another gradient after the one that was final")
            self.take_back()
            return
        may_begin = self.backward.is_last and self._begins_next and not self.must_agree and self._may_begin(record)
        if store.is_closed or not may_begin:
            return
        # FSDP2 knows of its own units whether backward adds to what has arrived; DDP may still reduce a plain gradient.
        if dist.is_initialized() if parts is None else num_backwards_left(parts.owner):
            return
        if whole is None:
            self._hand_in(record, leaf)
        else:
            self._held = self._held if self._held.whole is whole else _HeldBack(whole)
            self._held.records[leaf] = record

    def _added_up_in(self, record: ParamRecord, leaf: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor in which a gradient was added up with others of its unit; None for one by itself.

        FSDP2 reduces the gradients of a unit into one tensor and, where there were some already, adds to them one by
        one. They share a version, which says that one has changed when another is added to.
        """
        if leaf.grad is None or isinstance(local := local_tensor(leaf.grad), PartitionStandIn):
            return None
        is_old, self._places[record.index] = self._places.get(record.index) == local.data_ptr(), local.data_ptr()
        return base_of(local) if is_old else None

    def _may_begin(self, record: ParamRecord) -> bool:
        blocks = self._store.blocks
        is_own = self.backward.by_turns or not blocks.takes_turns(blocks.number_of(record.leaf))
        return is_own and self._schedules.of(record.index).begins_in_backward

    def _hand_in_held(self) -> None:
        """Hand in the gradients of a unit once the next unit has one. Those of the last unit are left to the step."""
        held = self._held
        self._held = _HeldBack()
        for leaf, record in held.records.items():
            self._hand_in(record, leaf)

    def _hand_in(self, record: ParamRecord, leaf: torch.Tensor) -> None:
        begun = self._begun or self._begin()
        is_in_groups = begun is not None and record.index in begun.inputs.scalars
        grad = flat_grad(leaf, record.layout, record.name) if is_in_groups else None
        if begun is None or grad is None or self._inbox is None or self._store.worker.job is None:
            return  # an error has stopped what began: `step()` says so
        self._found[record.index] = _identity_of(leaf)
        begun.claims.final.add(record.index)
        let_wait([record])
        self._inbox.put(record.index, grad)

    @property
    def sums(self) -> dict[int, torch.Tensor]:
        """Return `Inbox.sums` of the step that has begun."""
        return self._inbox.sums if self._inbox is not None and self._begun is not None else {}

    @property
    def device(self) -> torch.device:
        """The device that computes the gradients of the step that has begun; the host, if none was handed in."""
        return HOST if self._inbox is None else self._inbox.device

    def check(self, groups: Sequence[Mapping[str, Any]], grads: Mapping[int, torch.Tensor]) -> None:
        """Compare groups and flat gradients with those that subgroups have been updated with since the latest step.

        It raises StateError if a hyperparameter or a gradient has changed; guessed updates are taken back instead.
        """
        if not self.is_asked:
            return
        self._held = _HeldBack()
        self._store.blocks.keep_gathered(False)
        if (begun := self._begun) is None:
            return
        leaves = self._store.table.leaves
        are_same = all(index in grads and _identity_of(leaves[index]) == it for index, it in self._found.items())
        are_same = are_same and self._have_their_sums(grads)
        if self._guess is None:
            _check_same_hyperparameters(self._store.owner, self._begun_with, hyperparameters_of(groups))
            if not are_same:
                raise begun.gradients_changed()
            return
        used = begun.inputs.scalars
        is_right = are_same and scalars_of(self._store, self._rule, groups, used.keys(), self._guess.factor) == used
        if self._is_taken_back or not is_right:
            self.take_back()

    def _have_their_sums(self, grads: Mapping[int, torch.Tensor]) -> bool:
        """Sum squares of shards again, in host memory of a first tile: torch's clipping of DTensors has no version."""
        store, table = self._store, self._store.table
        known = {index: sums.view(torch.int64) for index, sums in dict(self.sums).items()}
        asked = {index: grad for index, grad in grads.items() if isinstance(table[index].leaf.grad, DTensor)}
        now = sums_from_device(asked, store.means.fused)
        new = {index: sums for index, sums in now.items() if index not in known}
        self.sums.update(new)  # so that the host waits once
        for index in asked.keys() & known.keys() - now.keys():
            if not isinstance(grad := asked[index], PartitionStandIn):
                now[index] = tile_sums(grad[:TILE_NUMEL], store.kernels)
        pairs = [(now[index].view(torch.int64), known[index]) for index in now.keys() & known]
        return all(torch.equal(sums, before[: len(sums)]) for sums, before in pairs)

    def begun(self, grad_scale: float | None) -> StepRecord | None:
        """Return the step that began in backward; None if there is none, or its guess was wrong and is taken back.

        `grad_scale` is the step's factor, None if it is skipped. It raises StateError for a factor that nobody
        guessed. After an I/O error in taking back, call it again.
        """
        if self._guesses is not None:
            self._judge(self._guesses, grad_scale)
        begun = self._begun
        if begun is not None and self._guesses is None and grad_scale != 1.0:
            way_on = 'gradients without a scale (or overlap_step = "forward")'
            raise StateError(self._store.owner, way_on, f"a scale of {grad_scale}, after updates began in backward")
        if begun is not None and self._store.worker.job is not None:  # no error has stopped it
            self._num_early = learnt_early(begun.done, self._num_early)
        return begun

    def _judge(self, guesses: Guesses, grad_scale: float | None) -> None:
        """Note whether the factor of this step was guessed, and take back what was updated with a wrong guess."""
        guess, is_right = self._guess, None
        if guess is not None and (self._begun is not None or self._is_taken_back):
            is_right = grad_scale == guess.factor and not self._is_taken_back
            if not is_right:
                self.take_back()
            self._meter.count_guess(is_right=is_right)
        self._is_taken_back = False
        guesses.note(grad_scale, is_right=is_right)

    def take_back(self) -> None:
        """Bring guessed updates back to what the latest commit has. The step is still to come.

        If a read fails, call it again, as whoever needs a parameter does.
        """
        store, guess = self._store, self._guess
        with store.worker.kept_away():
            if (begun := self._begun) is None or guess is None:
                return
            self._is_taken_back = True  # first: an exception leaves some of it to be taken back once more
            store.worker.drop_job()
            store.durability.take_back(list(guess.updated), store.pipeline)
            self._meter.count_updates(taken_back=len(guess.updated))
            store.be_whole()
            if isinstance(store.worker.failure, StateError):  # of a gradient that has changed, as it may of a guess
                store.worker.note_failure(None)
            let_read(store.table[index] for index in begun.claims.final)

    def drop_begun(self) -> None:
        """Give up the step that began in backward, and take back what was guessed; else only a checkpoint leads on."""
        store = self._store
        if not self.is_asked:
            return
        self._held = _HeldBack()
        store.blocks.keep_gathered(False)
        if self._guess is not None:
            self.take_back()
            return
        with store.worker.kept_away():
            if (begun := self._begun) is None:
                return
            store.worker.drop_job()
            if begun.done:
                begun.become(StepPhase.SPOILT)
            else:
                store.be_whole()
                let_read(store.table[index] for index in begun.claims.final)

    def _backward_order(self, slots: Sequence[SlotRecord]) -> list[SlotRecord]:
        """Sort the last layer's subgroups first, and those that this forward has not used last."""
        uses = self._store.uses
        order = forward_order(slots, uses.ranks)[::-1]
        return sorted(order, key=lambda slot: not any(run.param in uses.latest for run in slot.subgroup.runs))

    @property
    def _guess(self) -> Guess | None:
        """The guess of the latest step that began in backward."""
        return self._inbox.guess if self._inbox is not None else None

    @property
    def _begun(self) -> StepRecord | None:
        """The step that has begun in backward and is still to come."""
        return self._store.record_in(StepPhase.BEGUN)

    def _begin(self) -> StepRecord | None:
        """Begin a step in backward; return None if one has stopped, which `step()` says."""
        store = self._store
        if not store.is_whole and store.record_in(StepPhase.BEHIND) is None:
            return None
        store.wait_for_updates()
        trained = [record for record in store.table.members(self._groups) if record.leaf.requires_grad]
        expected = {record.index for record in trained if self._may_begin(record)}
        left = {store.blocks.number_of(record.leaf) for record in trained if record.index not in expected}
        factor = 1.0 if self._guesses is None else self._guesses.factor
        assert factor is not None
        guess = None if self._guesses is None else Guess(store, factor, store.config.gradient_clipping)
        scalars = scalars_of(store, self._rule, self._groups, expected, factor)
        inputs = StepInputs({}, scalars, WholeParams([], [], torch.float32))
        claims = Claims(way_back=self.take_back if guess is not None else None)
        begun = StepRecord(
            store.owner, StepPhase.BEGUN, self._meter.steps + 1, [], inputs, way_back=store.way_back, claims=claims
        )

        def may_begin(slot: SlotRecord) -> bool:
            others = {run.param for run in slot.subgroup.runs} - expected
            return slot.can_be_behind and not any(store.table[index].leaf.requires_grad for index in others)

        order = list(filter(may_begin, store.slots_of(expected)))
        inbox = Inbox(store, expected, order, guess, left)
        schedule = InBackward(self._backward_order(order), self._num_early)
        job = StepJob(store, self._meter, begun, schedule, inbox)
        self._begun_with, self._found = hyperparameters_of(self._groups), {}
        store.mirror.begin_step()
        self._inbox = inbox
        store.enter(begun, job)
        return begun


def _identity_of(leaf: torch.Tensor) -> tuple[int, ...]:
    """Return what changes when another gradient takes its place, or when it is changed in place.

    An in-place change of a DTensor counts in the DTensor's version, not in its local part's.
    """
    grad = leaf.grad
    assert grad is not None
    local = local_tensor(grad)
    if isinstance(local, PartitionStandIn):
        return id(local), local.partition.num_changes
    return local.data_ptr(), version_of(grad), version_of(local)


def _hook(of: weakref.ref[FinalGradients]) -> Callable[[torch.Tensor], None]:
    """Return a hook that keeps no optimizer alive."""

    def on_arrival(leaf: torch.Tensor) -> None:
        final = of()
        if final is not None:
            final.arrive(leaf)

    return on_arrival


def hyperparameters_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what the groups hold besides parameters, to be compared later."""
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def _check_same_hyperparameters(
    owner: str, begun: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> None:
    """Raise StateError for a hyperparameter that has changed since updates began in backward."""
    for number, (before, after) in enumerate(zip(begun, now, strict=False)):
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                raise StateError(
                    owner,
                    f"{name} of group {number} as it was when updates began in backward, {before.get(name)!r}",
                    f"{after.get(name)!r}. Set it back and call step(); change it after step() and before backward, "
                    'or write overlap_step = "forward"',
                )
