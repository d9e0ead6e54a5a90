"""Classes of drives, for a plan before there is a drive to measure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nvme_offload.offload.units import GB, TB
from nvme_offload.perf.plan.machine import Drives, MachineError


@dataclass(frozen=True, kw_only=True)
class DriveClass:
    """What a drive of a class does for hours; the figures are those of one drive, which `SOURCES` names."""

    about: str
    read: float
    """Bytes per second."""
    write: float
    """Bytes per second when its cache is full: what a training gets."""
    capacity: int
    """Bytes of that drive."""
    endurance: float
    """Bytes that its maker lets be written over its life (TBW)."""


def _drive(about: str, read: float, write: float, terabytes: float, written: float) -> DriveClass:
    return DriveClass(
        about=about, read=read * GB, write=write * GB, capacity=round(terabytes * TB), endurance=written * TB
    )


CATALOGUE = {
    "sata-consumer": _drive("SATA, TLC with a cache", 0.56, 0.4, 2, 1200),
    "gen3-consumer": _drive("PCIe 3.0 x4, TLC with a cache", 3.5, 1.75, 2, 1200),
    "gen4-consumer": _drive("PCIe 4.0 x4, TLC with a cache", 7.45, 1.5, 2, 1200),
    "gen5-consumer": _drive("PCIe 5.0 x4, TLC with a cache", 12.4, 3.0, 2, 1200),
    "gen4-consumer-qlc": _drive("PCIe 4.0 x4, QLC with a cache", 7.1, 0.4, 2, 440),
    "gen3-enterprise": _drive("PCIe 3.0 x4, 0.65 drive writes per day for 5 years", 3.2, 1.8, 4, 4840),
    "gen4-enterprise": _drive("PCIe 4.0 x4, one drive write per day for 5 years", 6.2, 4.0, 3.84, 7008),
    "gen5-enterprise": _drive("PCIe 5.0 x4, one drive write per day for 5 years", 12.0, 6.8, 7.68, 14016),
    "gen4-enterprise-mixed": _drive("PCIe 4.0 x4, three drive writes per day for 5 years", 6.9, 4.2, 3.2, 17520),
    "gen5-enterprise-mixed": _drive("PCIe 5.0 x4, three drive writes per day for 5 years", 14.0, 10.0, 3.2, 17520),
}
"""Names of classes. Of consumer drives the write rate is that after the cache, as tests of such drives have it. A drive
at hand is measured: `offload bench --duration`."""

SOURCES = {
    "sata-consumer": (
        "Samsung 870 EVO; writes as a test of its 4 TB has them",
        "pgrid.app/au/ssds/samsung-870-evo-2000gb",
        "techpowerup.com/review/samsung-870-evo-4-tb/6.html",
    ),
    "gen3-consumer": (
        "Samsung 970 EVO Plus; writes beyond its cache as its data sheet has them",
        "cdrinfo.com/d7/content/samsung-sets-new-performance-levels-consumer-nvme-ssds-970-evo-plus",
        "manualmachine.com/samsung/mzv7s250bw/8043730-user-manual",
    ),
    "gen4-consumer": (
        "Samsung 990 PRO; writes as a test of the 980 PRO has them, others have 0.5 to 2.5",
        "bytebuys.com/samsung-990-pro-a-detailed-look-at-speed-and-endurance-metrics",
        "techpowerup.com/review/samsung-980-pro-1-tb-ssd/6.html",
        "techpowerup.com/review/crucial-t500-2-tb/6.html",
        "techpowerup.com/review/lexar-nm790-2-tb/6.html",
    ),
    "gen5-consumer": (
        "Crucial T700; writes as a test has them",
        "gamingpcbuilder.com/product/crucial-t700",
        "dolphinpro-templates.com/crucial-t700-fast-pcie-5-0-ssd-coming-in-may",
    ),
    "gen4-consumer-qlc": ("Crucial P310; it often writes less", "pgrid.app/us/ssds/crucial-p310-2000gb"),
    "gen3-enterprise": (
        "Intel P4500",
        "Lenovo's product guide of the ThinkSystem Intel P4500 Entry NVMe SSDs, table 2",
    ),
    "gen4-enterprise": ("Kioxia CD6-R; rates of the series", "heise.de/-4666097"),
    "gen5-enterprise": (
        "Samsung PM9D3a",
        "syspartsdirect.com/en/product-detail/Samsung-MZWL67T6HBLC-PM9D3a-7.68TB-Enterprise-SSD-1170.html",
    ),
    "gen4-enterprise-mixed": ("Kioxia CM6-V; rates of the series", "heise.de/-4666097"),
    "gen5-enterprise-mixed": (
        "Micron 9550 MAX",
        "storagesserver.com/cases/micron-9550-max-review-balanced-performance-for-ai-db-and-analytics-48698.html",
    ),
}
"""Whose figures those of a class are, and the pages that have them."""


def page_rows() -> list[str]:
    """The rows of the table in docs/plan.md."""
    return [
        f"| `{name}` | {kind.about} | {kind.read / GB:g} | {kind.write / GB:g} | {kind.capacity / TB:g} TB | "
        f"{kind.endurance / TB:g} TB | {SOURCES[name][0]} |"
        for name, kind in CATALOGUE.items()
    ]


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
