"""A checkpoint is in one folder that all ranks share, or in one on each host, with the files of the ranks there.

The index (`.metadata`, `state.json`, `objects.pt`, `manifest.json`) is in each of them, byte for byte the same. So the
folders of all hosts, copied into one, are an ordinary checkpoint, and the digest of the manifest tells one save from
another. All hosts have theirs whole before the first gives it its name.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from nvme_offload.offload._torch_private import storage_place
from nvme_offload.offload.errors import CheckpointError
from ..ranks.collective import gather, is_alone, on_every_rank, on_first_rank, this_rank
from . import files
from .files import FileRecord, HostSaves
from .run_state import OBJECTS, STATE, TrainingParts
from .storage import METADATA, VerifiedReader

T = TypeVar("T")

INDEX = (METADATA, STATE, OBJECTS)


@dataclass(frozen=True)
class CheckpointSite:
    """Some ranks keep the folder of a checkpoint: they make it, write the index and give it its name.

    Ranks are those of the group.
    """

    group: dist.ProcessGroup | None
    keepers: tuple[int, ...] = (0,)
    keeper: int = 0
    """It keeps the folder of this rank."""
    host: str = ""
    """The name of this host, if each has a folder of its own."""

    @classmethod
    def of(cls, training: TrainingParts) -> CheckpointSite:
        """Ask all ranks where they are."""
        if not training.node_local or is_alone():
            return cls(training.group)
        hosts = [*gather(socket.gethostname(), training.group).values()]
        own = hosts[dist.get_rank(training.group)]
        keepers = sorted({hosts.index(host) for host in hosts})
        return cls(training.group, tuple(keepers), hosts.index(own), own)

    def gather(self, value: T) -> list[T]:
        """Return what each rank gives."""
        return [*gather(value, self.group).values()]

    @property
    def is_keeper(self) -> bool:
        """Whether this rank keeps a folder."""
        return is_alone() or dist.get_rank(self.group) == self.keeper

    def keep(self, action: Callable[[], object]) -> None:
        """Run an action on those that keep a folder."""
        on_every_rank(lambda: action() if self.is_keeper else None, self.group)

    def found(self, root: Path, tag: str | None) -> FoundCheckpoint | None:
        """Find a checkpoint and who reads which file of it; None where `tag` is None and nothing was ever saved."""
        if self.host:
            return self._found_on_hosts(root, tag)
        folder = on_first_rank(lambda: files.find(root, tag), self.group)
        if folder is None:
            return None
        manifest = on_every_rank(lambda: files.read_manifest(folder), self.group)
        _check_index(folder, manifest)
        num_ranks = dist.get_world_size(self.group)
        readers = {name: place % num_ranks for place, name in enumerate(_by_size(manifest))}
        return FoundCheckpoint(folder, manifest, readers, frozenset(manifest))

    def _found_on_hosts(self, root: Path, tag: str | None) -> FoundCheckpoint | None:
        own = on_every_rank(lambda: HostSaves.below(root, tag), self.group)
        of_all = self.gather((self.host, own))
        save = _newest(root, of_all)
        if save is None:
            if tag is None:
                return None
            raise CheckpointError(root / tag, "does not exist on any host")
        manifest = next(saves.folders[save][1] for _, saves in of_all if save in saves.folders)
        folder = own.folders[save][0] if save in own.folders else root / (tag or own.tag or "")
        here = frozenset(name for name in manifest if (folder / name).is_file())
        having = self.gather(here)
        holders = {name: [rank for rank, there in enumerate(having) if name in there] for name in manifest}
        if missing := [f"{name}, which host {manifest[name].host} had" for name in manifest if not holders[name]]:
            what = f"lacks {'; '.join(sorted(missing))}"
            raise CheckpointError(folder, f"{what}: bring back what is missing, or load another checkpoint")
        if lost := sorted({host for host, saves in of_all if save not in saves.folders}):
            index = ", ".join((*INDEX, files.MANIFEST))
            raise CheckpointError(folder, f"is not there on host {', '.join(lost)}: copy {index} of another host to it")
        data = [name for name in _by_size(manifest) if name not in INDEX]
        readers = {name: holders[name][place % len(holders[name])] for place, name in enumerate(data)}
        _check_index(folder, manifest)
        return FoundCheckpoint(folder, manifest, readers, here)


def _newest(root: Path, of_all: Sequence[tuple[str, HostSaves]]) -> str | None:
    """Return the save that is meant, of those that the hosts have under the tag; None where there is none."""
    named = {saves.named for _, saves in of_all if saves.named is not None}
    # A host that was stopped before it gave its folder the name has it whole under another one.
    newer = {save for save in named if any(save in saves.unnamed for _, saves in of_all)}
    if len(newer or named) > 1:
        said = sorted({f"{saves.tag} on host {host}" for host, saves in of_all if saves.named is not None})
        raise CheckpointError(root, f"has different checkpoints on the hosts: {', '.join(said)}; name a tag they share")
    return next(iter(newer or named), None)


class FoundCheckpoint(NamedTuple):
    """A checkpoint as one rank sees it."""

    folder: Path
    manifest: Mapping[str, FileRecord]
    readers: Mapping[str, int]
    """It verifies a file, and reads it for ranks that do not see it. Each rank verifies a file that is not in here."""
    here: frozenset[str]
    """The files that this rank sees."""

    def share_of(self, rank: int) -> list[str]:
        """Return the files that a rank verifies."""
        return [name for name in _by_size(self.manifest) if self.readers.get(name, rank) == rank]


class HostsReader(VerifiedReader):
    """Reads what this rank sees, and has the rest of the ranks that see it, one item of each rank in turn."""

    def __init__(self, found: FoundCheckpoint, metadata: Metadata, group: dist.ProcessGroup | None) -> None:
        super().__init__(found.folder, metadata)
        self._found = found
        self._group = group

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all of this rank's plan; what fails here is raised when no other rank waits for this one any more."""
        far = [item for item in plan.items if self._place_of(item)[0] not in self._found.here]
        asked = gather([self._place_of(item) for item in far], self._group).values()
        near = [item for item in plan.items if self._place_of(item)[0] in self._found.here]
        problems: list[BaseException] = []
        _try(lambda: super(HostsReader, self).read_data(replace(plan, items=near), planner), problems)
        own, items = dist.get_rank(self._group), iter(far)
        for turn in zip_longest(*asked):
            for asking, place in enumerate(turn):
                if place is not None and self._found.readers[place[0]] == own:
                    dist.send_object_list([self._bytes_at(*place)], group=self._group, group_dst=asking)
                elif place is not None and asking == own:
                    box: list[bytes | OSError] = [b""]
                    dist.recv_object_list(box, group=self._group, group_src=self._found.readers[place[0]])
                    _try(partial(_take, planner, next(items), box[0]), problems)
        if problems:
            raise problems[0]
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place_of(self, item: ReadItem) -> tuple[str, int, int]:
        return storage_place(self.storage_data[item.storage_index])

    def _bytes_at(self, name: str, offset: int, length: int) -> bytes | OSError:
        try:
            with (self._found.folder / name).open("rb") as file:
                file.seek(offset)
                return file.read(length)
        except OSError as error:
            error.add_note(f"on {this_rank()}")
            return error


def _take(planner: LoadPlanner, item: ReadItem, given: bytes | OSError) -> None:
    """Put what another rank has read where it belongs, as torch's reader does."""
    if isinstance(given, OSError):
        raise given
    tensor = torch.load(io.BytesIO(given), map_location="cpu", weights_only=True)
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def _try(action: Callable[[], object], problems: list[BaseException]) -> None:
    try:
        action()
    except BaseException as problem:
        problems.append(problem)


def _by_size(manifest: Mapping[str, FileRecord]) -> list[str]:
    return sorted(manifest, key=lambda name: (manifest[name].size_bytes, name))


def _check_index(folder: Path, manifest: Mapping[str, FileRecord]) -> None:
    for name in INDEX:
        if name not in manifest:
            raise CheckpointError(folder / files.MANIFEST, f"does not list {name}")
