"""A durable state is rewritten every few steps: what each period costs, and the one that suits a machine.

With a period of k a step writes a base of the k-th part of the state and log entries of the rest; it reads bases and
the entries since. A longer period writes less, reads more and computes more. Which is fastest is up to the drive: one
that writes slower than it reads prefers 3 or 4. Which is allowed is up to how much may be written a day.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from ..config.section import MAX_PERIOD
from ..host.buffer_pool import BufferPool, StagingBuffer
from ..storage.nvme_tier import NvmeTier
from ..storage.transfer import Transfer
from ..units import MiB

SECONDS_PER_DAY = 86_400
USUAL_PERIOD = 4
"""The longest that is chosen for speed: beyond, little is won, and staging buffers and replays grow."""


@dataclass(frozen=True, kw_only=True)
class DurableBytes:
    """The bytes that there are of a state; of all slots together, or of one parameter."""

    state: float
    """The bytes that a step reads and writes without durability."""
    tail: float
    """The bytes that a base has besides: upper halves, fp32 parameters."""
    grad: float
    """The gradients as they are stored: what a log entry has."""
    numel: float = 1

    @property
    def base(self) -> float:
        """Bytes of the bases."""
        return self.state + self.tail


@dataclass(frozen=True)
class PeriodCosts:
    """An average step costs this with a period, in bytes of the same parameters as `DurableBytes`."""

    period: int
    read: float
    written: float
    space: float
    """The space on the drive, see `turns.num_needed`."""
    staging: float
    """The staging buffers, if all of it were in them: the base, its log, and the entry or trailer to write."""
    updates: float
    """Updates of each parameter: its own, and those that are replayed."""


def costs_of(size: DurableBytes, period: int, copies: int = 1) -> PeriodCosts:
    """Return what a period costs with so many copies. Headers and sums are left out: 8 B for each 256 KiB."""
    k = period
    read = size.state + sum(size.base + size.grad * logged for logged in range(1, k))
    entries = (k - 1) * (1 / 2 + 1 / k)
    return PeriodCosts(
        period=k,
        read=read / k,
        written=copies * (size.base + size.grad * (k - 1)) / k,
        space=copies * (size.base * (1 + 1 / k) + size.grad * entries),
        staging=size.base + (size.grad * k if k > 1 else 0),
        updates=(k + 1) / 2,
    )


@dataclass(frozen=True, kw_only=True)
class DurableRates:
    """A machine does this in a second, by the drives that this state is on and the cores that update it."""

    read: float
    write: float
    mixed: float | None = None
    """Bytes of both at once, 1:1, both counted; None: of drives that share time between directions."""
    update: float = math.inf
    """Parameters that the kernel updates."""

    def seconds_of(self, costs: PeriodCosts, numel: float) -> float:
        """Return the seconds of a step that does nothing but move and update: the longer of the two."""
        mixed = self.mixed or 2 / (1 / self.read + 1 / self.write)
        both = min(costs.read, costs.written)
        moving = 2 * both / mixed + (costs.read - both) / self.read + (costs.written - both) / self.write
        return max(moving, numel * costs.updates / self.update)


def auto_period(size: DurableBytes, rates: DurableRates, wear_limit: float | None, copies: int = 1) -> int:
    """Return what "auto" stands for on a machine: the fastest period that keeps the limit of bytes a day.

    A run decides this once, when it begins. Nobody knows its pace then, so it is taken for the highest that is
    possible: steps that do nothing but move and update. Where no period keeps the limit at that pace, it is the one
    that writes least; beyond `USUAL_PERIOD` only where no other is allowed. `size` is that of one parameter,
    and `rates` those of all drives together.
    """
    found = [costs_of(size, period, copies) for period in range(1, MAX_PERIOD + 1)]
    seconds = {costs.period: rates.seconds_of(costs, size.numel) for costs in found}
    per_day = {costs.period: costs.written * SECONDS_PER_DAY / seconds[costs.period] for costs in found}
    limit = math.inf if wear_limit is None else max(wear_limit, min(per_day.values()))
    allowed = [costs for costs in found if per_day[costs.period] <= limit]
    allowed = [costs for costs in allowed if costs.period <= USUAL_PERIOD] or allowed
    shortest = min(seconds[costs.period] for costs in allowed)
    equal = [costs for costs in allowed if seconds[costs.period] <= shortest * (1 + 1e-9)]
    return min(equal, key=lambda costs: (costs.written, costs.period)).period


_PIECES = 8
_PIECE_BYTES = 16 * MiB


def measure_rates(tier: NvmeTier) -> DurableRates:
    """Write some MiB through a tier, all at once, and read them again; the space is free after it.

    A drive with a cache for writes is found faster than it is for hours.
    """
    extents = tier.reserve([_PIECE_BYTES] * _PIECES)
    pool = BufferPool(_PIECES, _PIECE_BYTES)
    try:
        with ExitStack() as leases:
            pairs = [(extent, leases.enter_context(pool.acquire())) for extent in extents]
            writing = _seconds(lambda: [tier.write(*pair, what="a measurement", kind="probe") for pair in pairs])
            reading = _seconds(lambda: [tier.read(*pair, what="a measurement", kind="probe") for pair in pairs])
    finally:
        pool.close()
        for extent in extents:
            tier.free(extent)
    moved = _PIECES * _PIECE_BYTES
    return DurableRates(read=moved / reading, write=len(tier.space.copies.written) * moved / writing)


def _seconds(start: Callable[[], list[Transfer[StagingBuffer]]]) -> float:
    begun = time.perf_counter()
    for transfer in start():
        transfer.wait()
    return time.perf_counter() - begun
