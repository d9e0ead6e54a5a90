"""One unit on a tier that visits staging buffers. `Mover` moves it.

Ctrl-C, a signal handler that raises and a MemoryError strike between any two steps of this code, and nobody can catch
all of them everywhere. So nothing here has to be undone. Five rules make every state in between a known one:

1. CPython runs handlers after a call, at the entry of a function and at a jump back, and nowhere else. Fields that must
   agree are set by assignments with no call between them: `Slot.become` sets residency and transfer so, and
   `BufferPool` the two ends of a lease.
2. Who owns a buffer stands in one place, at the pool. There is no free list and no list of residents to disagree:
   both are read off the leases. So no buffer has two owners, and none is lost.
3. Intent is written down first. A slot is READING or WRITING before its transfer is submitted; where an exception took
   the transfer away, the tier still knows which buffers it touches (`Tier.quiesce`), and `recover` waits for them.
4. Only the residency says whether bytes count. A buffer whose slot is UNBORN or ON_TIER holds nothing, whatever is in
   it, and may be given up; READING ends when its transfer has ended and its bytes were verified, not before.
5. A record is right before memory is given away, and memory is given away only when no transfer can touch it.

What was cut short is made good by the next call that looks: `Mover.recover`, which costs a look at each buffer.
"""

import enum
from dataclasses import dataclass, field

import torch

from ..errors import check_may_follow
from ..host.buffer_pool import StagingBuffer
from ..storage.extent import Extent
from ..storage.transfer import Transfer
from .home import VISITING, Home


class Residency(enum.Enum):
    """The residency tells where the valid copy of a slot's bytes is."""

    UNBORN = "unborn"
    """The bytes are nowhere: none has been written yet."""
    HOST = "host"
    """The bytes are in host memory of their own, for good."""
    ON_TIER = "on tier"
    """The bytes are only in the slot's extent."""
    READING = "reading"
    """The bytes are in the slot's extent, and on their way to a staging buffer."""
    STAGED = "staged"
    """The bytes are in the slot's extent and, equal, in a staging buffer, which may be taken away (evict)."""
    DIRTY = "dirty"
    """The bytes are only in a staging buffer, which must not be given up before it is written."""
    WRITING = "writing"
    """The bytes are in a staging buffer, and on their way to the slot's extent."""


_MAY_FOLLOW = {
    Residency.UNBORN: {Residency.DIRTY, Residency.HOST, Residency.ON_TIER},
    Residency.HOST: {Residency.UNBORN},
    Residency.ON_TIER: {Residency.READING, Residency.STAGED, Residency.DIRTY, Residency.UNBORN},
    Residency.READING: {Residency.STAGED, Residency.ON_TIER},
    Residency.STAGED: {Residency.DIRTY, Residency.ON_TIER},
    Residency.DIRTY: {Residency.WRITING, Residency.UNBORN},
    Residency.WRITING: {Residency.STAGED, Residency.DIRTY},
}
"""Which residency may follow which, and who sees to it:

UNBORN -> DIRTY [BlockCache._bring, StepPipeline.will_change, SwapOut.move]: somebody fills the buffer
UNBORN -> HOST [StepPipeline._at_home]
UNBORN -> ON_TIER [StepPipeline.adopt]: a run that ended has left the bytes there
ON_TIER -> READING [Mover.start_read]
READING -> STAGED [Mover.settle]
READING -> ON_TIER [Mover.settle, Mover.halt]: the read has failed, or was not waited for
STAGED -> DIRTY [BlockCache._bring]
STAGED -> ON_TIER [Mover.give_up, Mover.forget, StepPipeline.begin_change]
ON_TIER -> DIRTY [StepPipeline.will_change, BlockCache._bring]: what is in the buffer counts from here on
ON_TIER -> STAGED [StepPipeline._catch_up]: the buffer has what the log makes of the bytes
DIRTY -> WRITING [Mover.start_write]
WRITING -> STAGED [Mover.settle]
WRITING -> DIRTY [Mover.settle, Mover.halt]: the write has failed, or was not waited for
DIRTY -> UNBORN [Mover.forget]: the bytes are given up for good
ON_TIER -> UNBORN [Mover.forget]
HOST -> UNBORN [Mover.forget]
"""

_EVICTABLE = (Residency.STAGED, Residency.ON_TIER, Residency.UNBORN)


@dataclass(eq=False)
class Slot:
    """A unit, where it lives, and what is happening to it."""

    index: int
    name: str
    """Messages call the slot this, as "parameters of layers.3"."""
    size_bytes: int
    extent: Extent | None = None
    home: Home = VISITING
    residency: Residency = Residency.UNBORN
    buffer: StagingBuffer | None = field(default=None, init=False)
    """The staging buffer that is leased to the slot: the pool sets this."""
    transfer: Transfer[StagingBuffer] | None = field(default=None, init=False)
    """The transfer under way while the slot is READING or WRITING."""
    checksums: torch.Tensor | None = field(default=None, init=False)
    """int64, of what was last written; None with checksums off, or before."""
    touched: int = field(default=0, init=False)
    """When it was last leased a buffer or used, on a clock of the machine's."""

    def become(self, residency: Residency) -> None:
        """Change the residency, or raise StateError. A transfer belongs to the old one and is let go."""
        check_may_follow(self.name, _MAY_FOLLOW, self.residency, residency)
        # No call in between: a signal handler sees both changed or neither.
        self.transfer = None
        self.residency = residency

    def lie_in(self, extent: Extent) -> None:
        """Note where its bytes are on the tier from here on."""
        self.extent = extent

    def note_checksums(self, checksums: torch.Tensor | None) -> None:
        """Note those of the bytes that are in its extent, or about to be; None: nobody knows them."""
        self.checksums = checksums

    @property
    def needs_read(self) -> bool:
        """Whether its bytes are in its extent only, and nothing brings them."""
        return self.residency is Residency.ON_TIER

    @property
    def evictable(self) -> bool:
        """Whether its buffer may be given up: what counts is elsewhere, or nowhere."""
        return self.residency in _EVICTABLE
