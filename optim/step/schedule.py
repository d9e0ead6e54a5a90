"""Pure functions say what a step does next: by where subgroups are, what is final, and what somebody waits for.

The stepper and the worker ask them, and so does `offload plan`, whose subgroups are numbers. What the staging buffers
are for next is said in `optim.state.visits`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse, islice
from typing import Generic, Protocol, TypeVar

from nvme_offload.offload.config.overlap import FORWARD, OFF, Overlap
from ..state.slots import SlotRecord

S = TypeVar("S")
"""A subgroup: its slot, or whatever stands for it."""
S_co = TypeVar("S_co", covariant=True)

LOOK_AHEAD = 256  # subgroups; most of them may be in host memory, past which the reads go on


def hindrance(owner: str, *, inside: str, readers_wait: bool = True) -> str | None:
    """Say why a parameter has to be updated inside `step()`; None where its update can go on behind it.

    Args:
        owner: name of the optimizer, for the text.
        inside: why its updater cannot, see `Updater.inside`; empty: it can.
        readers_wait: whoever reads it waits for its update.
    """
    if inside:
        return f"{owner} {inside}"
    if not readers_wait:
        return (
            "its parameters are neither in host memory and of a plain module that optimizer.overlap_with(model) was "
            "told, nor shards in parts, which initialize and split_parameters make"
        )
    return None


def schedule_of(asked: Overlap, *, hides: bool, hindered: bool, crosses: bool) -> Overlap:
    """Return the schedule by which a parameter is updated.

    Args:
        asked: named by the section; None: left out.
        hides: steps are hidden where they can be.
        hindered: its update cannot be; see `hindrance`.
        crosses: it, or its gradient, comes from host memory to a device or goes there while that computes.
    """
    if hindered or not hides:
        return OFF
    return FORWARD if crosses else asked


def forward_order(slots: Iterable[SlotRecord], ranks: Mapping[int, int]) -> list[SlotRecord]:
    """Sort subgroups as the next forward will want them; those that no forward has used so far come last."""
    last = len(ranks)

    def rank(slot: SlotRecord) -> int:
        return min(ranks.get(run.param, last) for run in slot.subgroup.runs)

    return sorted(slots, key=rank)


class Updates(Protocol[S_co]):
    """The facts of a step that a schedule goes by."""

    @property
    def pending(self) -> Collection[S_co]:
        """Subgroups that may be updated and have not been, in the order of the step."""

    @property
    def updated(self) -> Collection[S_co]:
        """Subgroups that have been updated."""

    def waited_for(self) -> Iterator[S_co]:
        """Yield pending subgroups of parameters that somebody waits for."""


class Schedule(Protocol[S]):
    """The order in which a worker comes to the subgroups of a step."""

    def upcoming(self, step: Updates[S], residents: Sequence[S]) -> Iterator[S]:
        """Yield subgroups as they will be needed, pending or not, perhaps twice. `residents` hold a staging buffer."""


def ahead(schedule: Schedule[S], step: Updates[S], residents: Sequence[S]) -> Iterator[S]:
    """Yield the subgroups that will be needed next, each once."""
    seen = set[S]()
    for slot in islice(schedule.upcoming(step, residents), LOOK_AHEAD):
        if slot not in seen:
            seen.add(slot)
            yield slot


def next_update(order: Iterable[S], pending: Collection[S], may_begin: Callable[[S], bool]) -> S | None:
    """Return the first subgroup in `order` that is pending and may begin; `may_begin` is asked until one may."""
    return next(filter(may_begin, filter(pending.__contains__, order)), None)


@dataclass(frozen=True)
class Behind(Generic[S]):
    """Updates behind a step: what somebody waits for, the rest in the order of the forward, then the next step's.

    Where updates began in backward, what is in memory already comes before the rest: it holds the buffers.
    """

    following: Sequence[S]
    """Subgroups as the next step will go through them."""
    began_in_backward: bool

    def upcoming(self, step: Updates[S], residents: Sequence[S]) -> Iterator[S]:
        """See `Schedule`."""
        pending = step.pending
        in_memory = filter(pending.__contains__, residents if self.began_in_backward else ())
        return chain(step.waited_for(), in_memory, pending, self.following)


@dataclass(frozen=True)
class InBackward(Generic[S]):
    """Updates in backward: what is ready, then what will be, the last layer's first.

    Args:
        num_early: how many of these the drive will probably have done before `step()`. Buffers that they leave are for
            what the forward needs first; None: for whatever is ready.
    """

    order: Sequence[S]
    num_early: int | None

    def upcoming(self, step: Updates[S], residents: Sequence[S]) -> Iterator[S]:
        """See `Schedule`."""
        early, updated = self.num_early, step.updated
        order = self.order if early is None else chain(islice(self.order, early), self.order[early:][::-1])
        ready = tuple(step.pending) if early is None else ()
        return chain(ready, filterfalse(updated.__contains__, order))


def learnt_early(num_done: int, num_early: int | None) -> int:
    """Return `InBackward.num_early` of the next step: one more than was done, unless that was fewer than expected."""
    return num_done + (num_early is not None and num_done >= num_early)


def in_direction(slots: Sequence[S], step: int) -> Sequence[S]:
    """Alternate directions from step to step: a step begins with what the one before left in the buffers."""
    return slots if step % 2 == 0 else slots[::-1]


def first_of_next(following: Sequence[S], *, begins_in_backward: bool) -> Sequence[S]:
    """Return the order in which subgroups are read for the next step: from the last layer, if it begins in backward."""
    return following[::-1] if begins_in_backward else following
