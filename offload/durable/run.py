"""One rank's part of a run whose committed steps outlive it: its directories, its swap files and its manifests."""

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch.distributed as dist

from ..config.section import OffloadConfig
from ..errors import ConfigError, ResumeError, StateError, SwapIOError
from ..storage import drive
from ..storage.run_folder import replace_in
from ..storage.swap_file import DirectPolicy
from ..storage.swap_space import SwapSpace
from ..warn import warn_user
from .chain import SlotLayout, check_rows
from .directory import DurableDirectory, check_name, directory_of, read_about
from .identity import Encoded, differences, file_name, read_identity
from .manifest import NO_COMMIT, Manifest
from .ring import ExtentRing
from .run_copies import RunCopies
from .snapshots import Snapshots

_INCARNATION_BITS = 62
_PINNED, _DAMAGED = "(pinned)", "(damaged)"  # which are no names of snapshots

Places = Mapping[str, object]
"""They say where a run has parameters and gradients, and whether a budget keeps some in memory: it is cut by that."""


def places_in(config: OffloadConfig) -> Places:
    """Return the places that a section gives to parameters and gradients, as JSON."""
    params, grads = config.zero_optimization.offload_param.device, config.offload_gradients.device
    return {"parameters": params, "gradients": grads, "within_budget": config.host_budget is not None}


