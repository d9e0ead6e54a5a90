"""Staging buffers are computed with as they are, without a copy."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .._torch_private import Lent
from ..staging.block_cache import Block, BlockCache
from ..warn import Once


@dataclass(eq=False)
class Loan:
    """Bytes of a parameter in a staging buffer: its block is held until all views of them are gone."""

    block: Block
    withdraw: Callable[[], object]

    def bytes_from(self, byte_offset: int, size_bytes: int) -> torch.Tensor:
        """Return the bytes, uint8 [size_bytes], and hold the block until they are gone."""
        lent, self._memory = self.block.held_buffer.lend(byte_offset, size_bytes, self._end)
        self.block.holders.add(self)
        return lent

    @property
    def is_out(self) -> bool:
        """Whether somebody has a view."""
        return self._memory() is not None

    def _end(self, _: object) -> None:
        self.block.holders.discard(self)


class Loans:
    """Lends what is in the staging buffers of a cache, for as long as one pass uses it."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._made: list[Loan] = []
        self._once = Once()

    def lend(self, block: Block, byte_offset: int, size_bytes: int, withdraw: Callable[[], object]) -> Lent | None:
        """Return bytes of a block that is held, and `end`, to be called once when all loans to one borrower are let go.

        `withdraw` is called where others need the buffer: it has the bytes copied. None: they have to be copied now,
        as somebody has kept views that were lent before, and a buffer with them.
        """
        self._made = [loan for loan in self._made if loan.is_out]
        if stray := next((loan for loan in self._made if loan.withdraw != withdraw), None):
            self._once.warn(
                "stray",
                f"something keeps views of {stray.block.name} behind the pass for which they were gathered, and a "
                "staging buffer with them: as long as it does, parameters are copied. Keep clones",
            )
            return None
        loan = Loan(block, withdraw)
        lent = loan.bytes_from(byte_offset, size_bytes)
        self._made.append(loan)
        return lent, self.end

    def end(self, changed: bool) -> None:
        """Note that a borrower has let go, and read ahead. What was `changed` in a buffer is read again."""
        blocks = {loan.block for loan in self._made}
        self._find_strays()
        for block in blocks:
            if changed and block.evictable and not block.holds:
                self._cache.give_up(block)
        self._cache.advance()

    def call_in(self) -> None:
        """Have all that is lent copied, to come to its buffers."""
        for withdraw in {loan.withdraw for loan in self._made}:
            withdraw()
        self._find_strays()

    def _find_strays(self) -> None:
        """Look for views that others have; a cycle, or a traceback, has some only for a while."""
        if any(loan.is_out for loan in self._made):
            gc.collect()
        self._cache.allow_spare(any(loan.is_out for loan in self._made))
