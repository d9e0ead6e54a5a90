"""Classes of drives, for a plan before there is a drive to measure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nvme_offload.offload.units import GB, TB
from nvme_offload.perf.planning.machine import Drives, MachineError


@dataclass(frozen=True, kw_only=True)
class DriveClass:
    """What a drive of a class does for hours, in round figures."""

    about: str
    read: float
    """Bytes per second."""
    write: float
    """Bytes per second when its cache is full: what a training gets."""
    capacity: int
    """Bytes of a common size."""
    endurance: float
    """Bytes that the maker lets be written over the life of that size (TBW)."""


def _drive(about: str, read: float, write: float, terabytes: float, written: float) -> DriveClass:
    return DriveClass(
        about=about, read=read * GB, write=write * GB, capacity=round(terabytes * TB), endurance=written * TB
    )


CATALOGUE = {
    "sata-consumer": _drive("SATA, TLC", 0.55, 0.4, 2, 1200),
    "gen3-consumer": _drive("PCIe 3.0 x4, TLC with a cache", 3.4, 1.5, 2, 1200),
    "gen4-consumer": _drive("PCIe 4.0 x4, TLC with a cache", 7.0, 1.6, 2, 1200),
    "gen5-consumer": _drive("PCIe 5.0 x4, TLC with a cache", 14.0, 3.0, 2, 1200),
    "gen4-consumer-qlc": _drive("PCIe 4.0 x4, QLC with a cache", 5.0, 0.3, 2, 440),
    "gen3-enterprise": _drive("PCIe 3.0 x4, one drive write per day for 5 years", 3.2, 2.0, 3.84, 7008),
    "gen4-enterprise": _drive("PCIe 4.0 x4, one drive write per day for 5 years", 6.8, 4.0, 3.84, 7008),
    "gen5-enterprise": _drive("PCIe 5.0 x4, one drive write per day for 5 years", 14.0, 6.5, 3.84, 7008),
    "gen4-enterprise-mixed": _drive("PCIe 4.0 x4, three drive writes per day for 5 years", 6.8, 5.0, 3.2, 17520),
}
"""Names of classes. Round figures after makers' data sheets; of consumer drives the write rate is that after the cache,
about as tests of such drives have it. A drive at hand is measured: `offload bench --duration`."""

_FORM = re.compile(r"(?P<name>[a-z0-9-]+?)(?:x(?P<count>[1-9][0-9]?))?")


def drives_of(text: str, terabytes_written: float | None = None) -> tuple[Drives, int]:
    """Drives of a class, and their capacity in bytes.

    Args:
        text: the name of a class, and how many of them a node has: ``gen4-consumer`` or ``gen4-consumerx4``.
        terabytes_written: their endurance together, where it is known better.

    Raises:
        MachineError: there is no such class; lists them.
    """
    match = _FORM.fullmatch(text)
    if match is None or (found := CATALOGUE.get(match["name"])) is None:
        known = ", ".join(CATALOGUE)
        raise MachineError(f"--drive {text}: write one of {known}, or as many of it as a node has: gen4-consumerx4")
    count = int(match["count"] or 1)
    endurance = count * found.endurance / TB if terabytes_written is None else terabytes_written
    drives = Drives.of_rates(count * found.read, count * found.write, terabytes_written=endurance)
    return drives, count * found.capacity
