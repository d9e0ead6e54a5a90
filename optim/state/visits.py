"""Pure functions say which subgroups visit the staging buffers next, and when writes may begin.

The pipeline of a run asks them, and so does `offload plan`, whose subgroups are numbers. What a forward will want first
is learnt from the one before (`FirstUses`).
"""

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

S = TypeVar("S")
"""A subgroup: its slot, or whatever stands for it."""

_KEEP_BUSY = 2  # transfers: while who waits for one of them hears of its end, the drive does the other


def window_of(
    upcoming: Iterable[S],
    num_buffers: int,
    visits: Callable[[S], bool],
    reads_alone: Callable[[S], bool] = lambda slot: False,
) -> list[S]:
    """Return the subgroups that are read ahead: the next ones, as many as there are staging buffers.

    `upcoming` has each once. Those that do not visit a buffer are looked past; those that `reads_alone` have one of
    their own, and come with the ones around them.
    """
    window, room = list[S](), num_buffers
    for slot in upcoming if room else ():
        if visits(slot):
            window.append(slot)
            room -= 1
            if not room:
                break
        elif reads_alone(slot):
            window.append(slot)
    return window


def may_write(num_under_way: int, *, reads_first: bool) -> bool:
    """Return whether one more write may begin beside the transfers under way, in both directions.

    `reads_first`: nobody waits for the end of the updates, so writes only keep a drive busy that reads leave idle.
    """
    return not reads_first or num_under_way < _KEEP_BUSY


class FirstUses:
    """Ranks parameters by when the latest forward first used them: a hint, for who finds one not ready asks for it."""

    def __init__(self) -> None:
        self._latest: dict[int, None] = {}
        self._before: dict[int, None] = {}

    def note(self, index: int) -> None:
        """Note that the parameter with this index is about to be used."""
        self._latest[index] = None

    @property
    def latest(self) -> Collection[int]:
        """Parameters that were used since `take` was called, by index."""
        return self._latest.keys()

    def take(self) -> dict[int, int]:
        """Return ranks by index: what was used since the call before comes first, then what was used before that."""
        ranks = self.ranks
        self._latest, self._before = {}, dict.fromkeys(ranks)
        return ranks

    @property
    def ranks(self) -> dict[int, int]:
        """The ranks as `take` would return them."""
        return {index: rank for rank, index in enumerate({**self._latest, **self._before})}
