"""The same bytes on several drives: which copy is read, where is written to, and what becomes of one that fails.

A copy has a file for each path, and every range lies at the same offset in all copies. Ranges are named by the
descriptors of the first copy's files, whichever copy is read or written.
"""

import enum
import errno
import logging
import threading
from collections.abc import Callable, Sequence

from nvme_offload.aio_native.engine import Op, Segment
from ..errors import EngineLostError, check_may_follow
from ..warn import Once
from .swap_file import SwapFile

logger = logging.getLogger(__name__)


OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""Errors of a process or machine that has too many files open: no drive is lost by them."""


class CopyState(enum.Enum):
    """The worth of one copy."""

    WHOLE = "whole"
    """It has every byte that counts. The first of these is read, and all of them are written."""
    CATCHING_UP = "catching up"
    """It is written, too, and the rest is being copied to it. Nothing is read from it."""
    LOST = "lost"
    """It is left alone: its drive failed, or it is of an earlier time."""


_MAY_FOLLOW = {
    CopyState.WHOLE: {CopyState.LOST},
    CopyState.LOST: {CopyState.LOST, CopyState.CATCHING_UP},
    CopyState.CATCHING_UP: {CopyState.LOST, CopyState.WHOLE},
}
"""Which state may follow which, and who sees to it:

WHOLE -> LOST [DriveCopies.lose, DriveCopies.set_aside]
LOST -> CATCHING_UP [DriveCopies.begin_to_write]
LOST -> LOST [DriveCopies.set_aside]: a copy that a run begins without is of an earlier time, too
CATCHING_UP -> WHOLE [DriveCopies.note_whole]
CATCHING_UP -> LOST [DriveCopies.lose]
"""


class DriveCopies:
    """The copies of a swap space: one, or several on drives of their own. Thread-safe.

    One copy at least is always WHOLE. `files` has a list for each copy, with a file for each path.
    """

    def __init__(self, files: Sequence[Sequence[SwapFile]]) -> None:
        self.files = files
        self._states = [CopyState.WHOLE for _ in files]
        self._order = [*range(len(files))]
        """The copies, as they are to be read: last those that were lost before."""
        self._once = Once()
        """Copies of which it was said that they are lost."""
        self._place_of = {file.fd: (copy, at) for copy, of_copy in enumerate(files) for at, file in enumerate(of_copy)}
        self._lock = threading.RLock()  # re-entrant: a signal handler may use what it interrupted

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return len(self.files) > 1

    @property
    def whole(self) -> list[int]:
        """Return the copies that have every byte; the first of them is read."""
        return [copy for copy in self._order if self._states[copy] is CopyState.WHOLE]

    @property
    def written(self) -> list[int]:
        """Return the copies that are written."""
        return [copy for copy, state in enumerate(self._states) if state is not CopyState.LOST]

    @property
    def fds(self) -> list[int]:
        """Return the descriptors of all files of all copies."""
        return [*self._place_of]

    def state_of(self, copy: int) -> CopyState:
        """Return the worth of a copy."""
        return self._states[copy]

    def read_at(self, fd: int) -> int:
        """Return the descriptor that is read for a range of a file."""
        return self.files[self.whole[0]][self._place_of[fd][1]].fd if self.several else fd

    def segments(self, op: Op, segments: Sequence[Segment]) -> list[Segment]:
        """Return what is to be moved of the first copy's files: from one copy, or to all that are written."""
        if not self.several:
            return list(segments)
        copies = self.whole[:1] if op is Op.READ else self.written
        files = [self.files[copy] for copy in copies]
        return [s._replace(fd=of_copy[self._place_of[s.fd][1]].fd) for of_copy in files for s in segments]

    def each(
        self, copies: Sequence[int], act: Callable[[int], None], *, raised: type[OSError] = EngineLostError
    ) -> None:
        """Do something to each of these copies. One that fails is lost, see `lose`; not by errors that are `raised`."""
        for copy in copies:
            try:
                act(copy)
            except raised:
                raise
            except OSError as error:
                if not self.lose(copy, error):
                    raise

    def lose(self, copy: int, error: BaseException) -> bool:
        """Go on without a copy; the first time it is a warning.

        False, and nothing has changed: no other is whole, or the error is of this process and not of the drive.
        """
        with self._lock:
            others = [other for other in self.whole if other != copy]
            if not others or getattr(error, "errno", None) in OUT_OF_FILES:
                return False
            self._become(copy, CopyState.LOST)
            self._say_lost(copy, error, others[0])
        return True

    def _say_lost(self, copy: int, error: BaseException, other: int) -> None:
        said = f"a copy of the state is lost ({error}), and that in {self.files[other][0].path.parent} is read instead"
        remedy = (
            "Training makes the lost one again as soon as its drive takes it. Where it does not, name a folder on "
            "another drive in nvme_path, and start again"
        )
        if not self._once.warn(copy, f"{said}. {remedy}", of_this_rank=True):
            logger.info(said)

    def lose_at(self, fd: int, error: BaseException) -> bool:
        """Go on without the copy that has this file; see `lose`."""
        return fd in self._place_of and self.lose(self._place_of[fd][0], error)

    def set_aside(self, copy: int) -> None:
        """Note that a copy is of an earlier time: it has to be made again."""
        self._become(copy, CopyState.LOST)

    def begin_to_write(self, copy: int) -> None:
        """Have a lost copy written again, and its files as long as they must be; raises as `SwapFile.reserve` does."""
        for file in self.files[copy]:
            file.reserve_again(file.end)
        self._become(copy, CopyState.CATCHING_UP)

    def note_whole(self, copy: int) -> None:
        """Note that a copy that catches up has every byte, on its drive."""
        with self._lock:
            self._order = [*(other for other in self._order if other != copy), copy]
            self._become(copy, CopyState.WHOLE)

    def _become(self, copy: int, state: CopyState) -> None:
        if state is not self._states[copy]:
            check_may_follow(f"copy {copy}", _MAY_FOLLOW, self._states[copy], state)
            self._states[copy] = state
