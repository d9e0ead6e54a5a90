"""A committed step is one record of where all of it lies, in one of a few places that take turns.

A manifest is written over the oldest of two or more, in one durable write, after everything it refers to is on the
drive. Torn by a power loss it does not have its digest, and the one before it is whole. Which one is newer is said by a
sequence number that only grows, never by the step: a run that goes back counts its steps again.

Sequence numbers are a rank's own. Whether manifests of several ranks are of one commit is said by its identity, which
the ranks agree on before they write: steps of the same number may be of different histories, where a run went back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import OutOfSpaceError, ResumeError
from ..host.region import HostRegion
from ..storage import drive
from ..storage.run_folder import is_at, names_in, open_in, open_synced, read_in
from ..storage.swap_file import move_all, promise
from ..sync import sync_file, sync_folder
from ..units import round_up

MAX_FILES = 17
"""A run has at most so many manifests: the newest, and those that it can go back to."""
NAMES = tuple(f"manifest.{number}" for number in range(MAX_FILES))
"""Their files, in the run's directory on its first path. Most runs have the first two."""

NO_COMMIT = "0" * 32
"""The identity of no commit: the first one of a history has it before itself."""

_MAGIC = b"nvmerun1"
_COMMIT_ID = re.compile(r"[0-9a-f]{32}")
_HEADER = struct.Struct("<8sQQqQ32s")  # magic, sequence, incarnation, step, bytes of the body, digest of all else
_TABLE = np.dtype("<i8")
_BLOCK_BYTES = 4096
_FIRST_BYTES = 1 << 20  # what most runs ever need: a disk that is full later keeps none of their steps back
_GROWTH = 1.5
_NUMBERS_END = 1 << 62  # one that a run counts up never comes so far, and fits into a row


@dataclass(frozen=True, eq=False)
class Manifest:
    """One committed step of one rank."""

    step: int
    """As the optimizer counts. Goes back where a run does."""
    sequence: int
    """The number of this one among all manifests of the run that were ever written; at least 1."""
    incarnation: int
    """Which life of the run wrote it."""
    identity: str
    """The digest of what the run was then."""
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)
    """2D int64, by name: where things lie. See `chain.ChainRows`."""
    blob: bytes = b""
    is_first: bool = False
    """Whether there was nothing to go on from before it. Then another rank may not have come that far."""
    commit_id: str = NO_COMMIT
    """32 hexadecimal digits that the manifests of all ranks have of this commit, and of no other one."""
    previous_id: str = NO_COMMIT
    """`commit_id` of the commit before it, which it goes on from."""
    is_alone: bool = True
    """Whether it was written to one copy of the run alone."""

    @property
    def key(self) -> tuple[int, int, str]:
        """Tell this commit from all others of the rank: copies of it have the same."""
        return self.sequence, self.incarnation, self.commit_id

    def says_as(self, other: Manifest) -> bool:
        """Whether another manifest of this rank says the same, as that of a snapshot does and its copy."""
        names = self.tables.keys() | other.tables.keys()
        own, others = self.tables, other.tables
        return self.blob == other.blob and all(np.array_equal(own.get(n, ()), others.get(n, ())) for n in names)

    def may_follow(self, other: Manifest) -> bool:
        """Whether another one is of the commit before this."""
        return self.previous_id == other.commit_id

    def encode(self) -> bytes:
        """The bytes of the file."""
        tables = {name: np.ascontiguousarray(table, _TABLE) for name, table in self.tables.items()}
        about = {
            "identity": self.identity,
            "tables": {name: table.shape for name, table in tables.items()},
            "blob": len(self.blob),
            "first": self.is_first,
            "commit": self.commit_id,
            "previous": self.previous_id,
            "alone": self.is_alone,
        }
        described = json.dumps(about).encode()
        parts = [struct.pack("<Q", len(described)), described, *(table.tobytes() for table in tables.values())]
        body = b"".join([*parts, self.blob])
        fields = (_MAGIC, self.sequence, self.incarnation, self.step, len(body))
        return _HEADER.pack(*fields, _digest(_HEADER.pack(*fields, bytes(32)), body)) + body

    @classmethod
    def read(cls, folder: Path, name: str) -> Manifest | None:
        """Read a file of a run's folder; None if no manifest is whole in it. ResumeError names a wrong field."""
        try:
            return cls.decode(read_in(folder, name))
        except ValueError as error:
            raise ResumeError(folder / name, f"is no manifest that a run writes: {error}") from error

    @classmethod
    def all_in(cls, folder: Path) -> dict[Path, Manifest]:
        """Read those of a run's folder that are whole, the newest first. One that is being written is none then."""
        read = {folder / name: cls.read(folder, name) for name in names_in(folder) if name in NAMES}
        whole = [(path, manifest) for path, manifest in read.items() if manifest is not None]
        return dict(sorted(whole, key=lambda each: each[1].sequence, reverse=True))

    @classmethod
    def decode(cls, content: bytes) -> Manifest | None:
        """Decode what a file begins with; None if no manifest is whole in it. ValueError names a wrong field."""
        if len(content) < _HEADER.size:
            return None
        magic, sequence, incarnation, step, body_bytes, digest = _HEADER.unpack_from(content)
        body = memoryview(content)[_HEADER.size : _HEADER.size + body_bytes]
        if magic != _MAGIC or len(body) != body_bytes:
            return None
        if digest != _digest(_HEADER.pack(magic, sequence, incarnation, step, body_bytes, bytes(32)), body):
            return None
        _check("sequence", sequence, 1 <= sequence < _NUMBERS_END)
        _check("incarnation", incarnation, incarnation < _NUMBERS_END)
        _check("step", step, 0 <= step < _NUMBERS_END)
        about, tables, blob = _parse(body)
        is_first, commit, previous, is_alone = (about[name] for name in ("first", "commit", "previous", "alone"))
        return cls(step, sequence, incarnation, about["identity"], tables, blob, is_first, commit, previous, is_alone)


