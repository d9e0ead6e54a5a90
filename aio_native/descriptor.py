"""A file descriptor that somebody owns from its first moment on."""

import errno
import fcntl
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Descriptor:
    """A descriptor that a system call opened; it is closed with this object, at the latest.

    A number alone is lost where an exception (a signal handler's, say) comes between the call that returns it and
    whoever would note it. Here it is noted by the same call: `opened_by` is a function in C, for example `os.open`.
    """

    def __init__(self, opened_by: Callable[..., int], *arguments: Any) -> None:
        self._held: list[int] = []
        # In C alone: what a handler raises at the entry of a finalizer is printed, and it would stay open for ever.
        weakref.finalize(self, deque, map(os.close, self._held), 0).atexit = False
        self._held.extend(map(opened_by, *([argument] for argument in arguments)))

    def fileno(self) -> int:
        """Return the descriptor; -1 when it is closed."""
        return self._held[0] if self._held else -1

    def close(self) -> None:
        """Close it. Idempotent."""
        if self._held:
            # No call between the lines: a signal handler sees it open and noted, or neither.
            fd = self._held[0]
            self._held[:] = []
            os.close(fd)

    def lock(self) -> bool:
        """Lock the open file (flock(2)) until it is closed; False if another process has it. True without locks, too.

        Processes must not share a folder on a file system that has none.
        """
        try:
            fcntl.flock(self.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return True

    def close_in_children(self) -> None:
        """Close it in what this process forks: a lock is of the open file, and would outlive this process there."""
        _closed_in_children.add(self)

    def __enter__(self) -> int:
        return self.fileno()

    def __exit__(self, *exception: object) -> None:
        self.close()


_closed_in_children: weakref.WeakSet[Descriptor] = weakref.WeakSet()


def _close_in_child() -> None:
    for descriptor in list(_closed_in_children):
        descriptor.close()


os.register_at_fork(after_in_child=_close_in_child)
