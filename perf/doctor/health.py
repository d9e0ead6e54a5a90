"""How the disks under a path are: SMART, warmth, and which processors are near them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict

from nvme_offload.offload.units import TB
from nvme_offload.perf.doctor.findings import Finding, Level, ok, problem
from nvme_offload.perf.measure.drives import Drive, temperature
from nvme_offload.perf.measure.health import Health, HealthError, read_health

HOT = 70.0
"""Degrees Celsius from which on makers' drives begin to go slower."""
WORN = 90
"""Percent of its endurance from which on a drive is soon at its end."""
_NO_DRIVES = ("zram", "ram", "brd", "loop")
_WARNINGS = {1: "its spare blocks run out", 4: "it is not reliable any more", 8: "it takes no more writes"}


def check_health(drive: Drive) -> Iterator[Finding]:
    """Each disk of a drive, and where it is in the machine."""
    for disk in drive.disks:
        if not disk.startswith(_NO_DRIVES):
            yield _health_of(disk)
    if (finding := _numa(drive)) is not None:
        yield finding


def _health_of(disk: str) -> Finding:
    warmth = temperature(disk)
    try:
        health = read_health(disk)
    except HealthError as error:
        found = f"{disk}: SMART not known ({error})"
        if warmth is not None:
            found += f"; {warmth:.0f} °C"
        meaning = "its wear and its errors were not looked at"
        remedy = f"sudo nvme smart-log {shlex.quote(f'/dev/{disk}')}" if disk.startswith("nvme") else ""
        return problem(Level.NOTE, "health", found, meaning, remedy, disk=disk, temperature=warmth)
    return judged(disk, health, warmth)


def judged(disk: str, health: Health, warmth: float | None = None) -> Finding:
    """What the health of a disk means for a run; `warmth` is newer than what SMART has of it."""
    now = health.temperature if warmth is None else warmth
    parts = [
        f"{health.percent_used} % of its endurance used",
        f"{health.bytes_written / TB:.1f} TB written in {health.power_on_hours} h",
        f"{health.spare} % of the spare blocks left",
    ]
    found = f"{disk}: {', '.join(parts)}{'' if now is None else f', {now:.0f} °C'}"
    values = asdict(health) | {"disk": disk, "temperature": now}

    def bad(level: Level, meaning: str, remedy: str) -> Finding:
        return problem(level, "health", found, meaning, remedy, **values)

    if health.critical_warning & sum(_WARNINGS) or health.spare < health.spare_threshold:
        said = [words for bit, words in _WARNINGS.items() if health.critical_warning & bit]
        meaning = f"the drive itself warns: {', '.join(said) or 'its spare blocks run out'}"
        return bad(Level.WARNING, meaning, "keep nothing on it that is needed, and replace it")
    if health.media_errors:
        meaning = f"{health.media_errors} times it could not give back what was written: a run that reads there stops"
        return bad(Level.WARNING, meaning, "watch the count, set aio.checksums, and replace it when it grows")
    if health.percent_used >= WORN:
        meaning = "an optimizer on it writes all of its state in every step: it may not last"
        return bad(Level.WARNING, meaning, "offload plan --tbw says for how long; replace it in time")
    if now is not None and now >= HOT:
        meaning = "drives go slower when they are hot, and a run keeps them busy"
        return bad(Level.NOTE, meaning, "give it air or a heat sink; offload bench --duration 600 shows what it costs")
    if health.throttled_seconds or health.warm_minutes:
        seconds, minutes = health.throttled_seconds, health.warm_minutes
        slow = f"{seconds} s slower" if seconds else f"{minutes} min too warm"
        remedy = "offload bench --duration 600 shows if it is now"
        return bad(Level.NOTE, f"it has been {slow} for heat in its life", remedy)
    return ok("health", found, **values)


def _numa(drive: Drive) -> Finding | None:
    """Whether this process runs near the drive; None where the machine has one node, or nobody says."""
    if drive.numa_node is None:
        return None
    found, values = f"{drive.name} is on node {drive.numa_node}", {"numa_node": drive.numa_node}
    near, own = drive.near_cpus, os.sched_getaffinity(0)
    if not near or own & near:
        return ok("NUMA", found, **values)
    meaning = "this process may only run on other nodes: every byte crosses between sockets"
    remedy = f"numactl --cpunodebind={drive.numa_node} --membind={drive.numa_node} for the ranks that use this path"
    return problem(Level.NOTE, "NUMA", found, meaning, remedy, **values)
