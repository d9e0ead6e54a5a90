"""Extents of a few sizes that many slots share: what one slot does not need any more, the next one writes to."""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping

from ..storage.extent import Extent, Stripe
from ..storage.swap_space import Size, SwapSpace


class ExtentPool:
    """Extents of `space` that are in use or wait for their next use, by size.

    For one thread at a time. An extent that is dropped here belongs to the space again when nobody has it any more.
    """

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self._idle: defaultdict[Size, deque[Extent]] = defaultdict(deque)
        self._used: Counter[Size] = Counter()
        self._wanted: Counter[Size] = Counter()

    @property
    def idle(self) -> list[tuple[Size, Extent]]:
        """Return what nobody uses, with its size; the one that waits longest first."""
        return [(size, extent) for size, extents in self._idle.items() for extent in extents]

    def num_held(self, size: Size) -> int:
        """Count the extents of this size, used or idle."""
        return self._used[size] + len(self._idle[size])

    def want(self, counts: Mapping[Size, int]) -> None:
        """Hold so many extents, used or idle; `trim` lets go of more. OutOfSpaceError leaves all as it was."""
        missing = [size for size, count in counts.items() for _ in range(count - self.num_held(size))]
        for size, extent in zip(missing, self._space.allocate_all(missing), strict=True):
            self._idle[size].append(extent)
        self._wanted = Counter(counts)

    def trim(self) -> None:
        """Let go of idle extents that are more than what is wanted."""
        for size, extents in self._idle.items():
            while extents and self.num_held(size) > self._wanted[size]:
                extents.pop()

    def take(self, size: Size) -> Extent:
        """Take the idle extent that waits longest; a new one where none is idle. May raise OutOfSpaceError."""
        extent = self._idle[size].popleft() if self._idle[size] else self._space.allocate_all([size])[0]
        self._used[size] += 1
        return extent

    def give_back(self, extents: Iterable[tuple[Size, Extent]]) -> None:
        """Let others use these."""
        for size, extent in extents:
            self._used[size] -= 1
            self._idle[size].append(extent)

    def let_go(self, sizes: Iterable[Size]) -> None:
        """Note that extents in use are somebody else's from now on."""
        self._used.subtract(sizes)

    def keep(self, extents: Iterable[tuple[Size, Extent]]) -> None:
        """Have some more that nobody uses; they are taken after those that wait already."""
        for size, extent in extents:
            self._idle[size].append(extent)

    def take_out(self, stripes: Collection[tuple[Stripe, ...]]) -> None:
        """Take those of the idle extents that are in these stripes back into use."""
        for size, extents in self._idle.items():
            self._used[size] += sum(extent.stripes in stripes for extent in extents)
        self.drop(stripes)

    def drop(self, stripes: Collection[tuple[Stripe, ...]]) -> None:
        """Note that idle extents in these stripes are somebody else's from now on."""
        for size, extents in self._idle.items():
            self._idle[size] = deque(extent for extent in extents if extent.stripes not in stripes)

    def admit(self, sizes: Iterable[Size]) -> None:
        """Note that somebody else's extents of these sizes are in use here."""
        self._used.update(sizes)
