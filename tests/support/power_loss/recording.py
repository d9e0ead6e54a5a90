"""Notes every operation of this process on the files below a folder, while it goes on as ever."""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import io
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nvme_offload.offload import sync
from nvme_offload.offload.storage import engine_in_use
from tests.support.power_loss import events
from tests.support.power_loss.history import Files, History
from tests.support.power_loss.recorded_engine import RecordedEngine

_OPEN, _IO_OPEN = os.open, io.open
_NEVER_CALLERS = (__file__, os.__file__, contextlib.__file__, sync.__file__)


class Recording:
    """Notes what happens below `folder` from the beginning of a ``with`` block to its end.

    It stands in for the functions of ``os`` that change files, for ``open`` (hence pathlib, shutil and torch.save into
    a stream), and around the engine of every NVMe tier that is opened meanwhile. What goes past them, such as a file
    that a library writes in C, is noticed: `history` compares its own idea of the files with the files. What is in the
    folder at the beginning is on the drive.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.events: list[events.Event] = []
        self.base = Files()
        self._lock = threading.RLock()
        self._tokens = itertools.count(os.getpid() << 32)
        self._active = False
        self._patches = ExitStack()

    def __enter__(self) -> Recording:
        self.base = Files.found_in(self.folder)
        originals = {name: getattr(os, name) for name in _OS_CALLS}
        for name, method in _OS_CALLS.items():
            self._patches.enter_context(patch.object(os, name, _stand_in(method, self, originals[name])))
        for module in (builtins, io):
            self._patches.enter_context(patch.object(module, "open", self._open_stream))
        for name in ("open_engine", "open_next_engine"):
            self._patches.enter_context(patch.object(engine_in_use, name, self._recorded(getattr(engine_in_use, name))))
        self._active = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._active = False
        self._patches.close()

    def _recorded(self, opening: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*arguments: Any) -> Any:
            found = opening(*arguments)
            return replace(found, engine=RecordedEngine(found.engine, self))

        return opened

    def mark(self, name: str) -> None:
        """Give this moment a name: crashes after it have it among their `marks`."""
        self.note(events.Marked, name)

    def history(self) -> History:
        """What was noted so far. AssertionError: something was changed past this recording."""
        with self._lock:
            history = History(self.base, self.events)
        history.check_same_as(self.folder)
        return history

    def note(self, kind: Callable[..., events.Event], *arguments: Any, **more: Any) -> None:
        """Add an event that happened just now."""
        if self._active:
            self.events.append(kind(time.monotonic_ns(), *arguments, **more))

    def next_token(self) -> int:
        """A number that no other transfer has, in no process."""
        return next(self._tokens)

    @property
    def lock(self) -> threading.RLock:
        """Held while a call is made and noted, so that events come in the order of the calls."""
        return self._lock

    def path(self, path: Any, dir_fd: int | None = None) -> str | None:
        """A path as seen from the recorded folder; None where it lies outside."""
        if isinstance(path, int):
            where = os.readlink(f"/proc/self/fd/{path}")
        else:
            start = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            where = os.path.normpath(os.path.join(start, os.fsdecode(path)))
            # A link in the middle is followed, one at the end is meant itself.
            where = os.path.join(os.path.realpath(os.path.dirname(where)), os.path.basename(where))
        relative = os.path.relpath(where, self.folder)
        return None if relative == ".." or relative.startswith("../") else relative

    def inode(self, fd: int) -> int | None:
        """The inode of an open file below the folder; None of any other, and where it has no name any more."""
        if not self._active:
            return None
        found = os.fstat(fd)
        return found.st_ino if found.st_nlink and self.path(fd) is not None else None

    def wrote(self, fd: int, offset: int, data: bytes, durable: bool = False) -> None:
        """Note bytes that were written through a descriptor."""
        if data and (inode := self.inode(fd)) is not None:
            durable = durable or bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DSYNC)
            self.note(events.Wrote, inode, offset, data, durable)

    def opened(self, path: Any, existed: bool, fd: int, flags: int, dir_fd: int | None = None) -> None:
        """Note that a file was made or cut off by opening it."""
        if (inode := self.inode(fd)) is None:
            return
        if not existed:
            self.note(events.Made, self.path(path, dir_fd), inode, "file")
        elif flags & os.O_TRUNC:
            self.note(events.Resized, inode, 0)

    def _open_stream(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """As the built-in: of a file below the folder that may be written, over a raw file that takes notes."""
        with self._lock:
            if not (self._active and set(mode) & set("wax+") and self.path(file) is not None):
                return _IO_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
            existed = isinstance(file, int) or os.path.lexists(file)
            raw = _RecordedFile(self, file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if opener is None and not isinstance(file, int):
                self.opened(file, existed, raw.fileno(), os.O_TRUNC if "w" in mode else 0)
        if "b" in mode and buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)


class _RecordedFile(io.FileIO):
    """A raw file that notes what goes into it."""

    def __init__(self, recording: Recording, file: Any, mode: str, closefd: bool, opener: Any) -> None:
        super().__init__(file, mode, closefd, opener)
        self._recording = recording

    def write(self, data: Any) -> int:
        with self._recording.lock:
            offset = _position(self.fileno())
            size = super().write(data)
            self._recording.wrote(self.fileno(), offset, bytes(memoryview(data).cast("B")[:size]))
        return size

    def truncate(self, size: int | None = None) -> int:
        with self._recording.lock:
            length = super().truncate(size)
            if (inode := self._recording.inode(self.fileno())) is not None:
                self._recording.note(events.Resized, inode, length)
        return length


def _position(fd: int) -> int:
    """Where the next write will land."""
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
        return os.fstat(fd).st_size
    return os.lseek(fd, 0, os.SEEK_CUR) if os.path.isfile(f"/proc/self/fd/{fd}") else 0


def _caller() -> str:
    """Who asks: file, line and function, and those of its caller; without the library and the door to the drive."""
    frame, places = sys._getframe(1), []
    while frame is not None and len(places) < 2:
        code = frame.f_code
        if not code.co_filename.endswith(_NEVER_CALLERS):
            places.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return ", from ".join(places)


def _stand_in(method: Callable[..., Any], recording: Recording, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        with recording.lock:
            return method(recording, real, *arguments, **more)

    return call


# Each of these makes a call of `os` and notes it. Their arguments are those of the call.


def _open(r: Recording, real: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    within = r.path(path, dir_fd) is not None
    existed = not (within and flags & os.O_CREAT) or _exists(path, dir_fd)
    fd: int = real(path, flags, mode, dir_fd=dir_fd)
    if within and flags & (os.O_CREAT | os.O_TRUNC):
        r.opened(path, existed, fd, flags, dir_fd)
    return fd


def _exists(path: Any, dir_fd: int | None) -> bool:
    try:
        os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _write(r: Recording, real: Any, fd: int, data: Any) -> int:
    offset = _position(fd)
    size: int = real(fd, data)
    r.wrote(fd, offset, bytes(memoryview(data).cast("B")[:size]))
    return size


def _writev(r: Recording, real: Any, fd: int, buffers: Any) -> int:
    offset = _position(fd)
    size: int = real(fd, buffers)
    r.wrote(fd, offset, b"".join(map(bytes, buffers))[:size])
    return size


def _pwrite(r: Recording, real: Any, fd: int, data: Any, offset: int) -> int:
    size: int = real(fd, data, offset)
    r.wrote(fd, offset, bytes(memoryview(data).cast("B")[:size]))
    return size


def _pwritev(r: Recording, real: Any, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
    size: int = real(fd, buffers, offset, flags)
    r.wrote(fd, offset, b"".join(map(bytes, buffers))[:size], bool(flags & (os.RWF_DSYNC | os.RWF_SYNC)))
    return size


def _sendfile(r: Recording, real: Any, out_fd: int, in_fd: int, offset: int | None, count: int, **more: Any) -> int:
    start = _position(out_fd)
    size: int = real(out_fd, in_fd, offset, count, **more)
    if size and r.inode(out_fd) is not None:
        with _IO_OPEN(f"/proc/self/fd/{out_fd}", "rb") as file:
            r.wrote(out_fd, start, os.pread(file.fileno(), size, start))
    return size


def _truncate(r: Recording, real: Any, path: Any, length: int) -> None:
    real(path, length)
    if r.path(path) is not None:
        r.note(events.Resized, os.stat(path).st_ino, length)


def _ftruncate(r: Recording, real: Any, fd: int, length: int) -> None:
    real(fd, length)
    if (inode := r.inode(fd)) is not None:
        r.note(events.Resized, inode, length)


def _posix_fallocate(r: Recording, real: Any, fd: int, offset: int, length: int) -> None:
    real(fd, offset, length)
    if (inode := r.inode(fd)) is not None:
        r.note(events.Allocated, inode, offset + length)


def _fsync(r: Recording, real: Any, fd: Any) -> None:
    real(fd)
    number = fd if isinstance(fd, int) else fd.fileno()
    if (inode := r.inode(number)) is not None:
        r.note(events.Synced, inode, r.path(number), _caller())


def _mkdir(r: Recording, real: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
    real(path, mode, dir_fd=dir_fd)
    if (where := r.path(path, dir_fd)) is not None:
        r.note(events.Made, where, os.stat(path, dir_fd=dir_fd).st_ino, "folder")


def _symlink(r: Recording, real: Any, source: Any, path: Any, *more: Any, dir_fd: int | None = None) -> None:
    real(source, path, *more, dir_fd=dir_fd)
    if (where := r.path(path, dir_fd)) is not None:
        inode = os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_ino
        r.note(events.Made, where, inode, "link", os.fsdecode(source))


def _link(r: Recording, real: Any, source: Any, path: Any, **more: Any) -> None:
    real(source, path, **more)
    if (where := r.path(path, more.get("dst_dir_fd"))) is not None:
        assert r.path(source, more.get("src_dir_fd")) is not None, f"{source} comes from outside the recorded folder"
        r.note(events.Linked, where, os.stat(path, dir_fd=more.get("dst_dir_fd"), follow_symlinks=False).st_ino)


def _rename(
    r: Recording, real: Any, source: Any, path: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
) -> None:
    places = r.path(source, src_dir_fd), r.path(path, dst_dir_fd)
    assert (places[0] is None) == (places[1] is None), f"{source} -> {path} crosses the border of the recorded folder"
    real(source, path, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    if places[0] is not None:
        r.note(events.Renamed, *places)


def _remove(r: Recording, real: Any, path: Any, *, dir_fd: int | None = None) -> None:
    where = r.path(path, dir_fd)
    real(path, dir_fd=dir_fd)
    if where is not None:
        r.note(events.Removed, where)


_MADE = (_open, _write, _writev, _pwrite, _pwritev, _sendfile, _truncate, _ftruncate, _posix_fallocate, _fsync)
_OS_CALLS = {call.__name__[1:]: call for call in (*_MADE, _mkdir, _symlink, _link, _rename, _remove)}
_OS_CALLS |= {"fdatasync": _fsync, "replace": _rename, "unlink": _remove, "rmdir": _remove}
