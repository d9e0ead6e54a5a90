"""A model of events tells how long an iteration takes, from what its pieces take.

Computing goes through the groups that are gathered together: forward, then backward the other way. One drive reads and
writes the state of subgroups, one transfer at a time. One worker updates subgroups. Here are durations and events
alone: what is read, written, given up and updated next is said by the functions that a run asks
(`optim.step.schedule`, `optim.state.visits`), of subgroups that are numbers. With ``speculate`` every guess is right.

Nothing else costs time here, so a run cannot be much quicker: a bound to measure schedules against, and a prediction.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count, islice

from nvme_offload.offload.config.overlap import OVERLAPS, OverlapStep
from nvme_offload.offload.staging.mover import leaving
from nvme_offload.optim.state.visits import may_write, window_of
from nvme_offload.optim.step.schedule import (
    LOOK_AHEAD,
    Behind,
    InBackward,
    Schedule,
    ahead,
    first_of_next,
    in_direction,
    learnt_early,
    next_update,
)
from .iteration import PARTS, IterationTime, Part, Work

_WARM_UP, _FEWEST, _MOST = 2, 4, 6  # iterations that do not count, and iterations; even, where directions alternate
_SAME_MOMENT, _SAME = 1e-12, 1e-9


def iteration_time(work: Work, overlap_step: OverlapStep) -> IterationTime:
    """Go through some iterations and give the mean of the last of them."""
    (begun, before, _), (ended, after, _), count = _ends(work, overlap_step)
    return IterationTime(
        work=work,
        overlap_step=overlap_step,
        seconds=(ended - begun) / count,
        waiting={part: (after[part] - before[part]) / count for part in PARTS},
    )


def reads_of(work: Work, overlap_step: OverlapStep) -> dict[int, float]:
    """Return how often an average iteration reads the state of each subgroup that it does not find in a buffer."""
    (*_, before), (*_, after), count = _ends(work, overlap_step)
    return {i: (reads - before[i]) / count for i, reads in after.items()}


_End = tuple[float, dict[Part, float], Counter[int]]
"""An iteration ended then; so many seconds were waited in each part by then, and each subgroup was read so often."""


@lru_cache(maxsize=8)  # schedules that come to the same, and a section that was compared before it is planned
def _ends(work: Work, overlap_step: OverlapStep) -> tuple[_End, _End, int]:
    """Return the end of the last iteration that does not count, that of the last one, and how many count."""
    model = _Model(work, overlap_step)
    model.run(_MOST)
    return model.ends[_WARM_UP - 1], model.ends[-1], len(model.ends) - _WARM_UP


_Took = tuple[dict[Part, float], float]
"""Seconds that a micro-batch waited in each part, and seconds that it took."""


def _alike(first: _Took | None, second: _Took) -> bool:
    if first is None:
        return False
    pairs = zip((*first[0].values(), first[1]), (*second[0].values(), second[1]), strict=True)
    return all(abs(one - other) <= _SAME * second[1] for one, other in pairs)


class _Clock:
    """A clock knows what will happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), then))

    def advance(self) -> None:
        """Go to the next moment at which anything happens, and do all of it."""
        self.now = self._events[0][0]
        while self._events and self._events[0][0] <= self.now + _SAME_MOMENT:
            heapq.heappop(self._events)[2]()

    def skip(self, seconds: float) -> None:
        """Let time go by in which all that happens is what has happened before."""
        self.now += seconds
        self._events = [(moment + seconds, number, then) for moment, number, then in self._events]


