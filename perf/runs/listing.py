"""Durable runs as JSON, and what several hosts say of a run as one."""

import dataclasses
import json
from collections import ChainMap
from collections.abc import Sequence
from typing import Any

from nvme_offload.offload.durable.inventory import CopiesFound, RankFound, RunFound
from nvme_offload.offload.durable.owner import Owner


def format_runs(found: Sequence[RunFound]) -> str:
    """Return a list of all runs as JSON, for `parse_runs` and for people."""
    more = {"step": "step", "alive": "is_alive", "size_bytes": "size_bytes", "committed_at": "committed_at"}
    said = [dataclasses.asdict(run) | {key: getattr(run, name) for key, name in more.items()} for run in found]
    return json.dumps(said, indent=2, default=str)


def parse_runs(text: str) -> list[RunFound]:
    """Return the runs of a list that `format_runs` made; ValueError where it is none."""
    try:
        return [
            RunFound(run["name"], tuple(map(_rank_of, run["ranks"])), run["num_ranks"], run["hosts"])
            for run in json.loads(text)
        ]
    except (LookupError, TypeError) as error:
        raise ValueError(repr(error)) from error


def _rank_of(said: dict[str, Any]) -> RankFound:
    owner = Owner(**said["owner"]) if said["owner"] else None
    return RankFound(**{**said, "copies": CopiesFound(*said["copies"]), "owner": owner})


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
