"""Who has a run: a lock on its swap file, and a note of the process that holds it."""

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from ..errors import StateError
from ..host.proc import PROC, has_open, read
from ..storage import drive
from ..storage.run_folder import read_in, write_in

NAME = "owner"
"""The note. Says who it was where the lock is free."""

_LOOK_SECONDS = 0.01
_DYING_SECONDS = 60.0
"""The last transfers of a dead process may take so long."""
_ALIVE_SECONDS = 1.0
"""A process that looks alive may take so long to die."""


@dataclass(frozen=True)
class Owner:
    """A process, for good: numbers are used again, so `began` says when it began, as the kernel counts."""

    pid: int
    began: str
    host: str

    @classmethod
    def this(cls) -> Self:
        """The process that asks."""
        return cls(os.getpid(), _began(os.getpid()) or "", socket.gethostname())

    @classmethod
    def noted_in(cls, folder: Path) -> Self | None:
        """Read the note in a run's directory; None where there is none."""
        try:
            noted = cls(**json.loads(read_in(folder, NAME)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        is_note = type(noted.pid) is int and isinstance(noted.began, str) and isinstance(noted.host, str)
        return noted if is_note else None

    def note_in(self, folder: Path) -> None:
        """Leave a note."""
        write_in(folder, NAME, json.dumps(asdict(self)).encode())

    @property
    def is_alive(self) -> bool:
        """Whether it runs, as far as can be seen from this host."""
        return self.host != socket.gethostname() or _began(self.pid) == self.began

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


NOBODY_KNOWN = Owner(0, "", "a host that left no note")
"""Has a lock."""


def try_lock(fd: int, folder: Path) -> bool:
    """Lock an open file of a folder, unless somebody else has."""
    try:
        drive.ask(folder, fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(fd: int, folder: Path, name: str) -> None:
    """Lock the swap file of a run, after the last transfers of a process that died or has closed the run.

    Raises StateError, which names who has it and is alive.
    """
    begun = time.monotonic()
    while not try_lock(fd, folder):
        owner = Owner.noted_in(folder)
        # The kernel takes a closed ring apart behind close(), on a busy machine seconds later, and that has the file.
        dying = owner is not None and not (owner.is_alive and has_open(owner.pid, fd))
        if time.monotonic() - begun > (_DYING_SECONDS if dying else _ALIVE_SECONDS):
            alive = f"{owner or NOBODY_KNOWN} is: wait for its end, or end it"
            if owner == Owner.this():
                alive = f"{owner}, this one, is: close() the optimizer or engine that has it first"
            raise StateError(
                f"the durable run {name!r}",
                "nobody else in it",
                f"{alive}. Another run beside it has another name in `durable`",
            )
        time.sleep(_LOOK_SECONDS)


def _began(pid: int) -> str | None:
    fields = (read(PROC / str(pid) / "stat") or "").rpartition(")")[2].split()
    return None if not fields or fields[0] in "ZX" else fields[19]