class _Buffers:
    """The staging buffers and what is in them, and the drive, which moves one thing at a time."""

    def __init__(self, work: Work, after: Callable[[float, Callable[[], None]], None]) -> None:
        self.residents: dict[int, None] = {}  # subgroups that have a buffer, the one that has it longest first
        self.here = {i for i, subgroup in enumerate(work.subgroups) if not (subgroup.read or subgroup.write)}
        """Subgroups whose state is in memory, with nothing under way and nothing to be written."""
        self._at_home = frozenset(self.here)
        self._work, self._after = work, after
        self._most = min(work.num_buffers, len(work.subgroups) - len(self.here))
        self.reads = Counter[int]()  # each was read so often
        self._num_moving = 0
        self._changed: dict[int, None] = {}  # subgroups that are updated, and neither written nor being written
        self._urgent: deque[tuple[float, Callable[[], None]]] = deque()
        self._asked: deque[tuple[float, Callable[[], None]]] = deque()
        self._is_busy = False

    @property
    def is_idle(self) -> bool:
        """Whether no state is on its way, nor has to be."""
        return not (self._num_moving or self._changed)

    @property
    def has_room(self) -> bool:
        """Whether there is a buffer for another subgroup, or one that may leave its own."""
        return len(self.residents) < self._most or len(self.here) > len(self._at_home)

    def read_ahead(self, order: Iterable[int]) -> None:
        window = window_of(order, self._work.num_buffers, lambda i: i not in self._at_home)
        for i in window:
            if i in self.residents:
                continue
            if len(self.residents) >= self._work.num_buffers:
                left = leaving(self.residents, window, self.here.__contains__)
                if left is None:
                    return
                del self.residents[left]
                self.here.remove(left)
            self.residents[i] = None
            self.reads[i] += 1
            self._move(i, self._work.subgroups[i].read)

    def begin_change(self, i: int) -> None:
        if i not in self._at_home:
            self.here.remove(i)

    def end_change(self, i: int) -> None:
        if i not in self._at_home:
            self._changed[i] = None

    def write(self, *, reads_first: bool) -> None:
        for i in tuple(self._changed):
            if not may_write(self._num_moving, reads_first=reads_first):
                return
            del self._changed[i]
            self._move(i, self._work.subgroups[i].write)

    def ask(self, seconds: float, then: Callable[[], None]) -> None:
        """Have the drive do what computing waits for: it comes first."""
        self._urgent.append((seconds, then))

    def go_on(self) -> None:
        """Begin the next transfer, where there is one and the drive is idle."""
        waiting = self._urgent or self._asked
        if self._is_busy or not waiting:
            return
        seconds, then = waiting.popleft()
        self._is_busy = True

        def done() -> None:
            self._is_busy = False
            then()

        self._after(seconds, done)

    def _move(self, i: int, seconds: float) -> None:
        def done() -> None:
            self._num_moving -= 1
            self.here.add(i)

        self._num_moving += 1
        self._asked.append((seconds, done))


class _Step:
    """A step has updates: the facts that the run's schedules go by, see `optim.step.schedule.Updates`."""

    def __init__(self, pending: Iterable[int] = ()) -> None:
        self.pending = dict.fromkeys(pending)
        self.updated: set[int] = set()
        self._wanted: Iterable[int] = ()

    def want(self, subgroups: Iterable[int]) -> None:
        """Note that a forward waits for these."""
        self._wanted = subgroups

    def waited_for(self) -> Iterator[int]:
        return (i for i in self._wanted if i in self.pending)

    def update(self, i: int) -> None:
        del self.pending[i]
        self.updated.add(i)


