"""Keep the log of a subgroup of a durable run: what is read with it, and as what it is to be written."""

from collections.abc import Container
from typing import NamedTuple

from nvme_offload.offload.durable.seal import Sums
from nvme_offload.offload.staging.mover import WriteTarget


class Draft(NamedTuple):
    """An entry of a log that is in a slot's buffer and not sealed yet."""

    start: int
    """Byte of the buffer at which it begins."""
    size_bytes: int
    """Without its trailer."""
    place: int
    """Its number in the log."""


class LogState:
    """A subgroup of a durable run has this besides a slot: a base on the drive, and a log of the updates since."""

    def __init__(self) -> None:
        self.num_logged = 0
        """Entries of the log that are read along with the base."""
        self.read_bytes: int | None = None
        """So many of the extent's first bytes are read; None: all."""
        self.needs_replay = False
        """Whether the state in the buffer is that of the base: the updates in the log are still to be done."""
        self.updated: Container[int] = ()
        """Parameters that had a gradient in the update that the buffer is to be written for, by index."""
        self.draft: Draft | None = None
        """That update appends this to the log; None: all of the buffer is written."""
        self.sums: Sums | None = None
        """Sums of what is in the buffer, which that update has completed; None: it is to be completed for writing."""
        self.target: WriteTarget | None = None
        """The place for which the buffer was sealed; None: it has changed since."""

    def point(self, num_logged: int, read_bytes: int | None) -> None:
        """Note that the next read takes `num_logged` entries and the first `read_bytes` of the extent (None: all)."""
        self.num_logged = num_logged
        self.read_bytes = read_bytes

    def begin_read(self, *, load: bool) -> None:
        """Note that a base is read, with its log; without `load` both are about to be overwritten."""
        self.needs_replay = load and self.num_logged > 0

    def begin_version(self, updated: Container[int] = ()) -> None:
        """Forget what was to be written; `updated` are the parameters that have a gradient in the update that comes."""
        self.target = None
        self.draft = None
        self.sums = None
        self.updated = updated

    def end_version(self, target: WriteTarget) -> None:
        """Note the place that the buffer was sealed for."""
        # No call in between: a signal handler sees what is sealed, or what is to be, which is then sealed once more.
        self.draft = self.sums = None
        self.target = target

    def end_update(self, *, draft: Draft | None = None, sums: Sums | None = None) -> None:
        """Note that the state is the newest, and as what it is to be written."""
        # No call in between: a signal handler sees state with what it is written as.
        self.needs_replay = False
        self.draft = draft
        self.sums = sums

    def begin_anew(self, num_logged: int = 0) -> None:
        """Keep nothing of what it was."""
        self.begin_version()
        self.point(num_logged, None)
        self.needs_replay = False
