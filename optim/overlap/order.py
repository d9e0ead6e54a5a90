"""In which order a forward uses the parameters, learnt from the one before."""

from __future__ import annotations

from collections.abc import Collection


class FirstUses:
    """Ranks parameters by when the latest forward first used them.

    A hint: whoever finds his parameter not ready asks for it, and it comes next.
    """

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
        """Rank by index, of what was used since the call before first; then what was used before that.

        A parameter that was never used has no rank.
        """
        ranks = self.ranks
        self._latest, self._before = {}, dict.fromkeys(ranks)
        return ranks

    @property
    def ranks(self) -> dict[int, int]:
        """Return the ranks as `take` would."""
        return {index: rank for rank, index in enumerate({**self._latest, **self._before})}
