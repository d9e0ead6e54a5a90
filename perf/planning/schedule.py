"""How long an iteration takes, from what its pieces take: a model of events.

Computing goes through the groups that are gathered together: forward, then backward the other way. One drive reads and
writes the state of subgroups, one transfer at a time, reads first. One worker updates subgroups. A subgroup is read
into a staging buffer, of which there are few, and holds it until it is written; afterwards the buffer is given up for
another one only where nothing sooner wanted is in it. What differs is when this may happen (``overlap_step``):

- ``off``: all of it in ``step()``; the last writes go on under the next forward. Steps alternate in direction, and
  begin with what the step before left in the buffers.
- ``forward``: updates from the end of backward on, in the order of the next forward, which waits for its own subgroups
  only. Reads at any time.
- ``backward``: as many subgroups as the drive can do during backward are updated as soon as their gradient is final,
  the last first; the others as with ``forward``.
- ``speculate``: the same, where every guess is right.

Nothing else costs time here, so a run cannot be much quicker: a bound to measure schedules against, and a prediction.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

from nvme_offload.optim.stats import CLOSE, Limit
from nvme_offload.optim.step.schedule import OverlapStep

OVERLAPS: tuple[OverlapStep, ...] = ("off", "forward", "backward", "speculate")
IN_BACKWARD: tuple[OverlapStep, ...] = ("backward", "speculate")
Part = Literal["forward", "backward", "step"]
PARTS: tuple[Part, ...] = ("forward", "backward", "step")

_WARM_UP_ITERATIONS, _COUNTED_ITERATIONS = 2, 4  # the second is even: directions alternate
_SAME_MOMENT = 1e-12


@dataclass(frozen=True, kw_only=True)
class GroupTime:
    """Seconds of one micro-batch in a group that is gathered together."""

    forward: float
    backward: float
    forward_nvme: float = 0.0
    """Seconds that the drive moves parameters and gradients of the group for its forward, which waits for that."""
    backward_nvme: float = 0.0
    forward_pcie: float = 0.0
    """Seconds of the copies between host and device beside its forward: those of the next group go on while this one
    computes."""
    backward_pcie: float = 0.0

    def seconds(self, part: Part) -> float:
        """Seconds of a pass when the drive is not waited for."""
        if part == "forward":
            return max(self.forward, self.forward_pcie)
        return max(self.backward, self.backward_pcie)


@dataclass(frozen=True, kw_only=True)
class SubgroupTime:
    """Seconds of one update of a subgroup."""

    first: int
    """The first group in the order of the forward that it has parameters of: there its gradient is final last."""
    last: int
    read: float
    update: float
    write: float
    pcie: float = 0.0
    """Seconds that its parameters and gradients take to the host, or back: one comes, one is updated, one leaves."""

    @property
    def busy(self) -> float:
        """Seconds from one update to the next when the drive is not waited for."""
        return max(self.update, self.pcie)

    @property
    def is_resident(self) -> bool:
        """Whether its state is in host memory for good."""
        return not (self.read or self.write)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an iteration has to do."""

    groups: tuple[GroupTime, ...]
    """In the order of the forward. Backward goes the other way."""
    subgroups: tuple[SubgroupTime, ...]
    """In the order of the forward."""
    num_buffers: int
    """Staging buffers of the optimizer's state."""
    micro_batches: int = 1
    tier_ahead: int = 1
    """Groups whose parameters are read before they are needed."""

    @property
    def compute(self) -> float:
        """Seconds of all forwards and backwards."""
        return self.micro_batches * sum(group.forward + group.backward for group in self.groups)

    @property
    def nvme(self) -> float:
        """Seconds in which the drive moves everything once each way."""
        tiers = self.micro_batches * sum(group.forward_nvme + group.backward_nvme for group in self.groups)
        return tiers + sum(subgroup.read + subgroup.write for subgroup in self.subgroups)

    @property
    def update(self) -> float:
        """Seconds of all updates."""
        return sum(subgroup.update for subgroup in self.subgroups)

    @property
    def pcie(self) -> float:
        """Seconds of all copies between host and device, of the busier direction each time."""
        passes = self.micro_batches * sum(group.forward_pcie + group.backward_pcie for group in self.groups)
        return passes + sum(subgroup.pcie for subgroup in self.subgroups)

    @property
    def ideal(self) -> float:
        """Seconds of an iteration in which everything overlaps."""
        return max(self.compute, self.nvme, self.update, self.pcie)