class _Worker:
    """Updates subgroups, inside `step()` or beside what computes."""

    def __init__(self, work: Work, overlap_step: OverlapStep, clock: _Clock) -> None:
        self.step = _Step()
        self.buffers = _Buffers(work, clock.after)
        self._work, self._overlap, self._clock = work, OVERLAPS[overlap_step], clock
        self._order = range(len(work.subgroups))
        self._schedule: Schedule[int] | None = None  # by which it updates; None: updates are inside `step()`, or done
        self._first: Sequence[int] = ()  # the reads for the next step when this one is done
        self._num_early: int | None = None
        self._is_updating = False

    @property
    def is_idle(self) -> bool:
        """Whether the last step is over, and what the next one needs first has been read."""
        return not self.step.pending and not self._is_updating and self.buffers.is_idle

    def begin_in_backward(self) -> None:
        """The last backward begins: what becomes pending from now on is updated in it."""
        self.step, self._schedule = _Step(), InBackward(self._order[::-1], self._num_early)

    def take_step(self, number: int) -> None:
        """The norm is known: what is left may be updated."""
        if not self._overlap.hides:
            self.step = _Step(in_direction(self._order, number))
            return
        begins = self._overlap.begins_in_backward
        done = self.step.updated if begins else set[int]()
        if begins:
            self._num_early = learnt_early(len(done), self._num_early)
        self.step = _Step(i for i in self._order if i not in done)
        self._schedule = Behind(self._order, began_in_backward=bool(done))
        self._first = first_of_next(self._order, begins_in_backward=begins)

    def react(self) -> None:
        """Begin all that can begin now."""
        buffers = self.buffers
        if buffers.has_room:
            buffers.read_ahead(self._upcoming())
        if not (self._is_updating or self.step.pending.keys().isdisjoint(buffers.here)):
            self._update(next_update(self._due(), self.step.pending, buffers.here.__contains__))
        buffers.write(reads_first=self._schedule is not None)
        buffers.go_on()

    def _due(self) -> Iterable[int]:
        """Return subgroups in the order in which they may be updated, some perhaps twice."""
        step, schedule = self.step, self._schedule
        if schedule is None:
            return islice(step.pending, 1)
        if self._work.takes_turns and isinstance(schedule, Behind):
            return step.waited_for()
        return islice(schedule.upcoming(step, list(self.buffers.residents)), LOOK_AHEAD)

    def _upcoming(self) -> Iterable[int]:
        step = self.step
        if self._schedule is not None:
            return ahead(self._schedule, step, list(self.buffers.residents))
        return islice(step.pending, LOOK_AHEAD) if step.pending else self._first

    def _update(self, i: int | None) -> None:
        if i is None:
            return
        self._is_updating = True
        self.buffers.begin_change(i)

        def done() -> None:
            self._is_updating = False
            self.step.update(i)
            self.buffers.end_change(i)
            if isinstance(self._schedule, Behind) and not self.step.pending:
                self._schedule = None

        self._clock.after(max(self._work.subgroups[i].update, self._work.subgroups[i].pcie), done)


