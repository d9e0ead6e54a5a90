"""Slots that are rewritten every few steps take turns, and that needs so many extents: see `ring.ExtentRing`."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count

from nvme_offload.offload.durable.chain import SlotLayout
from nvme_offload.offload.storage.swap_space import Size


def phases(layouts: Iterable[SlotLayout]) -> Iterator[int]:
    """When each slot has its turn: slots of one layout spread evenly, beginning elsewhere for each layout."""
    turns: dict[SlotLayout, Iterator[int]] = {}
    for layout in layouts:
        yield next(turns.setdefault(layout, count(len(turns))))


def turns_behind(turn: int, slots: Iterable[tuple[int, int, int]]) -> int:
    """Return how many turns after this one it was when slots were written: what most of them say.

    Slots that would be rewritten earlier or later than they were about to be need space of others. `slots` has the
    period, the phase and the number of entries of each.
    """
    said = Counter((logged - phase - turn) % period for period, phase, logged in slots if period > 1)
    return said.most_common(1)[0][0] if said else 0


def wanted(layouts: Iterable[SlotLayout], steps_back: int) -> Counter[Size]:
    """Return how many extents of each size the turns of these slots need, with `steps_back` steps to go back to."""
    counts: Counter[Size] = Counter()
    for layout, number in Counter(layouts).items():
        period = layout.period
        bases, entries = num_needed(number, period)
        of_turn = -(-number // period) * (steps_back - 1)  # chains that a step sets free, for each further step
        counts[layout.base.parts] += bases + of_turn
        if entries:
            counts[layout.entry_bytes] += entries + of_turn * (period - 1)
    return counts


def bytes_needed(layouts: Iterable[SlotLayout], steps_back: int) -> list[int]:
    """Return the bytes of every extent that the turns of these slots need."""
    return [num_bytes(size) for size, count in wanted(layouts, steps_back).items() for _ in range(count)]


def num_bytes(size: Size) -> int:
    """Bytes of an extent of this size."""
    return sum(size) if isinstance(size, tuple) else size


def num_needed(num_slots: int, period: int) -> tuple[int, int]:
    """Return how many bases and entries equal slots need that take turns.

    There is a base for each slot, and one for each that a step rewrites; and there are the entries after a step, with
    those that the next one adds, where they are most.
    """
    in_phase = Counter(slot % period for slot in range(num_slots))

    def entries_in(turn: int) -> int:
        ages = [((phase + turn) % period, number) for phase, number in in_phase.items()]
        return sum(number * (age + (age < period - 1)) for age, number in ages)

    return num_slots + -(-num_slots // period), max(map(entries_in, range(period)))
