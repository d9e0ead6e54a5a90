"""The swap space of one process: a swap file on each path, and extents striped over them."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Protocol

from ..errors import ForeignFolderError, OutOfSpaceError, SwapIOError
from ..sync import sync_data
from . import drive
from .copies import OUT_OF_FILES, DriveCopies
from .extent import Extent, Stripe
from .run_directory import RunDirectory
from .swap_file import DirectPolicy, SwapFile

Size = int | tuple[int, ...]
"""Bytes of an extent; of several parts, each split over the paths by itself: moved alone, it keeps all drives busy."""


class SwapDirectory(Protocol):
    """A directory has the swap file of one path: `RunDirectory`, or one that outlives its run."""

    @property
    def path(self) -> Path:
        """The directory."""

    def open_swap(self, direct: DirectPolicy) -> SwapFile:
        """Open the swap file, which is made if there is none.

        Raises:
            SwapIOError: it cannot be opened, or has no direct I/O although that is required.
        """

    def leave(self) -> None:
        """The swap file is closed: keep the directory or delete it. Idempotent."""


class SwapSpace:
    """Preallocated files on one or several paths, which exist.

    An extent is split over the paths by weight, in multiples of the alignment, so that several drives work on one
    transfer without RAID. All files are in run directories of their own and disappear with ``close()``; what a killed
    process leaves is removed by the next run on the same path. In directories that `directory` makes files may stay,
    and be opened again: then all of their space is free at first, but for what is claimed.

    With several `copies` the first of as many parts of `paths` has the extents, and each other part has all of them
    once more. Copies that cannot be opened are in `unopened`, with the reason, and one at least can be.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        weights: Sequence[float] | None = None,
        direct: DirectPolicy,
        directory: Callable[[Path], SwapDirectory] = RunDirectory,
        copies: int = 1,
    ) -> None:
        self.paths = tuple(paths)
        num_paths = len(self.paths) // copies
        shares = [Fraction(weight) for weight in (weights or [1] * num_paths)]
        self._shares = [share / sum(shares) for share in shares]
        self._directories: list[SwapDirectory] = []
        self.all_files: list[SwapFile] = []
        """These are of each path of each copy."""
        self.unopened: list[SwapIOError] = []
        """Why copies could not be opened, one each."""
        self._lock = threading.Lock()
        self._serials = count()
        self._owned: dict[tuple[Stripe, ...], int] = {}
        """Extents that are handed out, with a number of their own each time."""
        self._lost: deque[tuple[tuple[Stripe, ...], int]] = deque()
        """Extents that nobody has any more; some were freed before they went."""
        opened: list[list[SwapFile]] = []
        try:
            for first in range(0, len(self.paths), num_paths):
                try:
                    opened.append([self._open(path, direct, directory) for path in self.paths[first:][:num_paths]])
                except SwapIOError as error:
                    self.unopened.append(error)
                    is_lost = not isinstance(error, ForeignFolderError) and error.errno not in OUT_OF_FILES
                    if copies == len(self.unopened) or not is_lost:
                        raise
        except BaseException:
            self.close()
            raise
        self.copies = DriveCopies(opened)
        """The same bytes, once or several times."""
        self._files = opened[0]
        for of_copy in opened[1:]:
            for file, first_file in zip(of_copy, self._files, strict=True):
                file.share_ranges(first_file)

    def _open(self, path: Path, direct: DirectPolicy, directory: Callable[[Path], SwapDirectory]) -> SwapFile:
        self._directories.append(directory(path))
        self.all_files.append(self._directories[-1].open_swap(direct))
        return self.all_files[-1]

    @property
    def directory(self) -> Path:
        """The run directory on the first path."""
        return self._directories[0].path

    @property
    def fds(self) -> list[int]:
        """Open file descriptors, one per path of the first copy: extents are named by them."""
        return [file.fd for file in self._files]

    @property
    def file_sizes(self) -> list[int]:
        """Bytes that each file of the copy has now that is read, one per path."""
        return [file.status().st_size for file in self.copies.files[self.copies.whole[0]]]

    @property
    def alignment(self) -> int:
        """Granularity of offsets, sizes and addresses, in bytes."""
        return max(file.alignment for file in self.all_files)

    @property
    def direct(self) -> bool:
        """Whether every path does direct I/O."""
        return all(file.direct for file in self.all_files)

    def path_of(self, fd: int) -> Path:
        """The file behind a descriptor, for messages."""
        return next((file.path for file in self.all_files if file.fd == fd), self.paths[0])

    def allocate(self, size_bytes: int) -> Extent:
        """Allocate one extent as `allocate_all` does."""
        return self.allocate_all([size_bytes])[0]

    def allocate_all(self, sizes: Sequence[Size]) -> list[Extent]:
        """Allocate one extent per size, holes first and the rest in one piece; on OutOfSpaceError nothing is kept."""
        with self._lock:
            self._free_lost()
            try:
                with _AllOrNothing(self._files, self._owned, next(self._serials)):
                    extents = [self._take(size) for size in sizes]
                    self._reserve()
            except BaseException:  # which is the one to tell: a file that stays long keeps its promise
                for file in self.all_files:
                    with suppress(OSError):
                        file.give_up_reserve()
                raise
        return extents

    def check_room(self, sizes: Sequence[Size]) -> None:
        """Raise OutOfSpaceError where `allocate_all` of these sizes would find no space now; takes none."""
        with self._lock:
            self._free_lost()
            ranges = [file.ranges.copy() for file in self._files]
            for size in sizes:
                parts = [self._split(part) for part in (size if isinstance(size, tuple) else (size,))]
                for of_file, *shares in zip(ranges, *parts, strict=True):
                    of_file.take(sum(shares))
            for copy in self.copies.written:
                for file, of_file in zip(self.copies.files[copy], ranges, strict=True):
                    file.check_room(of_file.end)

    def claim(self, stripes: Sequence[Stripe]) -> Extent:
        """Take the extent that an earlier process had in these stripes, free again when nobody has it any more.

        `promise` what was claimed before it is used. On ValueError, where somebody has part of them, nothing is kept.
        """
        with self._lock:
            self._free_lost()
            with _AllOrNothing(self._files, self._owned, next(self._serials)):
                for stripe in stripes:
                    self._file_of(stripe).claim(stripe)
                return self._own(tuple(stripes))

    def claim_free(self, ends: Sequence[int]) -> list[Extent]:
        """Claim everything that nobody has before these positions, one for each path."""
        with self._lock:
            self._free_lost()
        pairs = zip(self._files, ends, strict=True)
        gaps = [Stripe(file.fd, *gap) for file, end in pairs for gap in file.ranges.free_below(end)]
        return [self.claim([gap]) for gap in gaps]

    def promise(self) -> None:
        """See that there is space for all that was claimed: none is missing unless somebody else changed the files."""
        with self._lock:
            self._reserve()

    def sync(self) -> None:
        """Bring what was written to the drives of each whole copy. Raises as `sync_copy` does where none is left."""
        self.copies.each(self.copies.whole, self.sync_copy)

    def sync_copy(self, copy: int) -> None:
        """Bring what was written to the drives of one copy, or raise SwapIOError."""
        for file in self.copies.files[copy]:
            drive.ask(file.path, sync_data, file.fd, direction="write", extent="a sync of it failed")

    def _reserve(self) -> None:
        """Have every copy as long as what is handed out. A drive that is full is no lost copy."""

        def reserve(copy: int) -> None:
            for file in self.copies.files[copy]:
                file.reserve(file.end)

        self.copies.each(self.copies.written, reserve, raised=OutOfSpaceError)

    def _take(self, size: Size) -> Extent:
        parts = [self._split(part) for part in (size if isinstance(size, tuple) else (size,))]
        # One range of each file, the parts one behind another in it.
        at = {file: file.take(sum(shares)).offset for file, *shares in zip(self._files, *parts, strict=True)}
        stripes: list[Stripe] = []
        for part in parts:
            for file, share in zip(self._files, part, strict=True):
                _append(stripes, Stripe(file.fd, at[file], share))
                at[file] += share
        return self._own(tuple(stripes))

    def _own(self, stripes: tuple[Stripe, ...]) -> Extent:
        """The record of what was taken. It may be lost to an exception anywhere on the way to its owner."""
        extent = Extent(sum(stripe.size_bytes for stripe in stripes), stripes)
        self._owned[stripes] = serial = next(self._serials)
        weakref.finalize(extent, self._lost.append, (stripes, serial)).atexit = False
        return extent

    def check_whole(self) -> None:
        """Raise SwapIOError if somebody shortened a file or took space from it, and no other copy is whole."""
        self.copies.each(self.copies.written, self._check_whole)

    def _check_whole(self, copy: int) -> None:
        for file in self.copies.files[copy]:
            try:
                file.check_whole()
            except SwapIOError:
                # Another thread may be changing what is promised, and only under the lock do promise and file agree.
                # Taken every time, the lock would make all transfers wait for an allocation.
                with self._lock:
                    file.check_whole()

    def free(self, extent: Extent) -> None:
        """Give an extent back. Its bytes may be handed out again at once."""
        with self._lock:
            if self._owned.pop(extent.stripes, None) is None:
                raise AssertionError(f"{extent} was given back twice")
            self._free_stripes(extent.stripes)
            self._free_lost()

    def close(self) -> None:
        """Close and delete the files. Idempotent."""
        with ExitStack() as last:  # whatever one of them raises, all are closed
            for directory in self._directories:
                last.callback(directory.leave)
            for file in self.all_files:
                last.callback(file.close)

    def _split(self, size_bytes: int) -> list[int]:
        """Bytes on each path: by weight, in whole units of the alignment, the remainder where it is due first."""
        unit = self.alignment
        units = -(-size_bytes // unit)
        ends = [round(units * sum(self._shares[: index + 1])) for index in range(len(self._shares))]
        return [(end - start) * unit for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _free_lost(self) -> None:
        """Free what was lost. Not at the moment when it was: that may come while the lock is held."""
        while self._lost:
            stripes, serial = self._lost.popleft()
            if self._owned.get(stripes) == serial:
                del self._owned[stripes]
                self._free_stripes(stripes)

    def _free_stripes(self, stripes: Iterable[Stripe]) -> None:
        for stripe in stripes:
            self._file_of(stripe).free(stripe)

    def _file_of(self, stripe: Stripe) -> SwapFile:
        return next(file for file in self._files if file.fd == stripe.fd)


class _AllOrNothing(AbstractContextManager["_AllOrNothing"]):
    """After an error in the block, ranges and their records are as they were.

    The records of what nobody had yet, too: left alone they would say that ranges which are free again were lost. It is
    undone at once or never: a generator that an exception left behind would do it when the exception is forgotten.
    """

    def __init__(self, files: Sequence[SwapFile], owned: dict[tuple[Stripe, ...], int], last: int) -> None:
        self._files, self._owned, self._last = files, owned, last
        self._before = [file.ranges.copy() for file in files]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for stripes in [stripes for stripes, serial in self._owned.items() if serial > self._last]:
                del self._owned[stripes]
            for file, ranges in zip(self._files, self._before, strict=True):
                file.ranges.become(ranges)


def _append(stripes: list[Stripe], stripe: Stripe) -> None:
    """Add a stripe, in one piece with the one before where they meet."""
    if stripes and (last := stripes[-1]).fd == stripe.fd and last.offset + last.size_bytes == stripe.offset:
        stripes[-1] = Stripe(last.fd, last.offset, last.size_bytes + stripe.size_bytes)
    elif stripe.size_bytes:
        stripes.append(stripe)
