"""Durable runs as JSON, and what several hosts say of a run as one."""

import dataclasses
import json
from collections import ChainMap
from collections.abc import Sequence
from typing import Any

from nvme_offload.offload.durable.inventory import CopiesFound, RankFound, RunFound
from nvme_offload.offload.durable.owner import Owner
from nvme_offload.offload.foreign import COUNT, EACH, RANK, fits, parse_json

_NAMES = [str]
_OWNER = {"pid": COUNT, "began": str, "host": str}
_COPIES = {"read_from": _NAMES, "others": _NAMES, "num_paths": COUNT}
_RANK: dict[str, Any] = {
    "rank": RANK,
    "folders": _NAMES,
    "copies": list,
    "steps": {EACH: COUNT},
    **dict.fromkeys(("snapshots", "prepared", "unreadable"), _NAMES),
    "committed_at": (float, type(None)),
    "model": str,
    "size_bytes": COUNT,
    "owner": (_OWNER, type(None)),
    "problem": str,
}
_RUN = {"name": str, "ranks": [_RANK], "num_ranks": RANK, "hosts": {EACH: str}}
"""A run is written so."""


def format_runs(found: Sequence[RunFound]) -> str:
    """Return a list of all runs as JSON, for `parse_runs` and for people."""
    more = {"step": "step", "alive": "is_alive", "size_bytes": "size_bytes", "committed_at": "committed_at"}
    said = [dataclasses.asdict(run) | {key: getattr(run, name) for key, name in more.items()} for run in found]
    return json.dumps(said, indent=2, default=str)


def parse_runs(text: str) -> list[RunFound]:
    """Return the runs of a list that `format_runs` made; ValueError where it is none."""
    runs = parse_json(text)
    if not fits(runs, [_RUN]) or not all(run["ranks"] for run in runs):
        raise ValueError("it has other names or values than a list of runs has")
    return [RunFound(run["name"], tuple(map(_rank_of, run["ranks"])), run["num_ranks"], run["hosts"]) for run in runs]


def _rank_of(said: dict[str, Any]) -> RankFound:
    copies = dict(zip(_COPIES, said["copies"], strict=False))
    if not (fits(copies, _COPIES) and copies["read_from"]):
        raise ValueError(f"its copies are {said['copies']}")
    owner = Owner(**{name: said["owner"][name] for name in _OWNER}) if said["owner"] else None
    return RankFound(**{**{name: said[name] for name in _RANK}, "copies": CopiesFound(**copies), "owner": owner})


def joined(found: Sequence[RunFound]) -> list[RunFound]:
    """Return what several hosts found of each run as one; of a rank that several have, the last commit counts."""
    runs = []
    for name in sorted({run.name for run in found}):
        parts = [run for run in found if run.name == name]
        in_order = sorted((rank for part in parts for rank in part.ranks), key=lambda rank: rank.committed_at or 0.0)
        ranks = sorted({rank.rank: rank for rank in in_order}.items())
        num_ranks = max(part.num_ranks for part in parts)
        hosts = {**ChainMap(*(dict(part.hosts) for part in parts))}
        runs.append(RunFound(name, tuple(rank for _, rank in ranks), num_ranks, hosts))
    return runs
