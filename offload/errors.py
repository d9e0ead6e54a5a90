"""Every exception and warning this project raises on purpose.

What the caller can do about it decides the family, so that ``except ValueError`` and ``except OSError``
mean what they mean elsewhere::

    ValueError
      ConfigError          the configuration section is wrong: change the file
      WeightsError         weight files do not fit the model, or are no intact safetensors files
    OSError
      SwapIOError          a request failed: path, offset, size, direction, errno, and what to do
        MissingError       a file or a folder is not there; ExistsError: one that has to be new is there
        RemovedError       files of a durable run that goes on were removed or moved: which, and what to do
        EngineLostError    the engine broke, and every request fails: what forbade it, and what to do
        OutOfSpaceError    the file system cannot hold the swap file: bytes needed and bytes free
        WeightFileError    a file whose weights are read in place is not what it was: which, and what changed
        ForeignFolderError a run's folder, or what is in it, may be somebody else's: which, and why
      CheckpointWriteError a checkpoint could not be written; nothing of it is left, earlier ones are as they were
      HalfRenamedError     an export of weights failed between its last renames: the folder holds a mixture
    RuntimeError
      EngineUnavailable    the engine of ``aio.engine`` cannot run here: why, and what would change it (aio_native's)
      OffloadError         the program used an object in a way it does not allow
        ClosedError        after it was closed
        ForkError          in a process other than the one that made it
        StateError         in a state that does not allow the operation
        PeerError          another rank failed, and this one cannot go on without it: which, where and of what
        CorruptionError    what was read back is not what was written
        CheckpointError    a checkpoint cannot be loaded: which file, and why; nothing has changed
        ResumeError        a durable run cannot be taken up: which, and why; nothing has changed
    TypeError
      BlockOrderError      a model cannot be computed block by block: what it does, and perhaps what to write instead
    UserWarning
      ConfigWarning        a key of the configuration section has no meaning here

All of them survive pickling, so a worker process can hand them to its parent.
"""

import errno as errno_names
import os
import resource
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from .foreign import printable
from .units import format_bytes

E = TypeVar("E", bound=Enum)

Direction = Literal["read", "write", "allocate"]

UNEXPANDED = "$ is not expanded here: write the folder's name out, or in Python os.path.expandvars(...)"
"""Said of a path with a $ in it that is not there."""

_REMEDIES = {
    errno_names.ENOSPC: "the file system is full: free space on it (`df -i`: or inodes), or put nvme_path on another "
    "one",
    errno_names.EDQUOT: "a quota (of user, group or folder) is used up: free some of it, have it raised, or put "
    "nvme_path on another file system",
    errno_names.EIO: "the drive reported an error, and this range cannot be trusted: look at `dmesg` and "
    "`smartctl -a`, and put nvme_path on another drive",
    errno_names.ESTALE: "the file system behind this mount is another one now, or gone: unmount it (`umount -l`), "
    "mount it again and start again, or put nvme_path on another drive",
    errno_names.ENOTCONN: "the process or the server behind this mount has ended (FUSE, a network): unmount it "
    "(`umount -l`), mount it again and start again, or put nvme_path on another drive",
    errno_names.EINVAL: "most often direct I/O with an unaligned address, offset or size, or a file system "
    "without direct I/O: keep aio.block_size a multiple of 4096, put nvme_path on ext4 or XFS, or set "
    'aio.direct to "optional"',
    errno_names.EMFILE: "this process has as many files open as it may: raise the limit (`ulimit -n`), or close what "
    "it does not need; each optimizer and each TensorSwapper has about seven of its own",
    errno_names.ENFILE: "this machine has as many files open as it may: raise `sysctl fs.file-max`, or end what has "
    "them",
    errno_names.EFBIG: "no file here may be so long: raise the limit (`ulimit -f`), or use another file system",
    errno_names.ENODATA: "the file ended before this range did: something truncated it while it was in use; "
    "leave the files below nvme_path alone while a run is alive",
    errno_names.ENOENT: "there is no such folder: make it, or choose another nvme_path",
    errno_names.ENOTDIR: "this is no folder: choose another nvme_path",
    errno_names.EPERM: "the file system takes no such files, as /proc and /sys do not, or a folder is immutable "
    "(`lsattr -d`): choose another nvme_path",
    errno_names.EROFS: "the file system is mounted read-only (ext4 and XFS do this after an error, see "
    "`dmesg`): remount it or put nvme_path on another one",
    errno_names.EACCES: "this user may not use the path: give it permission or choose another nvme_path",
}


class ConfigError(ValueError):
    """The configuration section is wrong. `problems` holds one line for each thing to change."""

    def __init__(self, problems: Sequence[str], source: str = "config") -> None:
        super().__init__(tuple(problems), source)
        self.problems = tuple(problems)
        self.source = source

    def __str__(self) -> str:
        return _listed(self.source, self.problems)


