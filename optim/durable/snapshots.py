"""Take and remove snapshots on all ranks or on none (`offload.durable.snapshots` says how)."""

import socket
from functools import partial
from typing import NamedTuple

from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.errors import ResumeError
from nvme_offload.offload.warn import warn_user
from ..ranks.collective import Ranks


class _Kept(NamedTuple):
    host: str
    folder: str
    published: set[str]
    prepared: set[str]
    unreadable: dict[str, str]
    """The file by the name of the snapshot."""


class SnapshotsOfRanks:
    """The snapshots of ranks that step together; all of them call each method."""

    def __init__(self, run: DurableRun, ranks: Ranks) -> None:
        self._run = run
        self._ranks = ranks

    def agree(self) -> dict[int, _Kept]:
        """Complete what a kill left half done, and warn of damaged files; return what each rank has, by rank."""
        own = self._run.snapshots
        unreadable = {name: ", ".join(map(str, files)) for name, files in own.unreadable.items()}
        kept = _Kept(socket.gethostname(), str(self._run.folder), set(own), set(own.prepared), unreadable)
        of_all = self._ranks.gather(kept)
        for name, files in unreadable.items():
            warn_user(
                f"the snapshot {name!r} cannot be read, since its file is damaged: {files}. The file stays, and so "
                f"does the space of its step, until remove_snapshot({name!r})",
                of_this_rank=True,
            )
        if any(one.prepared for one in of_all.values()):
            published = set.union(*(one.published for one in of_all.values()))
            self._ranks.together(partial(self._run.agree_on_snapshots, published))
            of_all = self._ranks.gather(kept._replace(published=set(own), prepared=set()))
        return of_all

    def take(self, name: str) -> None:
        """Keep the newest committed step under a name. If a rank cannot prepare it, none keeps it."""
        self.agree()
        try:
            self._ranks.together(partial(self._run.prepare_snapshot, name))
        except Exception:
            if name in self._run.snapshots.prepared:
                self._run.delete_prepared(name)
            raise
        self._ranks.together(partial(self._run.snapshots.publish, name))

    def remove(self, name: str) -> None:
        """Give up what is kept under a name, or damaged of that name, wherever it is. KeyError: no rank has it."""
        of_all = self.agree()
        if not any(name in one.published or name in one.unreadable for one in of_all.values()):
            raise _none_of(name, of_all)
        snapshots = self._run.snapshots
        self._ranks.together(lambda: snapshots.withdraw(name) if name in snapshots else None)
        self._ranks.together(partial(self._run.delete_snapshot, name))

    def find(self, name: str) -> Manifest:
        """Return this rank's part of a snapshot. KeyError: no rank has it. ResumeError: one lacks or cannot read it."""
        of_all = self.agree()
        lacking = {rank: one for rank, one in of_all.items() if name not in one.published}
        if not lacking:
            return self._run.snapshots[name]
        if len(lacking) == len(of_all) and not any(name in one.unreadable for one in of_all.values()):
            raise _none_of(name, of_all)
        said = [
            f"on rank {rank}, host {one.host}, "
            + (f"it is damaged: {one.unreadable[name]}" if name in one.unreadable else f"it is not in {one.folder}")
            for rank, one in lacking.items()
        ]
        raise ResumeError(
            self._run.folder,
            f"has no snapshot {name!r} that all ranks can read: {'; '.join(said)}. Nothing has changed: bring that "
            "file back from a copy, or go on from the latest step with resume()",
        )


def _none_of(name: str, of_all: dict[int, _Kept]) -> KeyError:
    there = sorted(set.intersection(*(one.published for one in of_all.values())))
    return KeyError(f"no snapshot {name!r}; there are: {', '.join(there) or 'none'}")
