"""A run may have copies, each on a drive of its own: all of them say the same, or are made again.

Each copy is all of a run: swap files, manifests and snapshots, so that it can be gone on from without the others. A
commit has all whole copies synced before the first of them gets its manifest. A manifest says whether it is of one copy
alone. So of copies that say different things it can be told which one went on without the other (`leading_of`).

A lost copy is made again between the writes of two steps, a share in each commit: it has no manifest until all of it is
there. What steps write meanwhile goes there, too.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import RemovedError, ResumeError, StateError
from ..host.region import HostRegion
from ..storage.copies import CopyState
from ..storage.run_directory import SWAP_NAME
from ..storage.run_folder import delete_in, is_at, names_in, read_in, replace_in
from ..storage.swap_space import SwapSpace
from ..units import MiB
from . import owner
from .chain import check_rows
from .directory import ABOUT_NAME, DurableDirectory, read_about
from .manifest import NAMES, Manifest, ManifestFiles
from .snapshots import PREFIXES

logger = logging.getLogger(__name__)

COMMITS_PER_COPY = 16
"""A lost copy is made again in so many commits, or fewer where it is small."""
_LEAST_SHARE_BYTES = 256 * MiB
_PIECE_BYTES = 8 * MiB
_LONGEST_PAUSE = 1023  # commits
_OF_THE_COPY_ITSELF = (SWAP_NAME, owner.NAME, *NAMES)


class CopyFound(NamedTuple):
    """One copy as it was found."""

    folder: Path
    """The directory on its first path."""
    uuid: str | None
    steps: list[Manifest]
    """The newest first."""
    snapshots: list[str]
    """Files of snapshots, in the order of their names."""

    @classmethod
    def look_at(cls, folder: Path, sizes: Sequence[int] | None = None) -> CopyFound:
        """Look at a copy without changing it; with `sizes`, those of its swap files, only at what lies in them."""
        found, about = Manifest.all_in(folder).values(), read_about(folder)
        steps = [manifest for manifest in found if sizes is None or _lies_in(manifest, sizes)]
        uuid = None if about is None else str(about["uuid"])
        return cls(folder, uuid, steps, [name for name in names_in(folder) if name.startswith(PREFIXES)])

    @property
    def worth(self) -> tuple[bool, bool, bool]:
        """Say what is there, to compare: steps before snapshots, and both before nothing but the name of the run."""
        return bool(self.steps), bool(self.snapshots), self.uuid is not None

    def says_as(self, other: CopyFound) -> bool:
        """Whether another copy has the same commits and snapshots."""
        own, others = ([step.key for step in one.steps] for one in (self, other))
        of_one_run = self.uuid == other.uuid or None in (self.uuid, other.uuid)  # its file is made again
        return own == others and of_one_run and self.snapshots == other.snapshots


def leading_of(found: Sequence[CopyFound]) -> int:
    """Return the copy to go on from, of one or two. ResumeError: each went on without the other, to other steps."""
    having = [copy for copy, one in enumerate(found) if one.steps]
    if len(having) < 2:
        return max(range(len(found)), key=lambda copy: found[copy].worth)
    one, other = (found[copy].steps for copy in having)
    if one[0].key in [step.key for step in other] or other[0].key in [step.key for step in one]:
        return having[one[0].sequence < other[0].sequence]
    if one[0].is_alone and other[0].is_alone:
        steps = " and ".join(f"step {found[copy].steps[0].step} in {found[copy].folder}" for copy in having)
        raise ResumeError(
            found[0].folder,
            f"has two copies of which each went on without the other: {steps}. Nothing has changed: move away the one "
            "that is not to be gone on from, and start again",
        )
    if one[0].is_alone != other[0].is_alone:
        return having[other[0].is_alone]
    return having[one[0].sequence < other[0].sequence]


class RunCopies:
    """The manifests and other small files of all copies of a run, and what makes a copy again.

    Args:
        space: the swap files, open.
        directories: of all copies, by their path.
        count: of manifests.
    """

    def __init__(self, space: SwapSpace, directories: Sequence[DurableDirectory], count: int) -> None:
        self._space = space
        self._copies = space.copies
        known = {directory.path: directory for directory in directories}
        self.of_copies = [[known[file.path.parent] for file in files] for files in self._copies.files]
        """The directories of each copy, one for each path."""
        self._manifests = [ManifestFiles(each[0].path, direct=space.direct, count=count) for each in self.of_copies]
        self._at = (0, 0)
        """Path and offset up to which a lost copy was made again."""
        self._pause, self._rest = 0, 0
        """Commits between two attempts to make one again, and those that are left until the next."""
        self._choose()

    def _choose(self) -> None:
        """Read the copy to go on from, and leave others alone that say something else, until they are made again."""
        if not self._copies.several:
            return
        sizes = [[file.status().st_size for file in files] for files in self._copies.files]
        folders = [each[0].path for each in self.of_copies]
        found = [CopyFound.look_at(folder, size) for folder, size in zip(folders, sizes, strict=True)]
        leading = leading_of(found)
        for copy, one in enumerate(found):
            if not one.says_as(found[leading]):
                self._copies.set_aside(copy)
                logger.warning("%s is made again from %s while training goes on", one.folder, found[leading].folder)

    @property
    def directories(self) -> list[DurableDirectory]:
        """Return the directories of the copy that is read, one for each path."""
        return self.of_copies[self._copies.whole[0]]

    @property
    def num_whole(self) -> int:
        """Return how many copies have every byte."""
        return len(self._copies.whole)

    def newest_first(self) -> list[Manifest]:
        """Return the manifests that are whole."""
        return self._manifests[self._copies.whole[0]].newest_first()

    def write(self, manifest: Manifest) -> None:
        """Put a manifest in the place of the oldest, in all whole copies; see `ManifestFiles.write`."""
        self._copies.each(self._copies.whole, lambda copy: self._manifests[copy].write(manifest))

    def destroy(self, manifest: Manifest) -> None:
        """Make a manifest none, in all whole copies; see `ManifestFiles.destroy`."""
        self._copies.each(self._copies.whole, lambda copy: self._manifests[copy].destroy(manifest))

    def each_directory(self, act: Callable[[int, DurableDirectory], None]) -> None:
        """Do something to every directory of each whole copy, with the number of its path."""

        def of_copy(copy: int) -> None:
            for place, directory in enumerate(self.of_copies[copy]):
                act(place, directory)

        self._copies.each(self._copies.whole, of_copy)

    def each_folder(self, act: Callable[[Path], None]) -> None:
        """Do something to the directory on the first path of each whole copy, where the small files are."""
        self._copies.each(self._copies.whole, lambda copy: act(self.of_copies[copy][0].path))

    def check_names(self) -> None:
        """Raise RemovedError if somebody removed files that are written, or moved them: of all copies."""
        self._copies.each(self._copies.whole, self._check_names)

    def _check_names(self, copy: int) -> None:
        swaps = [file.path for file in self._copies.files[copy] if not is_at(file.path, file.fd)]
        if gone := swaps + self._manifests[copy].without_name:
            names = ", ".join(path.name for path in gone)
            raise RemovedError(errno.ENOENT, path=gone[0].parent, direction="write", extent=f"its {names}")

    def close(self) -> None:
        """Close the files. Idempotent."""
        for files in self._manifests:
            files.close()

    # A lost copy is made again.

    def catch_up(self) -> None:
        """Make a share of a lost copy again; no write may be under way. what fails is tried again, ever more rarely."""
        behind = [copy for copy in range(len(self._manifests)) if copy not in self._copies.whole]
        for copy in behind:
            try:
                if self._copies.state_of(copy) is CopyState.LOST:
                    self._rest -= 1
                    if self._rest >= 0:
                        continue
                    self._pause = self._rest = min(2 * self._pause + 1, _LONGEST_PAUSE)
                    self._begin(copy)
                self._copy_share(copy)
            except (OSError, StateError) as error:  # a read may have found meanwhile that its files were cut short
                self._copies.lose(copy, error)

    def _begin(self, copy: int) -> None:
        """Have nothing in a copy that could be gone on from, and write to it from now on what is written."""
        self._check_names(copy)
        for manifest in reversed(self._manifests[copy].newest_first()):
            self._manifests[copy].destroy(manifest)
        folder = self.of_copies[copy][0].path
        delete_in(folder, *(name for name in names_in(folder) if name not in (*_OF_THE_COPY_ITSELF, ABOUT_NAME)))
        self._copies.begin_to_write(copy)
        self._at = (0, 0)

    def _copy_share(self, copy: int) -> None:
        sources, targets = self._copies.files[self._copies.whole[0]], self._copies.files[copy]
        left = max(_LEAST_SHARE_BYTES, sum(file.end for file in sources) // COMMITS_PER_COPY)
        memory = HostRegion(_PIECE_BYTES).view(torch.uint8, 0, _PIECE_BYTES).numpy().data
        place, offset = self._at
        while place < len(sources) and left > 0:
            size = min(_PIECE_BYTES, sources[place].end - offset)
            if size > 0:
                targets[place].copy_from(sources[place], offset, memory[:size])
                left, offset = left - size, offset + size
            else:
                place, offset = place + 1, 0
        self._at = (place, offset)
        if place == len(sources):
            self._finish(copy)

    def _finish(self, copy: int) -> None:
        """Have in a copy that has all bytes what the others have besides, the manifests last."""
        self._space.sync_copy(copy)
        for source, target in zip(self.directories, self.of_copies[copy], strict=True):
            for name in names_in(source.path):
                if name not in _OF_THE_COPY_ITSELF and not name.endswith(".new"):
                    replace_in(target.path, name, read_in(source.path, name))
        for manifest in reversed(self.newest_first()):
            self._manifests[copy].write(manifest)
        self._copies.note_whole(copy)
        logger.warning("%s is whole again", self.of_copies[copy][0].path)


def _lies_in(manifest: Manifest, sizes: Sequence[int]) -> bool:
    try:
        check_rows(manifest, sizes, where="")
    except ResumeError:
        return False
    return True