@dataclass(frozen=True, kw_only=True)
class IterationTime:
    """Seconds of one iteration, and where they go."""

    work: Work
    overlap_step: OverlapStep
    seconds: float
    waiting: dict[Part, float]
    """Seconds in which computing stands still: in forward, in backward, in ``step()``."""

    @property
    def share_of_ideal(self) -> float:
        """Seconds of the ideal iteration over those of this one. More than 1 where buffers keep much of the state."""
        return self.work.ideal / self.seconds

    @property
    def limit(self) -> Limit | Literal["PCIe"]:
        """What would have to be more or faster for a shorter iteration."""
        work = self.work
        if work.pcie > max(work.compute, work.nvme, work.update):
            return "PCIe"
        if work.update >= max(work.compute, work.nvme):
            return "kernel"
        if self.share_of_ideal >= CLOSE:
            return "drive" if work.nvme > work.compute else "compute"
        return "drive" if self.overlap_step == "off" else "staging buffers"

    @property
    def parts(self) -> dict[Part, float]:
        """Seconds of forward, backward and ``step()``, waiting included."""
        batches, groups = self.work.micro_batches, self.work.groups
        computing: dict[Part, float] = {
            "forward": batches * sum(group.seconds("forward") for group in groups),
            "backward": batches * sum(group.seconds("backward") for group in groups),
            "step": 0.0,
        }
        return {part: computing[part] + self.waiting[part] for part in PARTS}

    def to_dict(self) -> dict[str, Any]:
        """The times in plain types, for JSON."""
        return {
            "overlap_step": self.overlap_step,
            "seconds": self.seconds,
            "share_of_ideal": self.share_of_ideal,
            "limit": self.limit,
            "compute": self.work.compute,
            "nvme": self.work.nvme,
            "update": self.work.update,
            "pcie": self.work.pcie,
            "parts": self.parts,
            "waiting": self.waiting,
        }


def iteration_time(work: Work, overlap_step: OverlapStep) -> IterationTime:
    """Go through some iterations and give the mean of the last of them."""
    model = _Model(work, overlap_step)
    model.run(_WARM_UP_ITERATIONS + _COUNTED_ITERATIONS)
    (begun, before), (ended, after) = model.ends[_WARM_UP_ITERATIONS - 1], model.ends[-1]
    return IterationTime(
        work=work,
        overlap_step=overlap_step,
        seconds=(ended - begun) / _COUNTED_ITERATIONS,
        waiting={part: (after[part] - before[part]) / _COUNTED_ITERATIONS for part in PARTS},
    )


class _Drive:
    """Moves one thing at a time; what computing waits for first, then reads, then writes."""

    def __init__(self) -> None:
        self.is_busy = False
        self._queues: tuple[deque[tuple[float, Callable[[], None]]], ...] = (deque(), deque(), deque())

    def ask(self, rank: int, seconds: float, then: Callable[[], None]) -> None:
        self._queues[rank].append((seconds, then))

    def take(self) -> tuple[float, Callable[[], None]] | None:
        """What to do now, if anything."""
        waiting = () if self.is_busy else [queue for queue in self._queues if queue]
        return waiting[0].popleft() if waiting else None


_FOR_COMPUTE, _READ, _WRITE = range(3)