def _check(field_name: str, value: object, is_right: bool) -> None:
    if not is_right:
        raise ValueError(f"its {field_name} is {str(value)[:60]!r}")


def _digest(header: bytes, body: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(header, digest_size=32)
    digest.update(body)
    return digest.digest()


def _parse(body: memoryview) -> tuple[dict[str, Any], dict[str, np.ndarray], bytes]:
    """The parts of a body that has its digest. ValueError names a field that makes no sense; nothing was allocated."""
    size = struct.unpack_from("<Q", body)[0] if len(body) >= 8 else -1
    _check("length of its description", size, 0 <= size <= len(body) - 8)
    try:
        about = json.loads(bytes(body[8 : 8 + size]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its description is no JSON: {error}") from error
    _check("description", about, isinstance(about, dict))
    identity = about.get("identity")
    _check("identity", identity, isinstance(identity, str) and identity.isalnum())
    for name in ("first", "alone"):
        _check(name, about.get(name), isinstance(about.get(name), bool))
    for name in ("commit", "previous"):
        said = about.get(name)
        _check(name, said, isinstance(said, str) and _COMMIT_ID.fullmatch(said) is not None)
    _check("tables", about.get("tables"), isinstance(about.get("tables"), dict))
    at, tables = 8 + size, {}
    for name, shape in about["tables"].items():
        is_pair = isinstance(shape, list) and len(shape) == 2
        is_shape = is_pair and all(type(side) is int and side >= 0 for side in shape)
        size_bytes = _TABLE.itemsize * shape[0] * shape[1] if is_shape else -1
        _check(f"tables.{name}", shape, 0 <= size_bytes <= len(body) - at)
        tables[name] = np.frombuffer(body[at : at + size_bytes], _TABLE).reshape(shape).copy()
        at += size_bytes
    _check("blob", about.get("blob"), type(about.get("blob")) is int and about["blob"] == len(body) - at)
    return about, tables, bytes(body[at:])


class ManifestFiles:
    """The manifests of a run, in its directory on its first path.

    `count` is at least 2. A run that once had more still shows them, until they are written over.
    """

    def __init__(self, folder: Path, *, direct: bool, count: int = 2) -> None:
        there = set(names_in(folder))
        names = [name for place, name in enumerate(NAMES) if place < count or name in there]
        self._paths = [folder / name for name in names]
        self._held = [Manifest.read(folder, name) if name in there else None for name in names]
        if made := [name for name in names if name not in there]:
            for name in made:
                _make(folder, name)
            drive.ask(folder, sync_folder, folder)
        self._files = [open_synced(folder, name, direct=direct) for name in names]
        self._memory = HostRegion(_BLOCK_BYTES)

    @property
    def without_name(self) -> list[Path]:
        """Return the files that somebody removed or moved."""
        pairs = zip(self._paths, self._files, strict=True)
        return [path for path, file in pairs if not is_at(path, file.fileno())]

    def newest_first(self) -> list[Manifest]:
        """Return the manifests that are whole."""
        return sorted((held for held in self._held if held), key=lambda held: held.sequence, reverse=True)

    def write(self, manifest: Manifest) -> None:
        """Put a manifest in the place of the oldest. It lasts when this returns; if it raises, the newest is whole."""
        newest = next((held for held in self.newest_first()), None)
        if newest is not None and manifest.sequence <= newest.sequence:
            raise ValueError(f"manifest {manifest.sequence} is not newer than {newest.sequence}")
        sequences = [0 if held is None else held.sequence for held in self._held]
        place = sequences.index(min(sequences))
        content = manifest.encode()
        size_bytes = round_up(len(content), _BLOCK_BYTES)
        self._make_room(place, size_bytes)
        self._held[place] = None
        try:
            self._write(place, content, size_bytes)
        except BaseException:
            with suppress(OSError):  # it may be there all the same; what refers to its extents tells them by their sums
                self._write(place, b"", _BLOCK_BYTES)
            raise
        self._held[place] = manifest

    def destroy(self, manifest: Manifest) -> None:
        """Make a manifest none, so that nobody takes it up any more. It is gone for good when this returns."""
        for place, held in enumerate(self._held):
            if held is not None and held.sequence == manifest.sequence:
                self._write(place, b"", _BLOCK_BYTES)
                self._held[place] = None

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files:
            file.close()

    def _make_room(self, place: int, size_bytes: int) -> None:
        if size_bytes > self._memory.size_bytes:
            self._memory = HostRegion(int(size_bytes * _GROWTH))
        fd, path = self._files[place].fileno(), self._paths[place]
        if size_bytes > drive.ask(path, os.fstat, fd).st_size:
            try:
                promise(fd, path, 0, round_up(int(size_bytes * _GROWTH), _BLOCK_BYTES), "a manifest")
            except OutOfSpaceError:
                promise(fd, path, 0, size_bytes, "a manifest")
            drive.ask(path, sync_file, fd)

    def _write(self, place: int, content: bytes, size_bytes: int) -> None:
        memory = self._memory.view(torch.uint8, 0, size_bytes).numpy().data
        memory[: len(content)] = content
        memory[len(content) :] = bytes(size_bytes - len(content))
        move_all(os.pwrite, self._files[place].fileno(), self._paths[place], "write", 0, memory, extent="a manifest")


def _make(folder: Path, name: str) -> None:
    with open_in(folder, name, os.O_RDWR | os.O_CREAT) as fd:
        promise(fd, folder / name, 0, _FIRST_BYTES, "a manifest")
        drive.ask(folder / name, sync_file, fd)
