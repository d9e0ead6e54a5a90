"""A run says how it is while it goes on: in a small file that ``offload top`` reads, and in a log that outlasts it."""

import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nvme_offload.offload.activations.kept import ActivationStats
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.foreign import COUNT, fits, parse_json, read_text
from nvme_offload.offload.storage.run_directory import RECORD_NAME, RECORD_NAME_NEW
from nvme_offload.offload.storage.run_folder import open_in
from nvme_offload.offload.storage.tier_plan import TIERS, TierPlan
from nvme_offload.offload.units import format_bytes
from .stats import OptimizerStats

logger = logging.getLogger(__name__)

FORMAT = 1
"""The format of a record. Fields may be added; a reader of another format says so."""
SECONDS = 1.0
"""Between two records, at least."""
LOG_SHARE = 1e-3
"""Least share of the time since a run began between two lines of its log: a day of it is some 6000 lines."""

Say = Callable[[], Mapping[str, Any]]
"""It gives what a record is made of: see `said`."""


def place_in_words(plan: TierPlan, config: OffloadConfig, engine: str) -> str:
    """Say on which tiers the state of an optimizer is, with how many bytes, at which paths, through which engine."""
    sizes = {tier: plan.bytes_on(tier, "optimizer state") for tier in TIERS}
    held = ", ".join(f"{format_bytes(size)} on {tier}" for tier, size in sizes.items() if size) or "none yet"
    paths = f"; {engine} to {', '.join(map(str, config.nvme_paths))}" if config.nvme_paths else ""
    return f"state: {held}{paths}"


def said(
    owner: str, stats: OptimizerStats, plan: TierPlan, config: OffloadConfig, activations: ActivationStats | None
) -> dict[str, Any]:
    """Return what an optimizer says of itself: its numbers, and the words that a reader shows beside them.

    Of `activations` that are kept for its model, the numbers are beside its own.
    """
    tiers: dict[str, dict[str, int]] = {}
    planned: dict[str, dict[str, int]] = {}
    for unit, tier in zip(plan.units, plan.tiers, strict=True):
        sizes = tiers.setdefault(unit.kind, dict.fromkeys(TIERS, 0))
        sizes[tier] += unit.size_bytes
        if tier == "nvme":
            moved = planned.setdefault(unit.kind, {"read": 0, "written": 0})
            moved["read"] += unit.bytes_read
            moved["written"] += unit.bytes_written
    return {
        "optimizer": owner,
        "engine": stats.engine,
        "queue_depth": config.aio.queue_depth * config.aio.rings,
        "paths": list(dict.fromkeys(chain(*config.paths_of_tiers.values()))),
        "tiers": tiers,
        "planned": planned,
        "limit": stats.iteration.limit if stats.iteration else None,
        "scalars": stats.scalars() | (_of_activations(activations) if activations is not None else {}),
    }


def _of_activations(stats: ActivationStats) -> dict[str, float]:
    found: dict[str, float] = {
        "bytes_read": stats.read_bytes,
        "bytes_written": stats.written_bytes,
        "bytes_saved": stats.saved_bytes,
    }
    found |= {"peak_host_bytes": stats.peak_held_bytes, "wait_seconds": stats.seconds_waiting}
    return {f"activation_{name}": value for name, value in found.items()}