class _Model:
    """The simulation. Whatever happens is followed by `_react`, which begins all that can begin now."""

    def __init__(self, work: Work, overlap_step: OverlapStep) -> None:
        self.ends: list[tuple[float, dict[Part, float]]] = []
        """End of each iteration, and the seconds waited by then."""
        self._work, self._overlap = work, overlap_step
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._drive = _Drive()
        self._is_updating = False
        self._waited: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        numbers = range(len(work.subgroups))
        self._order = list(numbers)
        self._of_group: list[list[int]] = [[] for _ in work.groups]
        self._final_with: list[list[int]] = [[] for _ in work.groups]
        for i, subgroup in enumerate(work.subgroups):
            self._final_with[subgroup.first].append(i)
            for group in range(subgroup.first, subgroup.last + 1):
                self._of_group[group].append(i)
        self._held: dict[int, None] = {}
        """Subgroups that have a staging buffer, the one that has it longest first."""
        self._moving: set[int] = set()
        """Those of them that are being read or written."""
        self._todo: dict[int, None] = {}
        """What this step has to update, in order."""
        self._ready: set[int] = set()
        """What may be updated: the gradient is known, and what it is multiplied by."""
        self._in_backward: set[int] = set()
        """What is to be updated while the backward under way goes on."""
        self._done_early: set[int] = set()
        """What it has updated."""
        self._of_tiers = self._seconds_of_tiers()
        """Seconds of the drive for each pass through a group, in the order of an iteration; none without such tiers."""
        self._num_passes = self._num_asked = self._num_arrived = 0

    def _seconds_of_tiers(self) -> list[float]:
        forward = [group.forward_nvme for group in self._work.groups]
        backward = [group.backward_nvme for group in reversed(self._work.groups)]
        return (forward + backward) * self._work.micro_batches if any(forward + backward) else []

    def run(self, iterations: int) -> None:
        """Simulate so many iterations."""
        training = self._train(iterations)
        wanted: Callable[[], bool] | None = None
        computing = True

        def go_on() -> None:
            nonlocal wanted, computing
            wanted = None
            following = next(training, None)
            if following is None:
                computing = False
            elif callable(following):
                wanted = following
            else:
                self._after(following, go_on)

        go_on()
        while computing:
            self._react()
            while wanted is not None and wanted():
                go_on()
                self._react()
            if computing:
                self._advance()

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now + seconds, self._num_events, then))

    def _advance(self) -> None:
        """Go to the next moment at which anything happens, and do all of it."""
        self._now = self._events[0][0]
        while self._events and self._events[0][0] <= self._now + _SAME_MOMENT:
            heapq.heappop(self._events)[2]()

    def _train(self, iterations: int) -> Iterator[float | Callable[[], bool]]:
        """What computing does: seconds that it takes, and conditions that it waits for."""
        work, groups = self._work, range(len(self._work.groups))
        for number in range(iterations):
            self._num_passes = self._num_asked = self._num_arrived = 0
            for micro_batch in range(work.micro_batches):
                for group in groups:
                    if not micro_batch:
                        yield from self._wait("forward", partial(self._is_updated, group))
                    yield from self._pass("forward", group)
                is_last = micro_batch == work.micro_batches - 1
                if is_last:
                    self._begin_last_backward()
                for group in reversed(groups):
                    yield from self._pass("backward", group)
                    if is_last and self._overlap in IN_BACKWARD:
                        self._ready |= self._in_backward.intersection(self._final_with[group])
            self._step(number)
            if self._overlap == "off":
                yield from self._wait("step", lambda: not self._todo)
            self.ends.append((self._now, self._waited.copy()))

    def _is_updated(self, group: int) -> bool:
        return not any(i in self._todo for i in self._of_group[group])

    def _wait(self, part: Part, until: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        start = self._now
        yield until
        self._waited[part] += self._now - start

    def _pass(self, part: Part, group: int) -> Iterator[float | Callable[[], bool]]:
        """Compute a group, for which its own parameters must be there; those of the next ones are read meanwhile."""
        number, self._num_passes = self._num_passes, self._num_passes + 1
        last = min(number + self._work.tier_ahead, len(self._of_tiers) - 1)
        for ahead in range(self._num_asked, last + 1):
            self._drive.ask(_FOR_COMPUTE, self._of_tiers[ahead], self._count_arrival)
        self._num_asked = max(self._num_asked, last + 1)
        if self._of_tiers:
            yield from self._wait(part, lambda: self._num_arrived > number)
        yield self._work.groups[group].seconds(part)

    def _count_arrival(self) -> None:
        self._num_arrived += 1

    def _begin_last_backward(self) -> None:
        """With ``backward``: choose what will be updated in it, as much as the drive can do meanwhile."""
        if self._overlap not in IN_BACKWARD:
            return
        left = sum(group.seconds("backward") for group in self._work.groups)
        for i in reversed(self._order):
            subgroup = self._work.subgroups[i]
            left -= max(subgroup.read + subgroup.write, subgroup.busy)
            if left < -_SAME_MOMENT:
                break
            self._in_backward.add(i)
        last_first = [i for i in reversed(self._order) if i in self._in_backward]
        self._todo = dict.fromkeys([*last_first, *self._order])

    def _step(self, number: int) -> None:
        """The norm is known: what is left may be updated."""
        if self._overlap == "off":
            self._todo = dict.fromkeys(self._order if number % 2 == 0 else reversed(self._order))
        elif self._overlap == "forward":
            self._todo = dict.fromkeys(self._order)
        self._ready = set(self._todo)
        self._in_backward, self._done_early = set(), set()

    def _react(self) -> None:
        self._read_ahead()
        self._update()
        if (job := self._drive.take()) is not None:
            seconds, then = job
            self._drive.is_busy = True

            def done() -> None:
                self._drive.is_busy = False
                then()

            self._after(seconds, done)

    def _expected(self) -> Iterator[int]:
        """What will be updated, the next one first."""
        yield from self._todo
        if self._overlap != "off":
            following = self._order if self._overlap == "forward" else reversed(self._order)
            yield from (i for i in following if i not in self._todo and i not in self._done_early)

    def _window(self) -> list[int]:
        """As many of the next ones that pass through buffers as there are buffers."""
        moving = (i for i in self._expected() if not self._work.subgroups[i].is_resident)
        return list(islice(moving, self._work.num_buffers))

    def _read_ahead(self) -> None:
        window = self._window()
        for i in window:
            if i in self._held:
                continue
            if len(self._held) >= self._work.num_buffers and not self._evict_outside(window):
                return
            self._held[i] = None
            self._move(_READ, i, self._work.subgroups[i].read)

    def _evict_outside(self, window: list[int]) -> bool:
        for i in self._held:
            if i not in self._moving and i not in window:
                del self._held[i]
                return True
        return False

    def _move(self, rank: int, i: int, seconds: float) -> None:
        self._moving.add(i)
        self._drive.ask(rank, seconds, lambda: self._moving.discard(i))

    def _update(self) -> None:
        if self._is_updating or (i := self._next_update()) is None:
            return
        self._is_updating = True

        def done() -> None:
            self._is_updating = False
            del self._todo[i]
            self._ready.discard(i)
            if i in self._in_backward:
                self._done_early.add(i)
            if not self._work.subgroups[i].is_resident:
                self._move(_WRITE, i, self._work.subgroups[i].write)

        self._after(self._work.subgroups[i].busy, done)

    def _next_update(self) -> int | None:
        """What is there and may be updated. In ``step()`` only the next in order; otherwise the first within reach."""
        reach = 0
        for i in self._todo:
            is_there = self._work.subgroups[i].is_resident or (i in self._held and i not in self._moving)
            if is_there and i in self._ready:
                return i
            reach += not self._work.subgroups[i].is_resident
            if self._overlap == "off" or reach > self._work.num_buffers:
                return None
        return None