class DurableRun:
    """Opens or makes what a run of this name has on these paths, and locks it for this process.

    The order of things::

        run = DurableRun(paths, name="my-run", rank=0, direct="required")
        tier = NvmeTier(config, space=run.space)
        if run.found:
            run.identify(identity, uuid, hosts)     # or `differences`
            run.adopt(run.found[0], layouts)        # then read every slot, and check it (`run.extents.open_sealed`)
        else:
            run.identify(identity, uuid, hosts)
            run.extents.add(layouts)
        ...                                         # write slots: see `ExtentRing`
        run.commit(step, blob, run.extents.tables, commit_id)  # when all writes are done, in a thread (`Committer`)
        tier.close(); run.close()                   # everything stays

    The first path has the manifests. `steps_back` commits before the newest stay whole between two steps; at least 1.
    With two `copies` each half of the paths has all of it: see `run_copies`.

    Raises:
        ValueError: this cannot be a name.
        StateError: a run of this name is alive; names its process.
        ResumeError: what is there was made for other paths, or is damaged; or two copies went on by themselves.
        SwapIOError: a path cannot be used, and no other copy is there to go on from.
    """

    @classmethod
    def of(cls, config: OffloadConfig) -> Self | None:
        """Open this rank's part of the run that a section names; None where its state ends with the process.

        ConfigError: its copies are on one device.
        """
        section, aio = config.zero_optimization.offload_optimizer, config.aio
        if section.run_name is None:
            return None
        name, steps_back = section.run_name, section.rewind_steps
        paths, weights = config.nvme_paths, aio.path_weights
        _check_devices(paths, section.copies)
        more: dict[str, Any] = {"steps_back": steps_back, "copies": section.copies, "places": places_in(config)}
        return cls(paths, name=name, rank=_rank(), direct=aio.direct, weights=weights, **more)

    @staticmethod
    def said(config: OffloadConfig) -> Mapping[str, Any]:
        """Return what the run that a section names says of itself, without opening it; nothing where nobody knows.

        ``places`` is where it began with parameters and gradients, ``keeping`` what `note_keeping` was given.
        """
        section = config.zero_optimization.offload_optimizer
        for path in config.nvme_paths if section.run_name else ():
            try:
                about = read_about(directory_of(path, str(section.run_name), _rank()))
            except SwapIOError:
                if section.copies == 1:
                    raise
                continue  # the drive may be lost: who opens it says so
            if about is not None:
                return about
        return {}

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        name: str,
        rank: int,
        direct: DirectPolicy,
        weights: Sequence[float] | None = None,
        steps_back: int = 1,
        copies: int = 1,
        places: Places | None = None,
    ) -> None:
        check_name(name)
        self.name = name
        self.rank = rank
        self._steps_back = steps_back
        self._directories: list[DurableDirectory] = []
        self.space = SwapSpace(paths, weights=weights, direct=direct, directory=self._open_directory, copies=copies)
        """The swap files: for the tier, which closes it."""
        try:
            self._files = RunCopies(self.space, self._directories, 1 + steps_back)
            self.snapshots = Snapshots(self.folder, self._files.each_folder)
            self.found = self._files.newest_first()
            """Manifests that an earlier process committed and nobody adopted yet, newest first."""
            self.uuid = self._check_paths()
            """The run's own, the same on all ranks; None in a run that is new, until `identify`."""
            self._check_unopened()
            newest = max((m.sequence for m in [*self.found, *self.snapshots.all.values()]), default=0)
            incarnation = secrets.randbits(_INCARNATION_BITS)
            self.extents = ExtentRing(self.space, incarnation, newest + 1, steps_back=steps_back)
            self._claim()
        except BaseException:
            self.space.close()
            raise
        self._identity = Encoded({}, b"", "")
        self._about: dict[str, Any] = {"places": places}

    @property
    def folder(self) -> Path:
        """The directory on the first path."""
        return self._files.directories[0].path

    @property
    def num_copies(self) -> int:
        """Return how many drives, or sets of them, have all of it now."""
        return self._files.num_whole

    @property
    def committed(self) -> list[Manifest]:
        """Return what could be resumed now, newest first: at most `steps_back` and one."""
        return self._files.newest_first()

    @property
    def is_under_way(self) -> bool:
        """Whether what was found is more than a first commit, which other ranks may not have: see `begin_anew`."""
        return not all(manifest.is_first for manifest in self.found)

    # Identity.

    def identify(self, identity: Encoded, uuid: str, hosts: Mapping[str, str]) -> None:
        """Say what this run is from now on: what is committed is committed as this.

        `identity` is JSON that must be equal wherever a commit is taken up; `offload runs` shows its ``model``. All
        ranks agree on `uuid`. `hosts` are those of all ranks, by number.

        Raises ResumeError where a run with another uuid is there.
        """
        if self.uuid not in (None, uuid):
            raise ResumeError(self.folder, f"is of run {self.uuid}, and other ranks have {uuid} under this name")
        about = {"name": self.name, "uuid": uuid, "rank": self.rank, "created": time.time(), "hosts": hosts}
        self._about |= about | {"num_paths": len(self._files.directories)}
        self._files.each_directory(lambda place, directory: directory.say(self._about | {"path": place}))
        self.uuid, self._identity = uuid, identity
        self._files.each_folder(self._say_identity)

    def note_keeping(self, keeping: Mapping[str, object]) -> None:
        """Say beside the places what the run keeps for backward, as JSON, for whoever resumes it."""
        self._about["keeping"] = keeping
        if "uuid" in self._about:  # else `identify` says it
            self._files.each_directory(lambda place, directory: directory.say(self._about | {"path": place}))

    def _say_identity(self, folder: Path) -> None:
        name = file_name(self._identity.digest)
        if not drive.ask(folder, os.path.lexists, folder / name):
            replace_in(folder, name, self._identity.content)

    def differences(self, manifest: Manifest, identity: Encoded) -> list[str]:
        """Return what `identity` has otherwise than what was committed, one line each; empty where it fits."""
        if manifest.identity == identity.digest:
            return []
        return differences(read_identity(self.folder, manifest.identity), identity.identity)

    # Manifests.

    def bring_to_front(self, manifest: Manifest, layouts: Sequence[SlotLayout]) -> Manifest:
        """Have a snapshot among the commits, as the newest; a manifest that is there already stays where it is.

        Of several ranks all do this before the first of them destroys anything (`adopt`): whenever one of them is
        killed, there is a commit that all have. As with every commit the oldest one gives its place. Returns the
        manifest among the commits that says the same.

        Raises:
            ResumeError: it is not of such slots.
            OutOfSpaceError: there is no room to write in. Either way nothing has changed.
            SwapIOError: the drive does not take it.
        """
        held = next((held for held in self._files.newest_first() if held.says_as(manifest)), None)
        if held is not None:
            return held
        self.extents.adopt(manifest.tables, layouts, where=str(self.folder))
        alone = self.num_copies == 1
        copy = replace(manifest, sequence=self.extents.sequence, is_first=False, is_alone=alone)
        self._files.write(copy)
        self.extents.count_manifest()
        return copy

    def adopt(self, manifest: Manifest, layouts: Sequence[SlotLayout]) -> None:
        """Go on from a committed step: what did not lead to it, or is not whole, is destroyed when this returns.

        Nothing of the state is read. What is written from here on spares what this manifest refers to, which is one of
        `found`, `committed` or `snapshots`. Raises as `bring_to_front` does.
        """
        kept = [self.bring_to_front(manifest, layouts)]
        held = self._files.newest_first()
        for other in held[held.index(kept[0]) + 1 :][: self._steps_back]:
            if not kept[-1].may_follow(other) or self.extents.written_over(other.tables):
                break
            kept.append(other)
        older = [other.tables for other in kept[1:]]
        self.extents.adopt(manifest.tables, layouts, where=str(self.folder), older=older)
        # The newest one last: whoever is killed here goes on from that, or from where this was to lead, never between.
        for other in reversed(held):
            if other not in kept:
                self._files.destroy(other)
        self.found = []

    def write_over_found(self, layouts: Sequence[SlotLayout]) -> None:
        """Have other state take the place of what was found, which is left as it is until the next commit."""
        self.extents.adopt(self.found[0].tables, layouts, where=str(self.folder))
        self.found = []

    def forget_commits(self) -> None:
        """Have nothing to resume any more, durably, but snapshots: what is written from here on is another training."""
        for manifest in reversed(self._files.newest_first()):
            self._files.destroy(manifest)
        self.extents.forget_commits()
        self.found = []

    def take_back(self) -> None:
        """Destroy the newest manifest, because another rank could not commit that step; what it has is not changed.

        Nothing may have been written since. The next commit has all of it.
        """
        newest, *before = self._files.newest_first()
        self._files.destroy(newest)
        if before:
            self.extents.take_back_commit(before[0].tables)
        else:
            self.extents.forget_commits()

    def commit(self, step: int, blob: bytes, tables: Mapping[str, np.ndarray], commit_id: str) -> Manifest:
        """Make what was written last, and say so in a manifest. All writes of the slots in `tables` must be done.

        Nothing may be written meanwhile. If it raises, the step committed before is still whole, and writes go on
        sparing it; the next call commits what is there then. `tables` are those of `extents` after the last of these
        writes was begun, and all ranks agree on `commit_id`.

        Raises:
            StateError: a sync failed before, and `extents.suspects` were not written again since.
            OutOfSpaceError, SwapIOError: the drive does not take it.
        """
        if num_suspects := len(self.extents.suspects):
            raise StateError("the commit", "every slot of a failed sync written again", f"{num_suspects} are not")
        self._files.check_names()
        # Files that only say what the run is are made again where somebody has removed them.
        self._files.each_directory(lambda place, directory: directory.say_again(self._about | {"path": place}))
        self._files.each_folder(self._say_identity)
        self._files.catch_up()
        try:
            self.space.sync()
        except OSError:
            self.extents.suspect_uncommitted()
            raise
        before = self.committed
        manifest = Manifest(
            step=step,
            sequence=self.extents.sequence,
            incarnation=self.extents.incarnation,
            identity=self._identity.digest,
            tables=tables,
            blob=blob,
            is_first=not before,
            commit_id=commit_id,
            previous_id=before[0].commit_id if before else NO_COMMIT,
            is_alone=self.num_copies == 1,
        )
        self._files.write(manifest)
        self.extents.note_commit()
        return manifest

    # Snapshots.

    def prepare_snapshot(self, name: str) -> None:
        """Pin the newest committed step, for a snapshot that `snapshots.publish` says is there; no state is moved.

        Raises:
            ValueError: this cannot be a name, or there is a snapshot of this name.
            StateError: nothing is committed.
            OutOfSpaceError: there is no room for what later steps write in place of it; nothing has changed.
        """
        self.snapshots.check_free(name)
        newest = self.committed
        if not newest:
            raise StateError(f"the durable run {self.name!r}", "a committed step", "none")
        self.extents.pin(name, newest[0].tables)
        try:
            self.snapshots.prepare(name, newest[0])
        except BaseException:
            self.extents.unpin(name)
            raise

    def delete_prepared(self, name: str) -> None:
        """Delete a prepared step; what only it and the step before the newest refer to is free, and that step gone."""
        self.snapshots.delete_prepared(name)
        self._unpin(name)

    def delete_snapshot(self, name: str) -> None:
        """Delete what is prepared or damaged of a name, wherever there is something; nothing may be published."""
        if name in self.snapshots.prepared:
            self.delete_prepared(name)
        if name in self.snapshots.unreadable:
            self.snapshots.delete_unreadable(name)
            if not self.snapshots.unreadable:
                self._unpin(_DAMAGED)

    def agree_on_snapshots(self, published: set[str]) -> None:
        """Publish what is prepared and some rank has published, and delete what none has: see `snapshots`."""
        for name in list(self.snapshots.prepared):
            if name in published:
                self.snapshots.publish(name)
            else:
                self.delete_prepared(name)

    def pin_newest(self) -> Manifest:
        """Pin the newest committed step, one at a time; nothing is written. On OutOfSpaceError nothing has changed."""
        newest = self.committed[0]
        self.extents.pin(_PINNED, newest.tables)
        return newest

    def unpin_newest(self) -> None:
        """Unpin what `pin_newest` pinned."""
        self._unpin(_PINNED)

    def _unpin(self, name: str) -> None:
        self.extents.unpin(name)
        older = self._files.newest_first()[1:]
        lost = next((place for place, found in enumerate(older) if self.extents.written_over(found.tables)), len(older))
        for manifest in older[lost:]:  # those before it, too: what is kept for them goes by the number of commits
            self._files.destroy(manifest)

    def close(self) -> None:
        """Close everything and let the lock fall. All files stay. Idempotent; not before transfers are done."""
        self._files.close()
        self.space.close()

    # Opening.

    def _open_directory(self, path: Path) -> DurableDirectory:
        directory = DurableDirectory(path, self.name, self.rank)
        self._directories.append(directory)
        return directory

    def _check_paths(self) -> str | None:
        """The uuid in the directories, which must be of one run and of these paths in this order.

        Where nothing is committed, a directory may not have got that far before its run died; nor may a lost copy.
        """
        abouts = [[read_about(directory.path) for directory in of_copy] for of_copy in self._files.of_copies]
        uuids = {about["uuid"] for of_copy in abouts for about in of_copy if about}
        wrong = [
            about
            for of_copy in abouts
            for place, about in enumerate(of_copy)
            if about and (about["path"], about["num_paths"]) != (place, len(of_copy))
        ]
        whole = self.space.copies.whole[0]
        is_complete = any(None not in of_copy for of_copy in abouts)
        # A directory whose file is gone still has its part of the state; one of another path has nothing.
        is_here = all(about or size for about, size in zip(abouts[whole], self.space.file_sizes, strict=True))
        if wrong or len(uuids) > 1 or not (is_here or not (self.found or self.snapshots.all)):
            raise ResumeError(
                self.folder,
                "is of a run on other paths: give nvme_path the folders that it had, in the same order, or begin "
                "another run under another name",
            )
        return str(uuids.pop()) if uuids and (is_complete or self.found) else None

    def _check_unopened(self) -> None:
        """Raise what kept a copy from being opened, where there is nothing yet to go on with."""
        for error in self.space.unopened:
            if not (self.found or self.snapshots.all):
                raise error
            warn_user(
                f"a copy of the durable run {self.name!r} cannot be opened: {error}. It goes on with one copy. To have "
                "another one made, name a folder on another drive in nvme_path, and start again",
                of_this_rank=True,
            )

    def _claim(self) -> None:
        """Keep what is referred to. Nothing is claimed, nor the files made longer, before all of it was checked."""
        sizes = self.space.file_sizes
        for manifest in self.found:
            check_rows(manifest, sizes, where=f"{self.folder}, manifest {manifest.sequence}")
        for name, manifest in self.snapshots.all.items():
            check_rows(manifest, sizes, where=str(self.snapshots.file_of(name)))
        try:
            for manifest in self.found:
                self.extents.claim(manifest.tables)
            for name, manifest in self.snapshots.all.items():
                self.extents.pin(name, manifest.tables)
        except ValueError as error:
            raise ResumeError(self.folder, f"has manifests that share a part of their extents: {error}") from error
        if self.snapshots.unreadable:
            self.extents.hold_below(_DAMAGED, self.snapshots.held_sizes(sizes))
        self.space.promise()


def _check_devices(paths: Sequence[Path], copies: int) -> None:
    """Raise ConfigError where two copies share a device, which takes both along when it is lost."""
    seen: dict[int, tuple[int, Path]] = {}
    for number, path in enumerate(paths if copies > 1 else ()):
        with suppress(OSError):  # who opens it says so
            copy, device = number // (len(paths) // copies), drive.ask(path, path.stat).st_dev
            other, first = seen.setdefault(device, (copy, path))
            if other != copy:
                key = "zero_optimization.offload_optimizer"
                what = f"{key}.copies = {copies}: {first} and {path} of {key}.nvme_path are on one device"
                remedy = "name a folder on another drive, or write copies = 1"
                raise ConfigError([f"{what}, and copies have to be on drives of their own; {remedy}"])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