class _Model:
    """The simulation. Whatever happens is followed by `_Worker.react`, which begins all that can begin now."""

    def __init__(self, work: Work, overlap_step: OverlapStep) -> None:
        self.ends: list[_End] = []
        self._work, self._overlap = work, OVERLAPS[overlap_step]
        self._clock = _Clock()
        self._worker = _Worker(work, overlap_step, self._clock)
        self._waited: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._of_group: list[list[int]] = [[] for _ in work.groups]
        self._final_with: list[list[int]] = [[] for _ in work.groups]
        for i, subgroup in enumerate(work.subgroups):
            self._final_with[subgroup.first].append(i)
            for group in range(subgroup.first, subgroup.last + 1):
                self._of_group[group].append(i)
        forward = [group.forward_nvme for group in work.groups]
        backward = [group.backward_nvme for group in reversed(work.groups)]
        self._of_tiers = (forward + backward) * work.micro_batches if any(forward + backward) else []
        """Seconds of the drive for each pass through a group, in the order of an iteration; none without such tiers."""
        self._num_passes = self._num_asked = self._num_arrived = 0

    def run(self, iterations: int) -> None:
        """Simulate so many iterations, or fewer where the rest would be the same."""
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
                self._clock.after(following, go_on)

        go_on()
        while computing:
            self._worker.react()
            while wanted is not None and wanted():
                go_on()
                self._worker.react()
            if computing:
                self._clock.advance()

    def _train(self, iterations: int) -> Iterator[float | Callable[[], bool]]:
        """Return what computing does: seconds that it takes, and conditions that it waits for."""
        for number in range(iterations):
            self._num_passes = self._num_asked = self._num_arrived = 0
            micro_batch, before = 0, None
            while micro_batch < self._work.micro_batches:
                begun, waited = self._clock.now, self._waited.copy()
                yield from self._micro_batch(micro_batch)
                took = {part: self._waited[part] - waited[part] for part in PARTS}, self._clock.now - begun
                micro_batch += 1
                if micro_batch > 1 and self._worker.is_idle and _alike(before, took):
                    micro_batch += self._skip(self._work.micro_batches - 1 - micro_batch, *took)
                before = took
            self._worker.take_step(number)
            if not self._overlap.hides:
                yield from self._wait("step", lambda: not self._worker.step.pending)
            self.ends.append((self._clock.now, self._waited.copy(), self._worker.buffers.reads.copy()))
            if len(self.ends) == _FEWEST and self._is_steady():
                return

    def _micro_batch(self, micro_batch: int) -> Iterator[float | Callable[[], bool]]:
        """Go through a micro-batch of a step, the first of which waits for updates; in the last one some may begin."""
        groups, work = range(len(self._work.groups)), self._work
        for group in groups:
            if not micro_batch:
                yield from self._wait_for_updates(group)
            yield from self._pass("forward", group)
        begins = micro_batch == work.micro_batches - 1 and self._overlap.begins_in_backward
        if begins:
            self._worker.begin_in_backward()
        for group in reversed(groups):
            yield from self._pass("backward", group)
            if begins:
                self._worker.step.pending.update(dict.fromkeys(self._final_with[group]))
                if work.takes_turns:
                    yield from self._wait("backward", lambda: not self._worker.step.pending)

    def _skip(self, micro_batches: int, waited: dict[Part, float], seconds: float) -> int:
        """Let so many micro-batches go by that are all as the last one was, or none; return how many."""
        micro_batches = max(0, micro_batches)
        self._clock.skip(micro_batches * seconds)
        for part in PARTS:
            self._waited[part] += micro_batches * waited[part]
        passes = micro_batches * 2 * len(self._work.groups)
        self._num_passes += passes
        self._num_asked += passes
        self._num_arrived += passes
        return micro_batches

    def _is_steady(self) -> bool:
        """Whether the last iteration was as the one before it, or two before it where directions alternate."""
        period = 1 if self._overlap.hides else 2
        (begun, _, before), (ended, _, after) = self.ends[-2:]
        (earlier, _, first), (then, _, second) = self.ends[-2 - period :][:2]
        return abs(ended - begun - (then - earlier)) <= _SAME * ended and after - before == second - first

    def _wait_for_updates(self, group: int) -> Iterator[Callable[[], bool]]:
        own, step = self._of_group[group], self._worker.step
        step.want(own)
        yield from self._wait("forward", lambda: step.pending.keys().isdisjoint(own))
        step.want(())

    def _wait(self, part: Part, until: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        start = self._clock.now
        yield until
        self._waited[part] += self._clock.now - start

    def _pass(self, part: Part, group: int) -> Iterator[float | Callable[[], bool]]:
        """Compute a group, for which its own parameters must be there; those of the next ones are read meanwhile."""
        number, self._num_passes = self._num_passes, self._num_passes + 1
        last = min(number + self._work.tier_ahead, len(self._of_tiers) - 1)
        for following in range(self._num_asked, last + 1):
            self._worker.buffers.ask(self._of_tiers[following], self._count_arrival)
        self._num_asked = max(self._num_asked, last + 1)
        if self._of_tiers:
            yield from self._wait(part, lambda: self._num_arrived > number)
        yield self._work.groups[group].seconds(part)

    def _count_arrival(self) -> None:
        self._num_arrived += 1
