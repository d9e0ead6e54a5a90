"""Runs that can be watched: in run directories, and in logs."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nvme_offload.offload.host.proc import PROC
from nvme_offload.offload.storage.run_directory import PREFIX, RECORD_NAME
from nvme_offload.optim.run_record import read_records

State = Literal["live", "ended", "gone", "unknown"]


class NoRunError(RuntimeError):
    """There is nothing to watch at a place; the message says what there is, and what to do."""


@dataclass(frozen=True)
class Run:
    """The latest record of a run."""

    record: dict[str, Any]
    is_there: bool = True
    """Whether its file still is."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from other runs."""
        return self.record["host"], self.record["pid"], self.record["started"]

    @property
    def state(self) -> State:
        """`gone`: it ended without a word here. `unknown`: on another host, or in another container."""
        if self.record["ended"]:
            return "ended"
        if not self.is_there:
            return "gone"
        if self.record["host"] != socket.gethostname():
            return "unknown"
        return "live" if (PROC / str(self.record["pid"])).exists() else "gone"

    def gone(self) -> Run:
        """The same run when its file is not there any more."""
        return replace(self, is_there=False)


def is_over(run: Run) -> bool:
    """Whether nothing more will come."""
    return run.state in ("ended", "gone")


def runs_of(path: Path) -> list[Run]:
    """The runs at a path: a log, a run directory, or a folder with run directories in it.

    Raises:
        NoRunError: there is none, or none of which anything can be read; says what to do.
    """
    if path.is_dir():
        own = path / RECORD_NAME
        files = [own] if own.exists() else sorted(path.glob(f"{PREFIX}*/{RECORD_NAME}"))
        if not files:
            raise NoRunError(_nothing_in(path))
    elif path.exists():
        files = [path]
    else:
        last = "the record of a run goes with its run directory; the file of run_log in its section stays"
        raise NoRunError(f"{path} is not there: {last}")
    runs = [Run(records[-1]) for file in files if (records := _read(file))]
    if not runs:
        raise NoRunError(f"{path}: nothing noted yet; a run begins to with the first step after a second")
    return runs


def _nothing_in(path: Path) -> str:
    if list(path.glob(PREFIX + "*")) or (path / "lock").exists():
        return f"{path}: nothing noted yet; a run begins to with the first step after a second"
    return f"{path} holds no run: name the nvme_path of a run that goes on, or the file of its run_log"


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        return read_records(file)
    except FileNotFoundError:
        return []  # it ended at this moment
    except (OSError, ValueError) as error:
        raise NoRunError(str(error)) from None
