"""Bytes that cross to and from NVMe in one step, once a run has found its rhythm.

Which block is read again depends on which others are in the staging buffers, and so on what will be needed when. That
is decided in `offload.staging.block_cache`; the same code decides it here, over a tier whose transfers are done at once
and are only counted. What a real drive adds is that a buffer is not free while it is being written: a read more here
and there.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

from nvme_offload.aio_native.engine import Op
from nvme_offload.offload.host.buffer_pool import StagingBuffer
from nvme_offload.offload.staging.block_cache import BlockCache
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.memory_tier import MemoryTier, done_at_once
from nvme_offload.offload.storage.transfer import Transfer

Phase = Literal["forward", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")

MOST_ROUNDS = 4  # micro-batches that are rehearsed: those between the first and the last are alike
WARM_UP_STEPS = 2  # steps until the order is known in both directions of the update
COUNTED_STEPS = 2  # steps that are counted, one in each direction of the update


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written; sums and multiples of them are of the same kind."""

    read: float = 0
    written: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written)

    def __mul__(self, factor: float) -> Traffic:
        return Traffic(self.read * factor, self.written * factor)


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that an average step moves, by phase."""

    phases: dict[Phase, Traffic] = field(default_factory=dict)

    @property
    def total(self) -> Traffic:
        """Bytes that all phases move together."""
        return sum(self.phases.values(), Traffic())


def of_parameters(
    sizes: Sequence[int],
    num_buffers: int,
    micro_batches: int,
    visits: Sequence[int],
    *,
    has_root: bool,
    twice: bool,
    updated_in: Phase = "update",
    frozen: Collection[int] = (),
) -> StepTraffic:
    """Traffic of the parameters: gathered in forward and backward, updated in the step but for `frozen` blocks.

    `sizes` are of blocks in the order of the forward, `visits` the block of each subgroup in the order of the update's
    first direction. `has_root`: the first block is of what is in no layer, gathered first of all, also in backward.
    `twice`: backward gathers again what forward freed (ZeRO stage 3). `updated_in`: blocks are updated in the step,
    where the first forward gathers them, or the last backward.
    """
    if micro_batches > MOST_ROUNDS:
        found = partial(of_parameters, has_root=has_root, twice=twice, updated_in=updated_in, frozen=frozen)
        return _of_many(micro_batches, lambda fewer: found(sizes, num_buffers, fewer, visits))
    rehearsal = _Rehearsal("parameters", sizes, num_buffers)
    forward = range(len(sizes))
    backward = [*forward[:has_root], *reversed(forward[has_root:])] if twice else []

    def train() -> None:
        for micro_batch in range(micro_batches):
            first, last = micro_batch == 0, micro_batch == micro_batches - 1
            for number in forward:
                rehearsal.use(number, "forward", change=updated_in == "forward" and first and number not in frozen)
            for number in backward:
                rehearsal.use(number, "backward", change=updated_in == "backward" and last and number not in frozen)

    return rehearsal.of_steps(train, visits if updated_in == "update" else (), changes=True)


def of_gradients(
    sizes: Sequence[int], num_buffers: int, micro_batches: int, visits: Sequence[int], *, updated_in: Phase = "update"
) -> StepTraffic:
    """Traffic of the partitions: put down in backward, added to by later micro-batches, read in the update.

    Arguments as in `of_parameters`.
    """
    if micro_batches > MOST_ROUNDS:
        return _of_many(
            micro_batches, lambda fewer: of_gradients(sizes, num_buffers, fewer, visits, updated_in=updated_in)
        )
    arrived: set[int] = set()
    rehearsal = _Rehearsal("gradients", sizes, num_buffers, arrived)

    def train() -> None:
        arrived.clear()  # zero_grad
        for _ in range(micro_batches):
            for number in reversed(range(len(sizes))):
                rehearsal.use(number, "backward", change=True, load=number in arrived)
                arrived.add(number)

    if updated_in == "backward":  # in memory, where they stay
        return StepTraffic()
    return rehearsal.of_steps(train, visits, changes=False, behind=updated_in == "forward")


def _of_many(micro_batches: int, of: Callable[[int], StepTraffic]) -> StepTraffic:
    """Return the traffic of many micro-batches from that of the most that are rehearsed, and of one less."""
    most, fewer, more = of(MOST_ROUNDS), of(MOST_ROUNDS - 1), micro_batches - MOST_ROUNDS
    return StepTraffic(
        {phase: moved + (moved + fewer.phases[phase] * -1) * more for phase, moved in most.phases.items()}
    )


class _Rehearsal:
    """Blocks in a cache of which nothing but the decisions is real.

    With `arrived` only these are read ahead, and one is taken out when an update has needed it for the last time.
    """

    def __init__(self, kind: str, sizes: Sequence[int], num_buffers: int, arrived: set[int] | None = None) -> None:
        self.phase: Phase = "forward"  # the phase that transfers are counted to which begin now
        self._arrived = arrived
        self._read: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        self._written: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        self._sizes = sizes
        self.cache = BlockCache(
            _PaperTier(self._count),
            kind,
            num_buffers,
            is_needed=lambda block: arrived is None or block.index in arrived,
        )
        for block in self.cache.add([(f"block {number}", mmap.PAGESIZE) for number in range(len(sizes))]):
            with self.cache.holding(block, change=True, load=False):
                pass

    def use(self, number: int, phase: Phase, *, change: bool = False, load: bool = True) -> None:
        """Use a block as forward and backward do."""
        self.phase = phase
        block = self.cache.blocks[number]
        self.cache.order.note(number)
        with self.cache.holding(block, change=change, load=load):
            pass

    def of_steps(
        self, train: Callable[[], None], visits: Sequence[int], *, changes: bool, behind: bool = False
    ) -> StepTraffic:
        """Go through some steps, and count the last of them. `behind`: updates are in the forward that follows."""
        order = sorted(visits) if behind else list(visits)
        try:
            for step in range(WARM_UP_STEPS + COUNTED_STEPS):
                if step == WARM_UP_STEPS:
                    self._read, self._written = dict.fromkeys(PHASES, 0), dict.fromkeys(PHASES, 0)
                if behind:
                    self._update(order, "forward", changes=changes)
                train()
                self.cache.order.begin_step(order)
                if not behind:
                    self._update(order, "update", changes=changes)
                    order.reverse()
                self.cache.order.end_step(order)
        finally:
            self.cache.close()
        counted = {phase: Traffic(self._read[phase], self._written[phase]) for phase in PHASES}
        return StepTraffic({phase: traffic * (1 / COUNTED_STEPS) for phase, traffic in counted.items()})

    def _update(self, order: Sequence[int], phase: Phase, *, changes: bool) -> None:
        self.phase, cache = phase, self.cache
        for number in order:
            cache.order.note_in_step(number)
            if self._arrived is not None and not cache.order.is_next_in_step(number):
                self._arrived.discard(number)
            with cache.holding(cache.blocks[number], change=changes):
                pass

    def _count(self, op: Op, number: int) -> None:
        (self._read if op is Op.READ else self._written)[self.phase] += self._sizes[number]


class _PaperTier(MemoryTier):
    """A tier that counts what would be moved, and is done at once. Extents are numbered, in no file and no memory."""

    name = "paper"

    def __init__(self, count: Callable[[Op, int], None]) -> None:
        super().__init__()
        self._count = count

    def _region(self, size_bytes: int) -> Any:
        return SimpleNamespace(size_bytes=size_bytes)  # it stands for memory

    def memory(self, extent: Extent) -> Any:
        """None: blocks pass through staging buffers."""
        return None

    def read(self, extent: Extent, buffer: StagingBuffer, **named: Any) -> Transfer[StagingBuffer]:
        """Count it."""
        return self._move(Op.READ, extent, buffer)

    def write(self, extent: Extent, buffer: StagingBuffer, **named: Any) -> Transfer[StagingBuffer]:
        """Count it."""
        return self._move(Op.WRITE, extent, buffer)

    def _move(self, op: Op, extent: Extent, buffer: StagingBuffer) -> Transfer[StagingBuffer]:
        self._count(op, extent.stripes[0].offset)
        return done_at_once(op, buffer)
