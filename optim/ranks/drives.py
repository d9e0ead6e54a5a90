"""Ranks follow the drives: each process gets the rank whose directories of a durable run it reaches.

Launchers give ranks in any order, and another one after a restart. The drives stay where they are. So where we make the
process group, ranks are given before that, through its store: mesh, samplers and seeds follow, and no byte moves.
"""

import json
import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import NamedTuple, Self

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.durable.inventory import find_runs, without_lost

_KEY = "nvme_offload/ranks"


class Reach(NamedTuple):
    """The directories of a durable run that one process reaches."""

    host: str
    folders: Mapping[int, Sequence[str]]
    """By the rank that has committed something there; all of its paths."""

    @classmethod
    def of(cls, config: OffloadConfig | None) -> Self:
        """Look on the paths of a section; raises OSError where a folder cannot be looked into."""
        name = None if config is None else config.zero_optimization.offload_optimizer.run_name
        paths = [] if config is None or name is None else config.nvme_paths
        if config is not None and config.zero_optimization.offload_optimizer.copies > 1:
            paths, _ = without_lost(paths)
        runs = find_runs(paths, name)
        there = {
            rank.rank: [*map(str, rank.copies.read_from)]
            for run in runs
            for rank in run.ranks
            if (rank.steps or rank.snapshots) and not rank.copies.num_missing
        }
        return cls(socket.gethostname(), there)


def join(backend: str, config: OffloadConfig | None) -> None:
    """Make the process group that a launcher has described, each process with the rank of its drives.

    Where no ranks serve, the launcher's stay, and `resume()` says on all of them what is where. ``RANK`` of the
    environment says the rank from here on. A section that cannot be read (None) is said when there is a group.
    """
    store, rank, num_ranks = next(iter(rendezvous("env://")))
    reach = Reach(socket.gethostname(), {})
    with suppress(OSError):  # no such folder: likewise
        reach = Reach.of(config)
    key = f"{_KEY}/{store.add(f'{_KEY}/{rank}', 1)}"  # one store may serve several groups, one after the other
    store.set(f"{key}/{rank}", json.dumps([*reach.folders]))
    if rank == 0:
        reached = [set(json.loads(store.get(f"{key}/{each}"))) for each in range(num_ranks)]
        store.set(f"{key}/given", json.dumps(ranks_of(reached) or [*range(num_ranks)]))
    rank = json.loads(store.get(f"{key}/given"))[rank]
    os.environ["RANK"] = str(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)


def ranks_of(reached: Sequence[Set[int]]) -> list[int] | None:
    """Give each process a rank whose directories it reaches, its own if it can be; None where that cannot be for all.

    Ranks that nobody reaches go to the processes that are left.
    """
    numbers = range(len(reached))
    wanted = set().union(*reached) & {*numbers}
    process_of = {number: number for number in numbers if number in reached[number]}

    def place(process: int, tried: set[int]) -> bool:
        for rank in sorted((reached[process] & wanted) - tried):
            if rank not in tried:
                tried.add(rank)
                if rank not in process_of or place(process_of[rank], tried):
                    process_of[rank] = process
                    return True
        return False

    for number in set(numbers) - {*process_of.values()}:
        place(number, set())
    if wanted - process_of.keys():
        return None
    given = {process: rank for rank, process in process_of.items()}
    left = [rank for rank in numbers if rank not in process_of]
    given |= {number: number for number in left if number not in given}
    free = iter(rank for rank in left if rank not in given.values())
    return [given[number] if number in given else next(free) for number in numbers]


def misplaced(reaches: Mapping[int, Reach]) -> str:
    """Say where ranks have committed what they do not reach and others do, and where to start whom; else nothing."""
    having = {rank: [other for other in reaches if rank in reaches[other].folders] for rank in reaches}
    lost = [rank for rank, others in having.items() if others and rank not in others]
    if not lost:
        return ""
    elsewhere = []
    for rank in lost:
        there, looking = reaches[having[rank][0]], ", ".join(map(str, having[rank]))
        folders = " and ".join(there.folders[rank])
        elsewhere.append(f"that of rank {rank} is in {folders} on host {there.host}, where rank {looking} looks")
    hosts: defaultdict[str, list[str]] = defaultdict(list)
    for rank, others in having.items():
        if others:
            hosts[reaches[rank if rank in others else others[0]].host].append(str(rank))
    order = "; ".join(f"{', '.join(ranks)} on host {host}" for host, ranks in hosts.items())
    serves = ranks_of([{*reach.folders} for _, reach in sorted(reaches.items())]) is not None
    group = ", or make no process group before initialize, which gives each process the rank of its drives"
    return (
        f"the ranks are not where their commits are: {'; '.join(elsewhere)}. Start ranks {order}, each with the "
        f"nvme_path that it had{group if serves else ''}"
    )
