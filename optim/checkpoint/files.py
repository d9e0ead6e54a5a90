"""The files of a checkpoint: written durably, listed with size and digest, put in place by renaming.

A checkpoint with tag T is the folder T. It is written as ``T.partial``, and only renamed when every byte of it is on
the drive. One that is saved again is ``T.replaced`` for the moment between two renames. ``latest`` names the newest. A
folder is only ever removed if it has our marker in it, and is no symbolic link.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.aio_native.starting import Pending, ThreadPool
from nvme_offload.offload.errors import CheckpointError, StateError
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.sync import sync_file, sync_folder
from .digests import BLOCKS, PORTION_BYTES, BlockDigest, digest_of_file

LATEST = "latest"
MANIFEST = "manifest.json"
PARTIAL, REPLACED = ".partial", ".replaced"
MARKER = ".nvme-offload-checkpoint"
"""An empty file in every folder that we made: what we may remove again, whatever it is called."""
_UNMARKED = ".nvme-offload-unmarked"
"""A folder is called this as long as it has no marker yet, or no more.

After a power loss it may have one all the same, and other files of ours: of what was not synced a drive keeps any part.
"""
_MOST_UNDER_WAY = 3
"""Portions of a file: so many are written in the time in which a tensor is read and joined."""
_KNOWN = {MANIFEST, LATEST, ".metadata", ".metadata.tmp", "state.json", "objects.pt"}
_MISPLACED = "unexpected pos"  # torch's container of tensors, when it was not told of what ended a write


class FileRecord(NamedTuple):
    """A file must be this to be the one that was written."""

    size_bytes: int
    digest: str
    host: str = ""
    """The host whose ranks wrote it, where each host has a folder of its own and others have no such file."""

    def as_json(self) -> dict[str, Any]:
        """Return the entry of the manifest."""
        return {"size_bytes": self.size_bytes, BLOCKS: self.digest} | ({"host": self.host} if self.host else {})

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Self:
        """Return what an entry of a manifest says; ValueError, LookupError or TypeError if it is none."""
        [kind] = said.keys() - {"size_bytes", "host"}
        if kind != BLOCKS:
            raise ValueError(f"digest of kind {kind!r}, which this version does not know")
        return cls(int(said["size_bytes"]), str(said[kind]), str(said.get("host", "")))


class HashingStream:
    """A file being written, in portions of some MiB: knows its position and the digest of what went into it.

    `thread` digests and writes them while the next ones are filled. Where the file system can, they go past the page
    cache, which would copy them and keep them from others.
    """

    def __init__(self, file: FileIO, thread: ThreadPool) -> None:
        self._file = file
        self._thread = thread
        self._under_way: deque[tuple[torch.Tensor, Pending]] = deque()
        self._portion = self._spare()
        self._filled = 0
        self._digest = BlockDigest()
        self._size_bytes = 0
        self._be_direct(True)

    def write(self, data: Any) -> int:
        """Append bytes to the file and to its digest."""
        given, done = np.frombuffer(data, np.uint8), 0  # which copies without the interpreter's lock: `thread` goes on
        while done < len(given):
            taken = min(len(given) - done, PORTION_BYTES - self._filled)
            self._portion.numpy()[self._filled : self._filled + taken] = given[done : done + taken]
            self._filled += taken
            done += taken
            if self._filled == PORTION_BYTES:
                self._hand_over()
        self._size_bytes += done
        return done

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size_bytes

    def flush(self) -> None:
        """Do nothing: torch asks for it after each tensor, and `finish` is for all."""

    def finish(self) -> None:
        """Hand everything to the kernel, and have it on the drive."""
        for _, written in self._under_way:
            written.result()
        self._be_direct(False)  # the last portion has any length
        self._put(self._portion[: self._filled])
        sync_file(self._file.fileno())

    @property
    def record(self) -> FileRecord:
        """Size and digest of everything written, once it is finished."""
        return FileRecord(self._size_bytes, self._digest.hexdigest())

    def _hand_over(self) -> None:
        spare = self._spare()
        self._under_way.append((self._portion, self._thread.submit(self._put, self._portion)))
        self._portion, self._filled = spare, 0

    def _spare(self) -> torch.Tensor:
        """Return a portion to fill, when there is one; raises what ended the writing, as often as it is called."""
        if len(self._under_way) < _MOST_UNDER_WAY:
            return HostRegion(PORTION_BYTES).view(torch.uint8, 0, PORTION_BYTES)
        self._under_way[0][1].result()
        return self._under_way.popleft()[0]

    def _put(self, portion: torch.Tensor) -> None:
        self._digest.update(portion)
        left = portion.numpy().data
        while left:
            left = left[self._file.write(left) :]

    def _be_direct(self, direct: bool) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        with contextlib.suppress(OSError):  # EINVAL: this file system has only the page cache
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[HashingStream]:
    """Open a new file whose bytes are on the drive when the block ends.

    What ended a write within torch.save is raised itself, be it Ctrl-C or a full disk: torch goes on to write the end
    of its container, and complains of the position in the place of it.
    """
    with path.open("wb", buffering=0) as file, contextlib.closing(ThreadPool(1, "write")) as thread:
        stream = HashingStream(file, thread)
        try:
            yield stream
        except RuntimeError as error:
            if error.__context__ is not None and _MISPLACED in str(error):
                raise error.__context__ from None
            raise
        stream.finish()


def write_durably(path: Path, data: bytes) -> FileRecord:
    """Write a small file; its bytes are on the drive afterwards, its name is when the folder is synced."""
    with durable_file(path) as stream:
        stream.write(data)
    return stream.record


def locked(root: Path) -> Descriptor:
    """Keep others from saving into this folder until this is closed or the process dies; StateError if one does."""
    descriptor = Descriptor(os.open, root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not descriptor.lock():
            raise StateError(str(root), "a folder that nobody else is saving into", "another run saves there")
    except BaseException:
        descriptor.close()
        raise
    return descriptor


def check_tag(tag: str) -> None:
    """Raise ValueError for a tag that cannot be the name of a folder of its own."""
    is_line = tag == tag.strip() and tag.isprintable()  # as the file `LATEST` gives it back
    if not tag or not is_line or tag in (LATEST, ".", "..") or "/" in tag or tag.endswith((PARTIAL, REPLACED)):
        raise ValueError(
            f"tag {tag!r}: must be the name of a folder, printable, without '/' and without spaces at its ends, not "
            f"{LATEST!r}, and not ending in {PARTIAL!r} or {REPLACED!r}"
        )


def begin(root: Path, tag: str) -> Path:
    """Clear up after killed runs and make the folder to write into; FileExistsError where `tag` is no checkpoint."""
    _clear_up(root)
    final, partial = root / tag, root / (tag + PARTIAL)
    is_checkpoint = _is_ours(final) and (final / MANIFEST).is_file()
    for path, is_ours in ((partial, False), (final, is_checkpoint)):
        if os.path.lexists(path) and not is_ours:
            raise FileExistsError(errno.EEXIST, "exists and is no checkpoint of this program; choose another tag", path)
    unmarked = root / _UNMARKED
    unmarked.mkdir()
    (unmarked / MARKER).touch()
    sync_folder(unmarked)  # under the other name nobody would remove it without its marker
    return unmarked.rename(partial)


def publish(partial: Path, tag: str) -> Path:
    """Give a whole checkpoint its name, replacing one of the same tag, and make it the latest."""
    root = partial.parent
    final, replaced = root / tag, root / (tag + REPLACED)
    write_durably(partial / LATEST, tag.encode())
    sync_folder(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_folder(root)
    os.replace(final / LATEST, root / LATEST)
    sync_folder(root)
    remove(replaced)
    return final


def discard(partial: Path, tag: str) -> None:
    """Leave, after a save that failed, what was there before it, and nothing else."""
    remove(partial)
    final, replaced = partial.parent / tag, partial.parent / (tag + REPLACED)
    if _is_ours(replaced) and not os.path.lexists(final):
        replaced.rename(final)


def remove(folder: Path) -> None:
    """Remove a folder of ours, and nothing in it that is not ours."""
    if not _is_ours(folder):
        return
    _remove_files(folder)
    if any(path.name != MARKER for path in folder.iterdir()):
        return  # something of somebody else's
    unmarked = folder.rename(folder.with_name(_UNMARKED))
    sync_folder(folder.parent)  # not without its marker as long as it has the other name
    _remove_unmarked(unmarked)


def _remove_files(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name in _KNOWN or path.suffix == ".distcp":
            path.unlink()


def _remove_unmarked(folder: Path) -> None:
    _remove_files(folder)
    (folder / MARKER).unlink(missing_ok=True)
    folder.rmdir()


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder itself, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def _is_ours(path: Path) -> bool:
    marker = path / MARKER
    return _is_folder(path) and marker.is_file() and not marker.is_symlink()


def find(root: Path, tag: str | None) -> Path | None:
    """Return the folder of a checkpoint, or raise CheckpointError; None if `tag` is None and nothing was ever saved."""
    if tag is None:
        latest = root / LATEST
        try:
            tag = latest.read_text(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # it is no fresh start where something was saved
            raise CheckpointError(latest, f"cannot be read: {error.strerror}; name a tag") from error
        try:
            check_tag(tag)
        except ValueError as error:
            raise CheckpointError(latest, f"is damaged: {error}; name a tag") from None
    else:
        tag = str(tag)  # a number too, as a save takes it
        check_tag(tag)
    for path in (root / tag, root / (tag + REPLACED)):  # the second: killed between two renames
        if path.is_dir():
            return path
    present = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))
    raise CheckpointError(root / tag, f"does not exist; checkpoints there: {', '.join(present) or 'none'}")


def write_manifest(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """List every file with its size and digest, and the digest of that list."""
    files = {name: record.as_json() for name, record in sorted(records.items())}
    listed = json.dumps({"files": files, "sha256": _digest(files)}, indent=1)
    write_durably(folder / MANIFEST, listed.encode())


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return what files there must be; CheckpointError if the list is missing or damaged."""
    return _read_list(folder)[1]