class RunRecord:
    """Keeps the latest record of a run in its run directory, and appends some of them to a log.

    It never stops a training: a file that cannot be written is said once and left alone. Nothing is synchronized to the
    drive, and readers see a whole record or the one before it. Without NVMe there is no `directory`. Ranks after the
    first write beside `log`, see `log_of_rank`.
    """

    def __init__(self, directory: Path | None, log: Path | None) -> None:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._head = {
            "format": FORMAT,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "rank": rank,
            "world_size": world_size,
            "started": time.time(),
        }
        self._file = None if directory is None else directory / RECORD_NAME
        self._new = None if directory is None else directory / RECORD_NAME_NEW
        self._log = None if log is None else log_of_rank(log.absolute(), rank)
        self._began = self._written = self._logged = time.monotonic()
        self._before: dict[str, float] = {}
        """The counters as of the record before."""
        self._peak_rate = 0.0

    def note(self, say: Say) -> None:
        """Say that a step has ended; writes where it is time to, and asks nothing where it is not."""
        if (now := time.monotonic()) - self._written >= SECONDS:
            self._written = now
            self._write(say, now, ended=False)

    def close(self, say: Say) -> None:
        """Append the last record to the log, with ``ended``. Idempotent; does nothing in a forked child."""
        if os.getpid() == self._head["pid"]:
            self._write(say, math.inf, ended=True)
            self._file = self._log = None

    def _write(self, say: Say, now: float, *, ended: bool) -> None:
        if self._file is None and self._log is None:
            return
        line = json.dumps(self._record(say(), ended), default=str) + "\n"
        if self._file is not None and self._new is not None:
            self._file = self._tried(self._file, _exchange, self._new, line)
        if self._log is not None and now - self._logged >= LOG_SHARE * (now - self._began):
            self._logged = now
            self._log = self._tried(self._log, _append, line)

    def _record(self, found: Mapping[str, Any], ended: bool) -> dict[str, Any]:
        scalars = found["scalars"]
        now = {
            "seconds": time.time(),
            "steps": scalars["steps"],
            "bytes_read": bytes_moved(scalars, "read"),
            "bytes_written": bytes_moved(scalars, "written"),
            "drive_busy_seconds": scalars["drive_busy_seconds"],
        }
        since = {name: value - self._before[name] for name, value in now.items()} if self._before else None
        if since is not None and since["drive_busy_seconds"] > 0:
            moved = since["bytes_read"] + since["bytes_written"]
            self._peak_rate = max(self._peak_rate, moved / since["drive_busy_seconds"])
        self._before = now
        head = {**self._head, "time": now["seconds"], "ended": ended, "log": self._log}
        plain = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        return {**head, **found, "peak_rate": self._peak_rate, "scalars": plain, "since": since}

    @staticmethod
    def _tried(file: Path, write: Callable[..., None], *arguments: Path | str) -> Path | None:
        try:
            write(file, *arguments)
        except OSError as error:
            logger.warning("%s: %s; what this run does is not noted there any more", file, error.strerror or error)
            return None
        return file


def _exchange(file: Path, new: Path, line: str) -> None:
    new.unlink(missing_ok=True)  # left by one that was cut short
    with open_in(new.parent, new.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        os.write(fd, line.encode())
    new.replace(file)


def _append(file: Path, line: str) -> None:
    with file.open("ab", buffering=0) as log:
        before = log.tell()
        if log.write(line.encode()) < len(line):  # a half would be one line with what the next run appends
            log.truncate(before)
            raise OSError("the drive has no room for a whole record")


def log_of_rank(log: Path, rank: int) -> Path:
    """Return the file of a rank's log: ``run.jsonl`` of rank 0, ``run.rank1.jsonl`` of rank 1."""
    return log if rank == 0 else log.with_name(f"{log.stem}.rank{rank}{log.suffix}")


KINDS = {"optimizer state": "", "parameters": "param_", "gradients": "grad_", "activations": "activation_"}
"""These kinds move to and from drives. The scalars of each have names that begin so."""


def bytes_moved(scalars: Mapping[str, float], way: str) -> float:
    """Return the bytes ``read`` or ``written``, of all `KINDS`."""
    return sum(scalars.get(f"{prefix}bytes_{way}") or 0.0 for prefix in KINDS.values())


_HEAD = {"host": str, "pid": COUNT, "started": float}


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file that a run keeps, of a log its latest run's; ValueError if it is no such file."""
    records: list[dict[str, Any]] = []
    lines = read_text(file, "replace").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break  # being written, or cut off with its run
        records.append(_checked(file, number, line))
    latest = records[-1:] and _run(records[-1])
    return [record for record in records if _run(record) == latest]


def _checked(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError:
        record = None
    found = record.get("format") if isinstance(record, dict) else None
    if found is not None and found != FORMAT:
        said = str(found)[:60]
        raise ValueError(f"{file} has format {said}, this version reads {FORMAT}: use the one that wrote it")
    if found is None or not fits(record, _HEAD):
        raise ValueError(f"{file}, line {number}: not what a run notes of itself")
    return dict(record)


def _run(record: Mapping[str, Any]) -> Sequence[Any]:
    return [record["host"], record["pid"], record["started"]]
