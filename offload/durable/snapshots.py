"""Steps that are kept under a name: one file each, which comes and goes in two halves.

::

    prepared.NAME      it is there, and counts where another rank has published it
    snapshot.NAME      it is published
    unreadable.NAME    it was published, is damaged, and another one has its name now

1. A rank publishes a snapshot when all ranks have prepared it. To remove one, all ranks withdraw it first, which makes
   it a prepared one again; then they delete it. So where one rank has published a snapshot, all ranks have it, whenever
   any of them was killed: published, or prepared. They agree by publishing what another one has published, and
   deleting what none has (`DurableRun.agree_on_snapshots`).
2. A damaged file stays, until somebody removes the snapshot by its name. Nobody can read any more where its step lies.
   So nothing is written again of all that the swap files had when the damage was found: `Snapshots.held_sizes`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..config.section import RUN_NAME
from ..errors import ResumeError
from ..storage.run_folder import delete_in, names_in, read_in, rename_in, replace_in
from .manifest import Manifest

PREPARED, PUBLISHED, SET_ASIDE = "prepared.", "snapshot.", "unreadable."
PREFIXES = (PREPARED, PUBLISHED, SET_ASIDE)
HELD_NAME = "held.json"
"""The file that says what the swap files had when a snapshot was found damaged, by the digest of its file."""

_NAME = re.compile(RUN_NAME.pattern + r"(?<!\.new)")  # `replace_in` leaves files that end so


class Snapshots(Mapping[str, Manifest]):
    """The published snapshots of one rank, by name, and what else its folder on the first path has of snapshots.

    Nothing is changed by looking at them, so a run that is alive may be looked at. `each_folder` does something to the
    folder of each copy of the run; None: there is this one.
    """

    def __init__(self, folder: Path, each_folder: Callable[[Callable[[Path], None]], None] | None = None) -> None:
        self._folder = folder
        self._each_folder = each_folder or (lambda act: act(folder))
        self._published: dict[str, Manifest] = {}
        self.prepared: dict[str, Manifest] = {}
        self.unreadable: dict[str, list[Path]] = {}
        """Files that are damaged, by the name of the snapshot."""
        for file in names_in(folder):
            for prefix in PREFIXES:
                name = file.removeprefix(prefix)
                if name != file and _NAME.fullmatch(name):
                    self._look_at(folder / file, prefix, name)

    def _look_at(self, file: Path, prefix: str, name: str) -> None:
        manifest = None
        with suppress(ResumeError):  # it is whole, and a field of it makes no sense
            manifest = Manifest.read(file.parent, file.name) if prefix != SET_ASIDE else None
        if manifest is None:
            self.unreadable.setdefault(name, []).append(file)
        elif prefix == PREPARED:
            self.prepared[name] = manifest
        else:
            self._published[name] = manifest
            self.prepared.pop(name, None)  # no run leaves both: who put another one there has not pinned its step

    def __getitem__(self, name: str) -> Manifest:
        return self._published[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._published)

    def __len__(self) -> int:
        return len(self._published)

    @property
    def all(self) -> dict[str, Manifest]:
        """Return the published ones and the prepared ones."""
        return {**self.prepared, **self._published}

    def file_of(self, name: str) -> Path:
        """Return the file of one of `all`."""
        return self._folder / f"{PUBLISHED if name in self else PREPARED}{name}"

    def check_free(self, name: str) -> None:
        """Raise ValueError for what cannot name another snapshot."""
        if not _NAME.fullmatch(name) or name in self:
            raise ValueError(
                f"{name!r} cannot name a snapshot: it is taken, or has other characters than letters, digits, '.', "
                "'_' and '-', or ends with '.new'"
            )

    # A snapshot comes and goes.

    def prepare(self, name: str, manifest: Manifest) -> None:
        """Keep a manifest, without saying so. It lasts when this returns. What is damaged of this name is set aside."""
        if name in self.unreadable:
            for file in self.unreadable[name]:
                self._rename(file.name, SET_ASIDE + name)
            self.unreadable[name] = [self._folder / (SET_ASIDE + name)]
        self._each_folder(lambda folder: replace_in(folder, PREPARED + name, manifest.encode()))
        self.prepared[name] = manifest

    def publish(self, name: str) -> None:
        """Say that a prepared one is there."""
        self._rename(PREPARED + name, PUBLISHED + name)
        self._published[name] = self.prepared.pop(name)

    def withdraw(self, name: str) -> None:
        """Say no longer that a published one is there: it is prepared again."""
        self._rename(PUBLISHED + name, PREPARED + name)
        self.prepared[name] = self._published.pop(name)

    def delete_prepared(self, name: str) -> None:
        """Delete one that is prepared."""
        self._delete(PREPARED + name)
        del self.prepared[name]

    def delete_unreadable(self, name: str) -> None:
        """Delete what is damaged of this name."""
        for file in self.unreadable.get(name, []):
            self._delete(file.name)
        self.unreadable.pop(name, None)

    def _delete(self, file: str) -> None:
        self._each_folder(lambda folder: delete_in(folder, file))

    def _rename(self, before: str, after: str) -> None:
        self._each_folder(lambda folder: rename_in(folder, before, after))

    # What is damaged.

    def held_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return how many bytes of each swap file, from its beginning, may not be written again. Something is damaged.

        They are those of the moment when the damage was found, which is written down; `sizes` are those of now.
        """
        files = [file for of_name in self.unreadable.values() for file in of_name]
        contents = (read_in(self._folder, file.name) for file in files)
        digests = {hashlib.blake2b(content, digest_size=16).hexdigest() for content in contents}
        noted = {digest: held for digest, held in self._noted().items() if len(held) == len(sizes)}
        if new := digests - noted.keys():
            noted |= {digest: list(sizes) for digest in new}
            self._each_folder(lambda folder: replace_in(folder, HELD_NAME, json.dumps(noted).encode()))
        of_paths = zip(sizes, *(noted[digest] for digest in digests), strict=True)
        return [min(size, max(held)) for size, *held in of_paths]

    def _noted(self) -> dict[str, list[int]]:
        try:
            noted = json.loads(read_in(self._folder, HELD_NAME))
            return {str(digest): [int(size) for size in sizes] for digest, sizes in noted.items()}
        except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
            return {}  # then more is held than was
