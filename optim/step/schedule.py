"""Pure functions say what a step does next: by where subgroups are, what is final, and what somebody waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal, Protocol

from nvme_offload.optim.state.phase import StepRecord
from nvme_offload.optim.state.slots import SlotRecord

OverlapStep = Literal["off", "forward", "backward", "speculate"]
"""The name of a schedule, as the section's ``overlap_step`` has it."""

LOOK_AHEAD = 256  # subgroups; most of them may be in host memory, past which the reads go on


def hindrance(owner: str, *, inside: str, through_buffers: bool, readers_wait: bool = True) -> str | None:
    """Say why a parameter has to be updated inside `step()`; None where its update can go on behind it.

    Args:
        owner: name of the optimizer, for the text.
        inside: what the way it is updated says to that, see `Updater.inside`.
        through_buffers: it or a gradient passes through staging buffers, which a gather needs, too.
        readers_wait: whoever reads it waits for its update.
    """
    if inside:
        return f"{owner} {inside}"
    if through_buffers:
        return "parameters have a tier of their own (offload_param), or gradients are on NVMe (offload_gradients)"
    if not readers_wait:
        return (
            "its parameters are neither in host memory and of a plain module that optimizer.overlap_with(model) was "
            "told, nor shards in parts, which initialize and split_parameters make"
        )
    return None


def schedule_of(asked: OverlapStep | None, *, hides: bool, hindered: bool, grads_on_way: bool) -> OverlapStep:
    """Return the schedule by which a parameter is updated.

    Args:
        asked: ``overlap_step`` of the section; None: left out.
        hides: steps are hidden where they can be.
        hindered: its update cannot be; see `hindrance`.
        grads_on_way: its gradient is still on its way from a device when backward ends.
    """
    if hindered or not hides:
        return "off"
    return "forward" if grads_on_way or asked is None else asked


def forward_order(slots: Iterable[SlotRecord], ranks: Mapping[int, int]) -> list[SlotRecord]:
    """Sort subgroups as the next forward will want them; those that no forward has used so far come last."""
    last = len(ranks)

    def rank(slot: SlotRecord) -> int:
        return min(ranks.get(run.param, last) for run in slot.subgroup.runs)

    return sorted(slots, key=rank)


class Schedule(Protocol):
    """The order in which a worker comes to the subgroups of a step."""

    def upcoming(self, record: StepRecord, residents: Sequence[SlotRecord]) -> Iterator[SlotRecord]:
        """Yield subgroups as they will be needed, pending or not; one may come twice.

        Args:
            record: of the step.
            residents: subgroups that hold a staging buffer.
        """


def ahead(schedule: Schedule, record: StepRecord, residents: Sequence[SlotRecord]) -> list[SlotRecord]:
    """Return the subgroups that will be needed next, each once."""
    return list(dict.fromkeys(islice(schedule.upcoming(record, residents), LOOK_AHEAD)))


@dataclass(frozen=True)
class Behind:
    """Updates behind a step: what somebody waits for, the rest in the order of the forward, then the next step's.

    Where updates began in backward, what is in memory already comes before the rest: it holds the buffers.
    """

    following: Sequence[SlotRecord]
    """Subgroups as the next step will go through them."""
    began_in_backward: bool

    def upcoming(self, record: StepRecord, residents: Sequence[SlotRecord]) -> Iterator[SlotRecord]:
        """See `Schedule`."""
        pending = record.pending
        for index in tuple(record.wanted):
            yield from (slot for slot in pending if any(run.param == index for run in slot.subgroup.runs))
        if self.began_in_backward:
            yield from (slot for slot in residents if slot in pending)
        yield from pending
        yield from self.following


@dataclass(frozen=True)
class InBackward:
    """Updates in backward: what is ready, then what will be, the last layer's first.

    Args:
        order: subgroups as they will probably be ready.
        num_early: how many of these the drive will probably have done before `step()`. Buffers that they leave are for
            what the forward needs first; None: for whatever is ready.
    """

    order: Sequence[SlotRecord]
    num_early: int | None

    def upcoming(self, record: StepRecord, residents: Sequence[SlotRecord]) -> Iterator[SlotRecord]:
        """See `Schedule`."""
        done = {slot for slot in record.order if slot not in record.pending}
        early = self.num_early
        order = self.order if early is None else [*self.order[:early], *reversed(self.order[early:])]
        ready = tuple(record.pending) if early is None else ()
        return chain(ready, (slot for slot in order if slot not in done))
