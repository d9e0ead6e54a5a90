"""Directories that outlive their runs: one for each rank on each path, found again by the run's name.

::

    nvme-durable-NAME-rank0/   swap, owner, run.json; on the first path also what `files` lists

A run has its directory while it has locked the swap file itself, through the descriptor that its transfers use. The
kernel keeps that open until the last transfer of a process has ended, however the process died: whoever gets the lock
knows that nobody writes into the file any more. A lock on a file of its own falls up to 63 ms earlier.

The names begin otherwise than those of `storage.run_directory`: no version of this package takes them for leftovers.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config.section import RUN_NAME
from ..errors import ResumeError
from ..foreign import parse_json
from ..storage import drive
from ..storage.run_directory import SWAP_NAME, remove_leftovers
from ..storage.run_folder import is_at, make_run_folder, read_in, replace_in
from ..storage.swap_file import DirectPolicy, SwapFile
from ..sync import sync_folder
from . import owner

PREFIX = "nvme-durable-"
ABOUT_NAME = "run.json"
FORMAT = 1
"""The format of what a run's directory holds."""

_MAX_PATHS = 1024
_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "uuid": lambda value: isinstance(value, str),
    "path": lambda value: type(value) is int and 0 <= value < _MAX_PATHS,
    "num_paths": lambda value: type(value) is int and 0 < value <= _MAX_PATHS,
    "hosts": lambda value: isinstance(value, dict) and all(isinstance(host, str) for host in value.values()),
}
"""The fields that are read, and what each must be."""

_DIRECTORY_NAME = re.compile(re.escape(PREFIX) + rf"({RUN_NAME.pattern})-rank(\d+)")


def check_name(name: str) -> None:
    """Raise ValueError for what cannot be the name of a run."""
    if not RUN_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name a run: write at most 64 letters, digits, '.', '_' and '-', a letter or digit first"
        )


def directory_of(path: Path, name: str, rank: int) -> Path:
    """Return where a rank of a run has its files on a path."""
    return path.absolute() / f"{PREFIX}{name}-rank{rank}"


def parse_directory(directory: Path) -> tuple[str, int] | None:
    """Name and rank of the run that has this directory; None where it is none of a durable run."""
    match = _DIRECTORY_NAME.fullmatch(directory.name)
    return (match[1], int(match[2])) if match else None


def read_about(directory: Path) -> dict[str, Any] | None:
    """Return what `DurableDirectory.say` wrote, or None; ResumeError: it is damaged, or of a newer version."""
    path = directory / ABOUT_NAME
    try:
        about: dict[str, Any] = parse_json(read_in(directory, ABOUT_NAME).decode())
        written_by = about["format"]
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        raise ResumeError(path, f"cannot be read: {error}") from error
    if written_by != FORMAT:
        raise ResumeError(
            path,
            f"is of format {written_by}, and this version reads {FORMAT}: go on with the version that made it and save "
            "a checkpoint there, or begin another run under another name",
        )
    for name, is_right in _FIELDS.items():
        if not is_right(about.get(name)):
            raise ResumeError(path, f"has {json.dumps(about.get(name))[:60]} for {name}, which no run writes")
    return about


class DurableDirectory:
    """The directory of one rank of a run on one path, which exists: a `SwapDirectory` that is kept."""

    def __init__(self, path: Path, name: str, rank: int) -> None:
        self.path = directory_of(path, name, rank)
        self.name = name
        remove_leftovers(path)
        make_run_folder(self.path)

    def open_swap(self, direct: DirectPolicy) -> SwapFile:
        """Open or make the swap file, and lock it after a dead run's last transfers; StateError names a live one."""
        while True:
            swap = SwapFile(self.path / SWAP_NAME, direct, keep=True)
            try:
                owner.lock(swap.fd, self.path, self.name)
                if is_at(swap.path, swap.fd):
                    owner.Owner.this().note_in(self.path)
                    drive.ask(self.path, sync_folder, self.path)
                    swap.close_in_children()
                    return swap
            except BaseException:
                swap.close()
                raise
            swap.close()  # somebody removed the run while it was opened
            make_run_folder(self.path)

    def say(self, about: Mapping[str, Any]) -> None:
        """Say what this is the directory of; if that is said, on which hosts the ranks are. Lasts when it returns.

        What another run says, which died before all its directories said so, is written over: it has committed nothing.
        """
        there = read_about(self.path)
        kept = there if there is not None and there["uuid"] == about["uuid"] else about
        latest = {name: about[name] for name in ("hosts", "keeping") if name in about}
        said = {"format": FORMAT, **kept, **latest}
        if said != there:
            replace_in(self.path, ABOUT_NAME, json.dumps(said, indent=1).encode())

    def say_again(self, about: Mapping[str, Any]) -> None:
        """Say it if somebody has removed the file."""
        if not drive.ask(self.path, os.path.lexists, self.path / ABOUT_NAME):
            self.say(about)

    def leave(self) -> None:
        """Keep everything: the lock fell with the swap file. Idempotent."""
