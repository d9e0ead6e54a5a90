"""Durable runs as somebody finds them who is in none: what is there, whose it is, and how it is removed."""

import os
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ForeignFolderError, OffloadError, ResumeError, SwapIOError
from ..foreign import RANK
from ..storage import drive
from ..storage.run_directory import FILE_NAMES, SWAP_NAME, bytes_in, stats_in
from ..storage.run_folder import folder_open, open_in
from ..sync import sync_folder
from . import owner
from .chain import check_rows
from .directory import ABOUT_NAME, parse_directory, read_about
from .identity import MADE_AGAIN, read_identity
from .identity import PREFIX as IDENTITY_PREFIX
from .manifest import NAMES as MANIFEST_NAMES
from .manifest import Manifest
from .run_copies import CopyFound, leading_of
from .snapshots import HELD_NAME, PREFIXES, Snapshots


class CopiesFound(NamedTuple):
    """The copies of one rank's part of a run; most runs have one."""

    read_from: tuple[Path, ...]
    """The directories of the copy to go on from."""
    others: tuple[Path, ...] = ()
    """The directories of another copy that says what this one says."""
    num_paths: int = 0
    """The number of directories that each copy has, on all paths; 0: it does not say."""

    @property
    def num_whole(self) -> int:
        """Return how many copies say the same."""
        return 2 if self.others else 1

    @property
    def num_missing(self) -> int:
        """Return how many directories of the copy to go on from were not looked at."""
        return max(0, self.num_paths - len(self.read_from))


@dataclass(frozen=True)
class RankFound:
    """One rank of a run, with its directories on the paths that were looked at."""

    rank: int
    folders: tuple[Path, ...]
    copies: CopiesFound
    steps: Mapping[str, int]
    """Steps that could be resumed, the latest first, by the identity of the commit, which all ranks have alike."""
    snapshots: tuple[str, ...]
    prepared: tuple[str, ...]
    """Names of snapshots that are there, and count where another rank has published them."""
    unreadable: tuple[str, ...]
    committed_at: float | None
    """When the latest one was committed, in seconds since the epoch."""
    model: str
    size_bytes: int
    """The space that all in `folders` takes on the drive."""
    owner: owner.Owner | None
    """Who is in it; None: nobody."""
    problem: str = ""
    """The reason why it cannot be resumed, as far as can be seen from here."""


