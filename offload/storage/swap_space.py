"""The swap space of one process: a swap file on each path, and extents striped over them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import count
from pathlib import Path

from nvme_offload.offload.errors import SwapIOError
from nvme_offload.offload.storage.extent import Extent, Stripe
from nvme_offload.offload.storage.run_directory import SWAP_NAME, RunDirectory
from nvme_offload.offload.storage.swap_file import DirectPolicy, SwapFile


class SwapSpace:
    """Preallocated files on one or several paths.

    An extent is split over the paths by weight, in multiples of the alignment, so that several drives work on one
    transfer without RAID. All files are in run directories of their own and disappear with ``close()``; what a killed
    process leaves is removed by the next run on the same path.

    Args:
        paths: existing directories.
        weights: one positive number per path, for example measured bandwidths; None for equal shares.
        direct: what to do where a file system has no direct I/O.

    Raises:
        SwapIOError: a path is missing, read-only, not ours, or has no direct I/O although that is required.
    """

    def __init__(self, paths: Sequence[Path], *, weights: Sequence[float] | None = None, direct: DirectPolicy) -> None:
        self.paths = tuple(paths)
        shares = [Fraction(weight) for weight in (weights or [1] * len(paths))]
        self._shares = [share / sum(shares) for share in shares]
        self._directories: list[RunDirectory] = []
        self._files: list[SwapFile] = []
        self._lock = threading.Lock()
        self._serials = count()
        self._owned: dict[tuple[Stripe, ...], int] = {}
        """What is handed out, with a number of its own each time."""
        self._lost: deque[tuple[tuple[Stripe, ...], int]] = deque()
        """What nobody has any more; some of it was freed before it went."""
        try:
            for path in self.paths:
                self._directories.append(RunDirectory(path))
                self._files.append(SwapFile(self._directories[-1].path / SWAP_NAME, direct))
        except BaseException:
            self.close()
            raise

    @property
    def fds(self) -> list[int]:
        """Open file descriptors, one per path."""
        return [file.fd for file in self._files]

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
        """An extent of at least `size_bytes`, its space promised on every path.

        Raises:
            OutOfSpaceError: names the path that is full; nothing is kept.
        """
        return self.allocate_all([size_bytes])[0]

    def allocate_all(self, sizes: Sequence[int]) -> list[Extent]:
        """One extent per size. Holes are used first; the space of what is left is promised in one piece.

        Raises:
            OutOfSpaceError: names the path that is full and all the bytes needed there; nothing is kept.
        """
        with self._lock:
            self._free_lost()
            before, extents = [file.ranges.copy() for file in self._files], []
            try:
                for size in sizes:
                    extents.append(self._take(size))
                for file in self._files:
                    file.reserve(file.end)
            except BaseException:
                for file, ranges in zip(self._files, before, strict=True):
                    file.ranges = ranges
                for extent in extents:
                    self._owned.pop(extent.stripes, None)
                self._give_up_reserves()
                raise
        return extents

    def check_room(self, sizes: Sequence[int]) -> None:
        """Look whether `allocate_all` of these sizes would find space now; takes none.

        Raises:
            OutOfSpaceError: names the path that is full and all the bytes needed there.
        """
        with self._lock:
            self._free_lost()
            shares = [self._split(size) for size in sizes]
            for number, file in enumerate(self._files):
                file.check_room(sum(share[number] for share in shares))

    def _take(self, size_bytes: int) -> Extent:
        """An extent that is free again when nobody has it any more.

        It may be lost to an exception anywhere on the way to its owner.
        """
        shares = zip(self._files, self._split(size_bytes), strict=True)
        stripes = tuple(file.take(share) for file, share in shares if share)
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
            directory.remove()

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
            next(file for file in self._files if file.fd == stripe.fd).free(stripe)
