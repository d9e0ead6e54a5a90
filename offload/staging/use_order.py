"""The order of use is learnt: what will be needed next follows from what was needed before."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

_STEP = -1  # stands in the record for all uses of one optimizer step
_MAX_RECORD = 1 << 16


class UseOrder:
    """Predicts uses of numbered blocks. A prediction is a hint: a wrong one costs a read and nothing else.

    Training repeats itself: forward, backward, forward ..., step. The record of uses is followed with a cursor, one
    period behind. Where something else happens (an evaluation, another number of micro-batches), the cursor moves to
    the place where the latest two uses last followed each other. Uses of the step are not learnt but announced, because
    steps alternate their direction.
    """

    def __init__(self) -> None:
        self._record: list[int] = []
        self._after: dict[tuple[int, int], int] = {}
        """Position in the record behind the latest occurrence of two uses in a row."""
        self._cursor: int | None = None
        self._cycle_start = 0
        self._announced: deque[int] = deque()
        self._next_step: tuple[int, ...] = ()

    def note(self, block: int) -> None:
        """Note the use of a block outside the step."""
        self._announced.clear()
        self._note(block)

    def begin_step(self, blocks: Iterable[int]) -> None:
        """Begin a step, which will use these blocks in this order, each as often as it stands here."""
        self._announced.clear()
        self._note(_STEP)
        self._announced.extend(blocks)

    def note_in_step(self, block: int) -> None:
        """Note the use of a block inside the step."""
        if self.is_next_in_step(block):
            self._announced.popleft()

    def is_next_in_step(self, block: int) -> bool:
        """Whether the step under way uses this block next."""
        return bool(self._announced) and self._announced[0] == block

    def end_step(self, next_step: Sequence[int]) -> None:
        """End the step, or let it go on as announced; the next one will probably go in the order given."""
        self._next_step = tuple(next_step)
        if self._cursor is None:  # the first period has just ended, and begins again
            self._cursor = self._cycle_start
        self._cycle_start = len(self._record)

    def upcoming(self) -> Iterator[int]:
        """Yield blocks in the order in which they will be used, with repetitions, as far as that is known."""
        yield from self._announced
        if self._cursor is None:
            return
        for position in range(self._cursor, len(self._record)):
            block = self._record[position]
            if block == _STEP:
                yield from self._next_step
            else:
                yield block

    def goes_round(self, num_blocks: int) -> bool:
        """Whether what comes next is blocks once each, and no step: as in forwards of a model that is only run."""
        if self._announced or self._cursor is None or len(self._record) - self._cursor > num_blocks:
            return False
        period = self._record[self._cursor :]
        return _STEP not in period and len(set(period)) == len(period)

    def soonest(self, number: int) -> list[int]:
        """Return the `number` different blocks that are used first from now on, in that order."""
        found: dict[int, None] = {}
        for block in self.upcoming():
            found[block] = None
            if len(found) >= number:
                break
        return list(found)

    def _note(self, block: int) -> None:
        before = self._record[-1] if self._record else None
        self._record.append(block)
        cursor = self._cursor
        if cursor is not None and self._record[cursor] == block:
            self._cursor = cursor + 1
        else:
            self._cursor = None if before is None else self._after.get((before, block))
        if before is not None:
            self._after[before, block] = len(self._record)
        if len(self._record) > _MAX_RECORD:
            self._forget_older_half()

    def _forget_older_half(self) -> None:
        dropped = len(self._record) // 2
        del self._record[:dropped]
        self._after = {pair: at - dropped for pair, at in self._after.items() if at > dropped}
        self._cycle_start = max(0, self._cycle_start - dropped)
        if self._cursor is not None:
            self._cursor = self._cursor - dropped if self._cursor > dropped else None
