"""Begin a step in backward, with the first gradient that is final."""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import local_tensor, version_of
from nvme_offload.offload.devices.device import HOST, Event, is_host, is_reached, queued
from ..layout.flat import PartitionStandIn, flat_grad
from ..layout.master import TILE_NUMEL
from ..rules.rule import UpdateRule
from ..state.body import StepState
from ..state.condition import StepPhase
from ..state.phase import Claims, StepInputs, StepRecord, count_parts
from ..state.slots import SlotRecord
from ..state.table import ParamRecord
from ..telemetry.stats import Meter
from ..updates.whole_params import WholeParams
from .guess import ForGood, Guess, Guessing
from .job import StepJob
from .norm import sums_from_device, sums_on_device, tile_sums
from .scalars import scalars_of
from .schedule import InBackward, forward_order, learnt_early
from .waiting_parameter import let_wait


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

    def leave_rest(self) -> None:
        """Leave what was not taken in to the step, which has it from its parameter. Call it with the worker away."""
        self._arrived.clear()

    def allows(self, slot: SlotRecord) -> bool:
        """Return False until the step before is known to last, and where the guess is wrong."""
        return self._store.durability.may_write and (self.guess is None or self.guess.allows(slot))

    def _sums_of(self, arrived: _Arrived) -> torch.Tensor:
        if arrived.sums is None or arrived.final is None:
            return tile_sums(arrived.grad, self._store.kernels)
        with self._store.mirror.come_after(arrived.final):
            return arrived.sums.cpu()


class EarlyStep:
    """The step that begins in backward, where the section asks for that, from its first gradient to `step()`."""

    def __init__(self, store: StepState, meter: Meter, rule: UpdateRule) -> None:
        self._store = store
        self._meter = meter
        self._rule = rule
        self.is_asked = store.config.overlap.begins_in_backward
        """Whether the section asks for updates in backward; nothing begins there if it does not."""
        self.way = (Guessing if store.config.overlap.needs_durable else ForGood)(store, meter, rule)
        self._groups: Sequence[Mapping[str, Any]] = ()
        self._inbox: Inbox | None = None
        self._found: dict[int, tuple[int, ...]] = {}
        self._num_early: int | None = None

    def take(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take these as the optimizer's groups from now on."""
        self._groups = groups

    @property
    def begins_next(self) -> bool:
        """Whether the next step begins in backward."""
        return self.is_asked and self.way.factor is not None

    @property
    def begun(self) -> StepRecord | None:
        """The step that has begun in backward and is still to come."""
        return self._store.record_in(StepPhase.BEGUN)

    def hand_in(self, record: ParamRecord, leaf: torch.Tensor, may_begin: Callable[[ParamRecord], bool]) -> None:
        """Begin with a gradient that is final, or go on with it. `may_begin` says of which others there will be one."""
        begun = self.begun or self._begin(may_begin)
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
        return self._inbox.sums if self._inbox is not None and self.begun is not None else {}

    @property
    def device(self) -> torch.device:
        """The device that computes the gradients of the step that has begun; the host, if none was handed in."""
        return HOST if self._inbox is None else self._inbox.device

    def check(self, groups: Sequence[Mapping[str, Any]], grads: Mapping[int, torch.Tensor]) -> None:
        """Compare groups and flat gradients with those that subgroups have been updated with since the latest step.

        It raises StateError if a hyperparameter or a gradient has changed; guessed updates are taken back instead.
        """
        if (begun := self.begun) is not None:
            leaves = self._store.table.leaves
            are_same = all(index in grads and _identity_of(leaves[index]) == it for index, it in self._found.items())
            self.way.check(begun, groups, are_same=are_same and self._have_their_sums(grads))

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

    def settled(self, grad_scale: float | None) -> StepRecord | None:
        """Return the step that began in backward; None if there is none, or its guess was wrong and is taken back.

        `grad_scale` is the step's factor, None if it is skipped. It raises StateError for a factor that nobody
        guessed. After an I/O error in taking back, call it again.
        """
        if self.is_asked:
            self.way.settle(self.begun, grad_scale)
        if self._inbox is not None:
            self._inbox.leave_rest()
        begun = self.begun
        if begun is not None and self._store.worker.job is not None:  # no error has stopped it
            self._num_early = learnt_early(begun.done, self._num_early)
        return begun

    def drop(self) -> None:
        """Give up the step that has begun, and keep none of its gradients; see `ForGood.drop`."""
        self.way.drop()
        if self.begun is None:
            self._inbox = None

    def _begin(self, may_begin: Callable[[ParamRecord], bool]) -> StepRecord | None:
        """Begin a step in backward; return None if one has stopped, which `step()` says."""
        store = self._store
        if not store.is_whole and store.record_in(StepPhase.BEHIND) is None:
            return None
        store.wait_for_updates()
        trained = [record for record in store.table.members(self._groups) if record.leaf.requires_grad]
        expected = {record.index for record in trained if may_begin(record)}
        left = {store.blocks.number_of(record.leaf) for record in trained if record.index not in expected}
        factor = self.way.factor
        assert factor is not None
        guess = self.way.begin(self._groups, factor)
        scalars = scalars_of(store, self._rule, self._groups, expected, factor)
        inputs = StepInputs({}, scalars, WholeParams([], [], torch.float32))
        claims = Claims(way_back=None if guess is None else self.way.drop)
        begun = StepRecord(
            store.owner, StepPhase.BEGUN, self._meter.steps + 1, [], inputs, way_back=store.way_back, claims=claims
        )

        def begins(slot: SlotRecord) -> bool:
            others = {run.param for run in slot.subgroup.runs} - expected
            return slot.can_be_behind and not any(store.table[index].leaf.requires_grad for index in others)

        order = list(filter(begins, store.slots_of(expected)))
        inbox = Inbox(store, expected, order, guess, left)
        # The last layer's subgroups come first, and those that this forward has not used last.
        backward = forward_order(order, store.uses.ranks)[::-1]
        backward.sort(key=lambda slot: not any(run.param in store.uses.latest for run in slot.subgroup.runs))
        schedule = InBackward(backward, self._num_early)
        job = StepJob(store, self._meter, begun, schedule, inbox)
        self._found = {}
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