def _read_list(folder: Path) -> tuple[str, dict[str, FileRecord]]:
    """Return what files there must be, after the digest of that list, which says what save it is of."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        files = content["files"]
        if content["sha256"] != _digest(files):
            raise CheckpointError(path, "is damaged: its digest is wrong; load another checkpoint")
        return content["sha256"], {name: FileRecord.from_json(record) for name, record in files.items()}
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}; load another checkpoint") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(path, f"is damaged: {error}; load another checkpoint") from error


class HostSaves(NamedTuple):
    """The whole checkpoints in the folder of one host that a load may mean, by the digest of their manifests."""

    folders: dict[str, tuple[Path, dict[str, FileRecord]]]
    named: str | None = None
    """The one that the tag names, or `latest`."""
    unnamed: frozenset[str] = frozenset()
    """This host was stopped before it gave these their name, or made them the latest."""
    tag: str | None = None

    @classmethod
    def below(cls, root: Path, tag: str | None) -> Self:
        """Look what is there; CheckpointError where a manifest is damaged."""
        found = cls({}, tag=tag)
        with contextlib.suppress(CheckpointError):  # it is not there: perhaps it is on other hosts
            if (folder := find(root, tag)) is not None:
                save, records = _read_list(folder)
                found = cls({save: (folder, records)}, save, tag=folder.name)
        stopped = {
            folder: _read_list(folder)
            for folder in (path.parent for path in root.glob(f"*/{MANIFEST}"))
            if folder.name.endswith(PARTIAL) or (folder / LATEST).exists()
        }
        folders = {save: (path, records) for path, (save, records) in stopped.items()}
        return found._replace(folders={**folders, **found.folders}, unnamed=frozenset(folders))


def verify(path: Path, record: FileRecord, advance: Callable[[int], None] = lambda size_bytes: None) -> None:
    """Read a whole file; CheckpointError if it is not what was written. `advance` is told of the bytes as they come."""
    try:
        with path.open("rb", buffering=0) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != record.size_bytes:
                problem = f"is damaged: it has {actual} bytes, {record.size_bytes} were written"
                raise CheckpointError(path, f"{problem}; load another checkpoint")
            digest = digest_of_file(file.fileno(), actual, advance)
    except FileNotFoundError:
        raise CheckpointError(path, "is missing; load another checkpoint") from None
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}; load another checkpoint") from error
    if digest != record.digest:
        raise CheckpointError(path, "is damaged: its bytes are not those that were written; load another checkpoint")


def _clear_up(root: Path) -> None:
    """Undo what a killed save left behind; the whole checkpoint that it was replacing gets its name back."""
    if _is_folder(unmarked := root / _UNMARKED):
        _remove_unmarked(unmarked)
    for replaced in filter(_is_ours, list(root.glob("*" + REPLACED))):
        final = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if os.path.lexists(final):
            remove(replaced)
        elif (replaced / MANIFEST).is_file():
            replaced.rename(final)
    for partial in list(root.glob("*" + PARTIAL)):
        remove(partial)


def _digest(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
