"""Committed steps as somebody reads them who is in no run: nothing is changed, nor is anything made or promised."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..errors import CorruptionError, ResumeError, StateError, SwapIOError
from ..host.region import HostRegion
from ..storage import drive
from ..storage.run_directory import SWAP_NAME
from ..storage.swap_file import DirectPolicy, SwapFile, move_all
from ..storage.swap_space import SwapSpace
from .chain import Chain, check_rows
from .directory import ABOUT_NAME, read_about
from .identity import MADE_AGAIN, Identity, read_identity
from .manifest import Manifest
from .ring import ExtentRing
from .snapshots import Snapshots


class PinnedReader:
    """Reads chains of slots, one at a time, into memory of its own; somebody keeps them until all is read.

    It is for one thread, which need not be the one that trains: the two share nothing but open files.
    """

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self._memory = HostRegion(1)

    def read(self, chain: Chain, check: Callable[[HostRegion], object] = id) -> HostRegion:
        """Read a base and the log behind it, valid until the next is read. Raises StateError if there is no base.

        `check` raises CorruptionError for what is not as it was written: then another copy is read, if there is one.
        """
        copy, memory = self._space.copies.whole[0], self._read(chain)
        try:
            check(memory)
        except CorruptionError as error:
            if not self._space.copies.lose(copy, error):
                raise
            return self.read(chain, check)
        return memory

    def _read(self, chain: Chain) -> HostRegion:
        if chain.base is None:
            raise StateError("a pinned step", "a base of each slot", "none of one")
        extent = chain.reading(base_bytes=chain.base.content.size_bytes)
        if extent.size_bytes > self._memory.size_bytes:
            self._memory = HostRegion(extent.size_bytes)
        at = 0
        for fd, offset, size_bytes in extent.stripes:
            self._fill(fd, offset, at, size_bytes)
            at += size_bytes
        return self._memory

    def _fill(self, fd: int, offset: int, at: int, size_bytes: int) -> None:
        target = self._memory.view(torch.uint8, at, size_bytes).numpy().data
        copies, unit = self._space.copies, self._space.alignment
        while True:
            fd_read = copies.read_at(fd)
            path = self._space.path_of(fd_read)
            try:
                return move_all(drive.read_at, fd_read, path, "read", offset, target, unit=unit, extent="a pinned step")
            except SwapIOError as error:
                if not copies.lose_at(fd_read, error):
                    raise


class CommittedRank:
    """Reads what one rank of a run has committed; the run is to be `inventory.locked` as long as this is open."""

    def __init__(self, folders: Sequence[Path], others: Sequence[Path] = ()) -> None:
        """`others` are those of another copy, in the order of its paths: it is read where this one cannot be."""
        places = {folder: about for folder in folders if (about := read_about(folder)) is not None}
        self._folders = sorted(places, key=lambda folder: places[folder]["path"])
        where = folders[0]
        if not places:
            what = f"has no {ABOUT_NAME}: nothing was committed, or the file {MADE_AGAIN}"
            raise ResumeError(where, what)
        own = [(places[folder]["path"], places[folder]["num_paths"]) for folder in self._folders]
        if own != [(place, len(own)) for place in range(len(own))]:
            raise ResumeError(where, "is of a run with further paths: name the folders of nvme_path that it had")
        uuids = {about["uuid"] for about in places.values()}
        if len(uuids) > 1:
            further = ", ".join(str(folder) for folder in folders[1:])
            raise ResumeError(where, f"is of another run than {further}")
        (self.uuid,) = uuids
        paths, copies = [*self._folders, *others], 2 if others else 1
        self.space = SwapSpace(paths, direct="disabled", directory=_ReadOnly, copies=copies)

    @property
    def folder(self) -> Path:
        """The directory on the first path."""
        return self._folders[0]

    @property
    def steps(self) -> list[Manifest]:
        """Read the manifests that are whole, the newest first. Raises ResumeError if one names what no run writes."""
        return [*map(self._checked, Manifest.all_in(self.folder).values())]

    def _checked(self, manifest: Manifest) -> Manifest:
        check_rows(manifest, self.space.file_sizes, where=f"{self.folder}, manifest {manifest.sequence}")
        return manifest

    def snapshot(self, name: str) -> Manifest:
        """Read a snapshot that some rank has published. Raises ResumeError if it is not here, or damaged."""
        try:
            found = Snapshots(self.folder)
        except OSError as error:
            raise ResumeError(self.folder, f"cannot be read: {error.strerror}") from error
        if name in found.all:
            return self._checked(found.all[name])
        if damaged := found.unreadable.get(name):
            raise ResumeError(damaged[0], "is damaged")
        raise ResumeError(self.folder, f"has no snapshot {name!r}, and another rank has")

    def identity(self, manifest: Manifest) -> Identity:
        """Return what the run was when it committed this. Raises ResumeError if nobody knows any more."""
        return read_identity(self.folder, manifest.identity)

    def extents(self, alignment: int) -> ExtentRing:
        """Make a ring for reading slots that were laid out with this alignment."""
        return ExtentRing(self.space, incarnation=0, sequence=1, alignment=alignment)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self.space.close()


class _ReadOnly:
    """A `SwapDirectory` of which nothing is changed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open_swap(self, direct: DirectPolicy) -> SwapFile:
        return SwapFile(self.path / SWAP_NAME, direct, read_only=True)

    def leave(self) -> None:
        """Keep it."""