@dataclass(frozen=True)
class RunFound:
    """A run, with the ranks that have a directory on the paths that were looked at."""

    name: str
    ranks: tuple[RankFound, ...]
    num_ranks: int
    """All ranks of the run, on whatever hosts; 0: it does not say."""
    hosts: Mapping[str, str]
    """The hosts that ranks were on when the run was last taken up, by the number of the rank, as far as it is said."""

    @property
    def folders(self) -> list[Path]:
        """All its directories."""
        return [folder for rank in self.ranks for folder in rank.folders]

    @property
    def step(self) -> int | None:
        """The latest step that all these ranks have of one history; None where there is none."""
        common = set.intersection(*(set(rank.steps) for rank in self.ranks))
        return next((step for commit, step in self.ranks[0].steps.items() if commit in common), None)

    @property
    def missing(self) -> str:
        """Say which ranks have no directory here, and on which hosts they were; nothing where all are here."""
        here = {rank.rank for rank in self.ranks}
        of_hosts: dict[str, list[str]] = defaultdict(list)
        for number in sorted({*range(self.num_ranks)} - here):
            of_hosts[self.hosts.get(str(number), "")].append(str(number))
        return ", ".join(", ".join(ranks) + f" (host {host})" * bool(host) for host, ranks in of_hosts.items())

    @property
    def snapshots(self) -> list[str]:
        """Names of the snapshots that some rank has published."""
        return sorted({name for rank in self.ranks for name in rank.snapshots})

    @property
    def is_alive(self) -> bool:
        """Whether somebody is in it."""
        return any(rank.owner for rank in self.ranks)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the drives that all ranks take."""
        return sum(rank.size_bytes for rank in self.ranks)

    @property
    def committed_at(self) -> float | None:
        """When the latest commit was, of any rank, in seconds since the epoch."""
        return max((rank.committed_at for rank in self.ranks if rank.committed_at is not None), default=None)


def find_runs(paths: Iterable[Path], name: str | None = None) -> list[RunFound]:
    """Return the durable runs below these folders, or the one of a name. No living run is disturbed."""
    found: dict[str, dict[int, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in dict.fromkeys(path.absolute() for path in paths):
        for folder in sorted(path / name for name in drive.ask(path, os.listdir, path)):
            if (parsed := parse_directory(folder)) is not None and name in (None, parsed[0]):
                of_run, rank = parsed
                found[of_run][rank].append(folder)
    runs = []
    for of_run, ranks in sorted(found.items()):
        of_ranks = [there for rank, folders in sorted(ranks.items()) if (there := _found_in(rank, folders)) is not None]
        if of_ranks:
            found_ranks, numbers, hosts = zip(*of_ranks, strict=True)
            runs.append(RunFound(of_run, found_ranks, max(numbers), {**ChainMap(*hosts)}))
    return runs


def without_lost(paths: Iterable[Path]) -> tuple[list[Path], list[SwapIOError]]:
    """Return the folders that can be looked into, and why the others cannot."""
    found, lost = list[Path](), list[SwapIOError]()
    for path in paths:
        try:
            drive.ask(path, os.listdir, path, direction="read")
            found.append(path)
        except SwapIOError as error:
            lost.append(error)
    return found, lost


def remove_run(run: RunFound) -> None:
    """Delete a run that nobody is in: first what could be resumed, then everything else.

    Raises StateError where somebody is in it, and OSError where a file stays; what can be resumed is gone by then.
    """
    with locked(run):
        for folder in run.folders:
            _delete(folder, MANIFEST_NAMES, PREFIXES)
            drive.ask(folder, sync_folder, folder)
        for folder in run.folders:
            _delete(folder, (ABOUT_NAME, HELD_NAME, owner.NAME, *FILE_NAMES), (IDENTITY_PREFIX,))
            drive.ask(folder, folder.rmdir)


def remove_snapshot(run: RunFound, name: str) -> None:
    """Give up a snapshot of a run that nobody is in. The run uses its space again; the files stay as large."""
    with locked(run):
        there = [Snapshots(folder) for folder in run.folders]
        for snapshots in there:
            if name in snapshots:
                snapshots.withdraw(name)
        for snapshots in there:  # if this is killed from here on, no rank has it: see `snapshots`
            if name in snapshots.prepared:
                snapshots.delete_prepared(name)
            snapshots.delete_unreadable(name)


_OF_GARBAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
_There = tuple[RankFound, int, Mapping[str, str]]
"""The rank as it was found, and the number and hosts of all ranks, as far as it says them."""


def _found_in(rank: int, folders: Sequence[Path]) -> _There | None:
    """Return what is there of a rank; None where somebody removes it at this moment."""
    while folders:
        try:
            return _look_at(rank, folders)
        except FileNotFoundError:  # also of a run that lives and replaces a file
            folders = [folder for folder in folders if drive.ask(folder, os.path.isdir, folder)]
        except (OSError, OffloadError, *_OF_GARBAGE) as error:  # it is somebody else's, a link, or on a dead drive
            there = tuple(folders)
            return RankFound(rank, there, CopiesFound(there), {}, (), (), (), None, "", 0, None, str(error)), 0, {}
    return None


def _look_at(rank: int, folders: Sequence[Path]) -> _There:
    problem, model, num_ranks = "", "", 0
    copies, manifests = CopiesFound(tuple(folders)), dict[Path, Manifest]()
    newest, hosts = None, dict[str, str]()
    try:
        abouts, unreadable = _abouts(folders)
        copies = _copies_of(abouts) if abouts else copies
        if unreadable and (copies.num_missing or not abouts):
            raise unreadable[0]
        for folder in copies.read_from:
            manifests |= Manifest.all_in(folder)
        newest = max(manifests, key=lambda path: manifests[path].sequence, default=None)
        if abouts and not copies.num_missing:
            sizes = [dict(stats_in(folder))[SWAP_NAME].st_size for folder in copies.read_from]
            for path, manifest in manifests.items():
                check_rows(manifest, sizes, where=str(path))
        if newest is not None:
            if lacking := [folder for folder in folders if folder not in abouts]:
                problem = f"{lacking[0] / ABOUT_NAME} {MADE_AGAIN}"
            identity = read_identity(newest.parent, manifests[newest].identity)
            hosts = next(iter(abouts.values()), {}).get("hosts", {})
            model, num_ranks = _in_words(identity), min(int(identity.get("num_ranks", 0)), RANK.stop)
    except (ResumeError, SwapIOError) as error:
        if isinstance(error, FileNotFoundError | ForeignFolderError):
            raise
        problem = problem or str(error)
    if copies.num_missing:
        problem = problem or f"{copies.num_missing} of its {copies.num_paths} paths were not looked at"
    ordered = sorted(manifests.values(), key=lambda manifest: manifest.sequence, reverse=True)
    snapshots = [Snapshots(folder) for folder in copies.read_from]
    found = RankFound(
        rank=rank,
        folders=tuple(folders),
        copies=copies,
        steps={manifest.commit_id: manifest.step for manifest in ordered},
        snapshots=tuple(name for of_folder in snapshots for name in of_folder),
        prepared=tuple(name for of_folder in snapshots for name in of_folder.prepared),
        unreadable=tuple(name for of_folder in snapshots for name in of_folder.unreadable),
        committed_at=None if newest is None else drive.ask(newest, newest.stat).st_mtime,
        model=model,
        size_bytes=sum(map(bytes_in, folders)),
        owner=next((who for folder in folders if (who := _owner_of(folder)) is not None), None),
        problem=problem,
    )
    return found, num_ranks, hosts


def _abouts(folders: Sequence[Path]) -> tuple[dict[Path, dict[str, Any]], list[ResumeError | SwapIOError]]:
    """Return what the directories are of, and what is damaged; another copy may be whole."""
    abouts, damaged = dict[Path, dict[str, Any]](), list[ResumeError | SwapIOError]()
    for folder in folders:
        try:
            if (about := read_about(folder)) is not None:
                abouts[folder] = about
        except (ResumeError, SwapIOError) as error:
            if isinstance(error, FileNotFoundError | ForeignFolderError):
                raise
            damaged.append(error)
    return abouts, damaged


def _in_words(identity: Mapping[str, Any]) -> str:
    """Say what is trained: elements of all ranks, the dtypes that this one stores them in, and the optimizer."""
    try:
        params = identity["parameters"].values()
        numel = sum(prod(param["shape"]) for param in params)
        dtypes = sorted({str(param["dtype"]) for param in params})
        return f"{numel:,} parameters in {' and '.join(dtypes)}, {identity['optimizer']}"
    except (KeyError, TypeError, AttributeError):  # no optimizer wrote it
        return str(identity.get("model", ""))


def _copies_of(abouts: Mapping[Path, Mapping[str, Any]]) -> CopiesFound:
    """Tell the directories of one copy from those of another by the numbers of their paths."""
    places: dict[int, list[Path]] = defaultdict(list)
    for folder, about in abouts.items():
        places[about["path"]].append(folder)
    copies = list(zip(*(places[place] for place in sorted(places)), strict=False))
    found = [CopyFound.look_at(copy[0]) for copy in copies]
    leading = leading_of(found)
    num_paths = max(about["num_paths"] for about in abouts.values())
    same = [copy for copy, one in enumerate(found) if copy != leading and one.says_as(found[leading])]
    return CopiesFound(copies[leading], copies[same[0]] if same else (), num_paths)


def _owner_of(folder: Path) -> owner.Owner | None:
    try:
        swap_file = open_in(folder, SWAP_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with swap_file as fd:
        return None if owner.try_lock(fd, folder) else owner.Owner.noted_in(folder) or owner.NOBODY_KNOWN


def locked(run: RunFound) -> ExitStack:
    """Keep others out of a run until this is closed. Raises StateError, which names its process."""
    with ExitStack() as locks:
        for folder in run.folders:
            try:
                swap_file = open_in(folder, SWAP_NAME, os.O_RDONLY)
            except FileNotFoundError:
                continue
            owner.lock(locks.enter_context(swap_file), folder, run.name)
        for folder in run.folders:
            with suppress(OSError):  # who looks for it then is told the process before; the drive may be read-only
                owner.Owner.this().note_in(folder)
        return locks.pop_all()


def _delete(folder: Path, names: Sequence[str], prefixes: tuple[str, ...]) -> None:
    with folder_open(folder) as place:
        for name in drive.ask(folder, os.listdir, place):
            if name.removesuffix(".new") in names or name.startswith(prefixes):
                drive.ask(folder / name, partial(os.unlink, name, dir_fd=place))
