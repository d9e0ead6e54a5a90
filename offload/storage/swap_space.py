"""The swap space of one process: a swap file on each path, and extents striped over them."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Protocol

from nvme_offload.offload.errors import SwapIOError
from nvme_offload.offload.storage.extent import Extent, Stripe
from nvme_offload.offload.storage.run_directory import RunDirectory
from nvme_offload.offload.storage.swap_file import DirectPolicy, SwapFile

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
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        weights: Sequence[float] | None = None,
        direct: DirectPolicy,
        directory: Callable[[Path], SwapDirectory] = RunDirectory,
    ) -> None:
        self.paths = tuple(paths)
        shares = [Fraction(weight) for weight in (weights or [1] * len(paths))]
        self._shares = [share / sum(shares) for share in shares]
        self._directories: list[SwapDirectory] = []
        self._files: list[SwapFile] = []
        self._lock = threading.Lock()
        self._serials = count()
        self._owned: dict[tuple[Stripe, ...], int] = {}
        """Extents that are handed out, with a number of their own each time."""
        self._lost: deque[tuple[tuple[Stripe, ...], int]] = deque()
        """Extents that nobody has any more; some were freed before they went."""
        try:
            for path in self.paths:
                self._directories.append(directory(path))
                self._files.append(self._directories[-1].open_swap(direct))
        except BaseException:
            self.close()
            raise

    @property
    def directory(self) -> Path:
        """The run directory on the first path."""
        return self._directories[0].path

    @property
    def fds(self) -> list[int]:
        """Open file descriptors, one per path."""
        return [file.fd for file in self._files]

    @property
    def file_sizes(self) -> list[int]:
        """Bytes that each file has now, one per path."""
        return [os.fstat(fd).st_size for fd in self.fds]

    @property
    def alignment(self) -> int:
        """Granularity of offsets, sizes and addresses, in bytes."""
        return max(file.alignment for file in self._files)

    @property
    def direct(self) -> bool:
        """Whether every path does direct I/O."""
        return all(file.direct for file in self._files)

    def path_of(self, fd: int) -> Path:
        """The file behind a descriptor, for messages."""
        for file in self._files:
            if file.fd == fd:
                return file.path
        return self.paths[0]

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
                    for file in self._files:
                        file.reserve(file.end)
            except BaseException:
                self._give_up_reserves()
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
            for file, of_file in zip(self._files, ranges, strict=True):
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
            for file in self._files:
                file.reserve(file.end)

    def _take(self, size: Size) -> Extent:
        """An extent that is free again when nobody has it any more."""
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
        """Raise SwapIOError if somebody shortened a file or took space from it."""
        for file in self._files:
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
        for file in self._files:
            file.close()
        for directory in self._directories:
            directory.leave()

    def _split(self, size_bytes: int) -> list[int]:
        """Bytes on each path: by weight, in whole units of the alignment, the remainder where it is due first."""
        unit = self.alignment
        units = -(-size_bytes // unit)
        ends = [round(units * sum(self._shares[: index + 1])) for index in range(len(self._shares))]
        return [(end - start) * unit for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _give_up_reserves(self) -> None:
        """Give reserves up after an error, which is the one to tell: a file that stays long keeps its promise."""
        for file in self._files:
            with suppress(OSError):
                file.give_up_reserve()

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


class _AllOrNothing:
    """After an error in the block, ranges and their records are as they were.

    The records of what nobody had yet, too: left alone they would say that ranges which are free again were lost. It is
    undone at once or never: a generator that an exception left behind would do it when the exception is forgotten.
    """

    def __init__(self, files: Sequence[SwapFile], owned: dict[tuple[Stripe, ...], int], last: int) -> None:
        self._files, self._owned, self._last = files, owned, last
        self._before = [file.ranges.copy() for file in files]

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for stripes in [stripes for stripes, serial in self._owned.items() if serial > self._last]:
                del self._owned[stripes]
            for file, ranges in zip(self._files, self._before, strict=True):
                file.go_back_to(ranges)


def _append(stripes: list[Stripe], stripe: Stripe) -> None:
    """Add a stripe, in one piece with the one before where they meet."""
    if stripes and (last := stripes[-1]).fd == stripe.fd and last.offset + last.size_bytes == stripe.offset:
        stripes[-1] = Stripe(last.fd, last.offset, last.size_bytes + stripe.size_bytes)
    elif stripe.size_bytes:
        stripes.append(stripe)