def _listed(source: str | Path, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return printable(f"{source}: {problems[0]}")
    return printable("\n  ".join([f"{source}: {len(problems)} problems", *problems]))


class WeightsError(ValueError):
    """Weight files are damaged, or do not fit the model. `problems` holds one line for each thing found."""

    def __init__(self, path: str | os.PathLike[str], *problems: str) -> None:
        super().__init__(os.fspath(path), *problems)
        self.path = Path(path)
        self.problems = problems

    def __str__(self) -> str:
        return _listed(self.path, self.problems)


class ConfigWarning(UserWarning):
    """A key of the configuration section is accepted and has no meaning here."""


class SwapIOError(OSError):
    """A request to a swap file failed.

    ``errno`` and ``filename`` are OSError's own; ``extent`` says in words whose bytes these were.
    """

    _arguments: ClassVar[tuple[str, ...]] = ("errno", "path", "offset", "size_bytes", "direction", "extent")

    def __init__(
        self,
        errno: int,
        *,
        path: str | os.PathLike[str],
        direction: Direction,
        offset: int = 0,
        size_bytes: int = 0,
        extent: str = "",
    ) -> None:
        if direction == "write" and errno in (errno_names.EIO, errno_names.EINVAL):
            room = resource.getrlimit(resource.RLIMIT_FSIZE)[0] - offset
            if 0 <= room < size_bytes:  # the kernel cut the write short inside a block, where direct I/O cannot end
                errno = errno_names.EFBIG
        super().__init__(errno, os.strerror(errno), os.fspath(path))
        self.path = Path(path)
        self.offset = offset
        self.size_bytes = size_bytes
        self.direction = direction
        self.extent = extent

    @property
    def remedy(self) -> str:
        """Return what to do about the error."""
        if self.errno == errno_names.ENOENT and "$" in str(self.path):
            return UNEXPANDED
        return _REMEDIES.get(self.errno or 0, "look at `dmesg`, and put nvme_path on another file system")

    def __str__(self) -> str:
        name = errno_names.errorcode.get(self.errno or 0, f"errno {self.errno}")
        extent = f" ({self.extent})" if self.extent else ""
        if self.size_bytes:
            what = f"{self.direction} of {self.size_bytes} bytes at offset {self.offset} of {self.path}{extent} failed"
        else:  # it did not come to a request: the place could not be opened, or made
            what = f"{self.path}{extent} cannot be used"
        return f"{what}: {name}, {self.strerror}; {self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = {name: getattr(self, name) for name in self._arguments}
        return partial(type(self), **arguments), (), self.__dict__


class MissingError(SwapIOError, FileNotFoundError):
    """A file or a folder is not there."""


class ExistsError(SwapIOError, FileExistsError):
    """A file or a folder that has to be new is there."""


class RemovedError(SwapIOError):
    """Somebody removed or moved files of a durable run that goes on; `extent` names them."""

    @property
    def remedy(self) -> str:
        """Return what to do about the error."""
        return (
            "somebody removed or moved what this run has open. It goes on in files that nobody finds any more, so what "
            "it commits cannot be resumed. If they were moved, move them back: the next commit lasts. Else save a "
            "checkpoint while this process lives (`engine.save_checkpoint`, or `torch.save` of the state dicts), and "
            "start again from that"
        )


class EngineLostError(SwapIOError):
    """The engine that does the I/O broke, for good; the drive did not fail."""

    @property
    def remedy(self) -> str:
        """Return what to do about the error."""
        return (
            "this is not the drive: something has forbidden the engine's system calls since it was opened, such as "
            "a seccomp filter that refuses io_uring_enter. It will not come back in this process: end it, and resume "
            'from a checkpoint where they are allowed, or with aio.engine = "auto", which goes on with another engine'
        )


class OutOfSpaceError(SwapIOError):
    """The file system cannot hold the swap file; nothing has been written."""

    _arguments = ("path", "needed_bytes", "free_bytes", "errno")

    def __init__(
        self, *, path: str | os.PathLike[str], needed_bytes: int, free_bytes: int, errno: int = errno_names.ENOSPC
    ) -> None:
        super().__init__(errno, path=path, offset=0, size_bytes=needed_bytes, direction="allocate")
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes

    def __str__(self) -> str:
        needed, free = format_bytes(self.needed_bytes), format_bytes(self.free_bytes)
        exact = f"{self.needed_bytes} and {self.free_bytes} bytes"
        seems_enough = self.errno == errno_names.ENOSPC and self.needed_bytes <= self.free_bytes
        maps = "; the map of the file needs blocks, too" if seems_enough else ""
        return f"{super().__str__()}; needed {needed}, free {free} ({exact}){maps}"


class WeightFileError(SwapIOError):
    """A file whose weights are read in place was changed, exchanged or cannot be read; `problem` says which.

    Nothing of it was used.
    """

    _arguments = ("errno", "path", "problem")

    def __init__(self, errno: int, path: str | os.PathLike[str], problem: str) -> None:
        super().__init__(errno, path=path, direction="read")
        self.problem = problem

    @property
    def remedy(self) -> str:
        """Return what to do about the error."""
        return (
            "weights that are frozen are read from it in every step: bring the file back as it was, and leave it alone "
            'while a run needs it; or write zero_optimization.offload_param.frozen = "copy", which copies it once'
        )

    def __str__(self) -> str:
        name = errno_names.errorcode.get(self.errno or 0, f"errno {self.errno}")
        return f"{self.path}: {self.problem} ({name}, {self.strerror}); {self.remedy}"


class ForeignFolderError(SwapIOError):
    """A run's folder is not this user's alone, or a link is in it: nothing of it was used or changed."""

    _arguments = ("path", "problem")

    def __init__(self, path: str | os.PathLike[str], problem: str) -> None:
        super().__init__(errno_names.EPERM, path=path, direction="allocate")
        self.problem = problem

    @property
    def remedy(self) -> str:
        """Return what to do about the error."""
        return (
            "somebody else may have made it: look at what it is and remove it, or choose another nvme_path or name of "
            "the run. If it is yours, for example after a restore: `chown -R` it to this user, and `chmod 0700`"
        )

    def __str__(self) -> str:
        return f"{self.path} {self.problem}; {self.remedy}"


class OffloadError(RuntimeError):
    """An object was used in a way it does not allow."""


class ClosedError(OffloadError):
    """The object was closed before this call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"{self.name} is closed; make a new one, or close it after its last use"


class ForkError(OffloadError):
    """The object belongs to another process: rings, locks and swap files do not survive a fork."""

    def __init__(self, name: str, owner_pid: int, pid: int) -> None:
        super().__init__(name, owner_pid, pid)
        self.name = name
        self.owner_pid = owner_pid
        self.pid = pid

    def __str__(self) -> str:
        return (
            f"{self.name} was made in process {self.owner_pid} and is used in process {self.pid}; "
            "make one in each process, after the fork"
        )


class StateError(OffloadError):
    """The present state of `name` does not allow the operation."""

    def __init__(self, name: str, expected: str, actual: str) -> None:
        super().__init__(name, expected, actual)
        self.name = name
        self.expected = expected
        self.actual = actual

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, actual {self.actual}"


def check_may_follow(name: str, may_follow: Mapping[E, Collection[E]], present: E, following: E) -> None:
    """Raise StateError, about `name`, where the table of a state does not have `following` behind the present one."""
    if following not in may_follow[present]:
        expected = " or ".join(str(before.value) for before, after in may_follow.items() if following in after)
        raise StateError(name, f"{expected} before {following.value}", str(present.value))


class PeerError(OffloadError):
    """Another rank failed, and this one was in a collective with it."""

    def __str__(self) -> str:
        return f"{self.args[0]}; this rank cannot go on without it: end all ranks and resume from a checkpoint"


class BlockOrderError(TypeError):
    """A model cannot be computed block by block. The message says what it does, and perhaps what to write instead."""


class CorruptionError(OffloadError):
    """A checksum shows that the bytes read back are not the bytes written."""

    def __init__(self, path: str | os.PathLike[str], extent: str, expected: int, actual: int) -> None:
        super().__init__(path, extent, expected, actual)
        self.path = Path(path)
        self.extent = extent
        self.expected = expected
        self.actual = actual

    def __str__(self) -> str:
        return (
            f"{self.path} ({self.extent}): checksum {self.expected:#010x} was written, {self.actual:#010x} "
            "was read; the drive or another process changed the file: look at `dmesg` and `smartctl -a`, and "
            "go back to a checkpoint"
        )


class CheckpointWriteError(OSError):
    """A checkpoint or an export could not be written; nothing of it is left, earlier ones are as they were.

    Except for an export that fails between its last renames: then `left` says what there is.
    """

    def __init__(
        self,
        errno: int,
        path: str | os.PathLike[str],
        detail: str = "",
        left: str = "nothing of it is left and earlier ones are as they were",
    ) -> None:
        super().__init__(errno, os.strerror(errno), os.fspath(path))
        self.path = Path(path)
        self.detail = detail
        self.left = left

    def __str__(self) -> str:
        name = errno_names.errorcode.get(self.errno or 0, f"errno {self.errno}")
        detail = f" ({self.detail})" if self.detail else ""
        remedy = "free space or give permission there, or choose another folder"
        if self.errno in (errno_names.EMFILE, errno_names.EFBIG):  # another folder has these limits, too
            remedy = _REMEDIES[self.errno]
        return f"writing {self.path} failed: {name}, {self.strerror}{detail}; {self.left}: {remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errno, self.path, self.detail, self.left), self.__dict__


class HalfRenamedError(OSError):
    """An export failed between two renames: shards of it and of an earlier one stay, without an index."""


class _CannotGoOnError(OffloadError):
    def __init__(self, path: str | os.PathLike[str], problem: str) -> None:
        super().__init__(path, problem)
        self.path = Path(path)
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"


class CheckpointError(_CannotGoOnError):
    """A checkpoint, or one file of it, cannot be loaded. The state of the run has not changed."""


class ResumeError(_CannotGoOnError):
    """A durable run cannot go on from what it committed. Nothing has changed."""
