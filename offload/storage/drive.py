"""The one way from here to a drive: what a system call is refused is a SwapIOError, which names the place and a way on.

Nobody else below `offload.storage` and `offload.durable` makes such a call; transfers of extents are the engine's. So
an error of a drive that is mounted and dead has the same form wherever it is met, and a test can put one anywhere.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import Direction, ExistsError, MissingError, SwapIOError

T = TypeVar("T")

_KINDS: dict[type[OSError], type[SwapIOError]] = {FileNotFoundError: MissingError, FileExistsError: ExistsError}


def ask(path: Path, call: Callable[..., T], *arguments: Any, direction: Direction = "allocate", **about: Any) -> T:
    """Return what a call says, or raise SwapIOError about a path; `about` it is known, too: `offset`, `size_bytes` ...

    A lock that somebody has is a BlockingIOError.
    """
    try:
        return call(*arguments)
    except (SwapIOError, BlockingIOError):
        raise
    except OSError as error:
        kind = _KINDS.get(type(error), SwapIOError)
        raise kind(error.errno or errno.EIO, path=path, direction=direction, **about) from error


def read_at(fd: int, memory: memoryview, offset: int) -> int:
    """Read into memory as `os.pwrite` writes from it; to be asked for, as the calls below."""
    return os.preadv(fd, [memory], offset)


def read_all(fd: int) -> bytes:
    """Return what an open file has from where it is."""
    with os.fdopen(fd, "rb", closefd=False) as file:
        return file.read()


def write_all(fd: int, content: bytes) -> None:
    """Write to an open file from where it is."""
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(content)
