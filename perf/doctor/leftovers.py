"""Run directories on a path: of runs that are alive, and of runs that died. Looks at them and leaves them alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nvme_offload.offload.storage.run_directory import LOCK_NAME, PREFIX
from nvme_offload.offload.storage.run_folder import open_in
from nvme_offload.offload.units import format_bytes
from nvme_offload.perf.doctor.findings import Finding, Level, ok, problem

State = Literal["live", "dead", "unknown"]


@dataclass(frozen=True)
class FoundRun:
    """A run directory. `unknown` is one that this user may not look into."""

    name: str
    state: State
    size_bytes: int


def find_runs(path: Path) -> list[FoundRun]:
    """The run directories below `path`. A run that begins at this moment is locked when it gets such a name."""
    return [FoundRun(run.name, _state(run), _size(run)) for run in sorted(path.glob(PREFIX + "*")) if run.is_dir()]


def _state(run: Path) -> State:
    try:
        lock = open_in(run, LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return "dead"  # it died between making its directory and its lock
    except OSError:
        return "unknown"
    with lock as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "live"
    return "dead"


def _size(run: Path) -> int:
    size = 0
    with contextlib.suppress(OSError):
        for entry in run.iterdir():
            with contextlib.suppress(OSError):  # a run that ends takes its files along
                size += entry.stat().st_blocks * 512
    return size


def check_runs(path: Path) -> Finding:
    """What other runs have on this path."""
    try:
        runs = find_runs(path)
    except OSError as error:
        return problem(Level.NOTE, "other runs", f"cannot be looked for: {error.strerror}", "a run will fail here, too")
    values = {"runs": [{"name": run.name, "state": run.state, "size_bytes": run.size_bytes} for run in runs]}
    by_state = {state: [run for run in runs if run.state == state] for state in ("live", "dead", "unknown")}
    found = "; ".join(f"{_words(state)}: {_list(found)}" for state, found in by_state.items() if found) or "none"
    if dead := by_state["dead"]:
        size = format_bytes(sum(run.size_bytes for run in dead))
        meaning = f"{size} are taken by runs that were killed; the next run on this path removes them by itself"
        remedy = f"to have the space now: rm -r {' '.join(shlex.quote(str(path / run.name)) for run in dead)}"
        return problem(Level.NOTE, "other runs", found, meaning, remedy, **values)
    return ok("other runs", found, **values)


def _words(state: str) -> str:
    return {"live": "alive", "dead": "left behind", "unknown": "of another user"}[state]


def _list(runs: list[FoundRun]) -> str:
    return ", ".join(f"{run.name} ({format_bytes(run.size_bytes)})" for run in runs)
