"""Whether a block device suits: what kind it is, and how its queue is set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.units import KiB, format_bytes
from nvme_offload.perf.doctor.findings import Finding, Level, ok, problem
from nvme_offload.perf.measure.drives import Drive

VIRTUAL = ("vd", "xvd")
"""Drives of virtual machines; the hypervisor says what it likes about rotation."""


def check_drive(drive: Drive, config: OffloadConfig) -> Iterator[Finding]:
    """What kind of drive it is, and whether its queue suits the requests."""
    yield _kind(drive)
    if (finding := _scheduler(drive)) is not None:
        yield finding
    if (finding := _request_size(drive, config)) is not None:
        yield finding
    if (finding := _depth(drive, config)) is not None:
        yield finding


def _kind(drive: Drive) -> Finding:
    words = [
        {True: "rotational", False: "not rotational", None: "rotation unknown"}[drive.rotational],
        f"scheduler {drive.scheduler}",
        f"blocks of {drive.logical_block_bytes} B ({drive.physical_block_bytes} B physical)",
        f"{drive.nr_requests} requests of up to {drive.max_sectors_kb} KiB",
        "discard" if drive.discard_bytes else "no discard",
    ]
    model = f" ({drive.model})" if drive.model else ""
    members = f" on {', '.join(drive.members)}" if drive.members else ""
    found, values = f"{drive.name}{model}{members}: {', '.join(words)}", asdict(drive)
    if drive.name.startswith(("zram", "ram", "brd")):
        meaning = "host memory, not a drive: nothing is gained by moving state to it"
        return problem(Level.WARNING, "drive", found, meaning, "choose a path on an NVMe drive", **values)
    if drive.name.startswith("loop"):
        meaning = "a file that plays a drive: every byte goes through two file systems"
        return problem(Level.NOTE, "drive", found, meaning, "choose a path on the drive itself", **values)
    if drive.rotational and drive.name.startswith(VIRTUAL):
        meaning = "virtual drives often claim to rotate and do not; a hard disk would be some 20 times too slow"
        return problem(Level.NOTE, "drive", found, meaning, "measure it: offload bench --path PATH", **values)
    if drive.rotational:
        meaning = "a hard disk: some 20 times slower than an NVMe drive, and worse with reads and writes mixed"
        return problem(Level.WARNING, "drive", found, meaning, "choose a path on an NVMe drive", **values)
    return ok("drive", found, **values)


def _scheduler(drive: Drive) -> Finding | None:
    fast = drive.name.startswith("nvme")
    if (
        drive.rotational is not False
        or drive.scheduler in (None, "none")
        or (drive.scheduler == "mq-deadline" and not fast)
    ):
        return None
    meaning = "it orders requests for drives that need it, and costs processor time for each one on this one"
    remedy = f"echo none | sudo tee /sys/block/{drive.name}/queue/scheduler"
    return problem(Level.NOTE, "scheduler", f"{drive.scheduler} on a solid-state drive", meaning, remedy)


def _request_size(drive: Drive, config: OffloadConfig) -> Finding | None:
    largest, block = (drive.max_sectors_kb or 0) * KiB, config.aio.block_size
    if not largest or block <= largest:
        return None
    pieces = -(-block // largest)
    hardware = drive.max_hw_sectors_kb or 0
    meaning = f"the kernel splits each request of {format_bytes(block)} into {pieces}"
    if hardware * KiB > largest:
        wanted = min(hardware, block // KiB)
        remedy = f"echo {wanted} | sudo tee /sys/block/{drive.name}/queue/max_sectors_kb"
    else:
        remedy = "nothing needs to be done; the drive takes no larger ones"
    return problem(Level.NOTE, "request size", f"the drive takes {format_bytes(largest)} at once", meaning, remedy)


def _depth(drive: Drive, config: OffloadConfig) -> Finding | None:
    largest = (drive.max_sectors_kb or 0) * KiB or config.aio.block_size
    asked = config.aio.queue_depth * config.aio.rings * -(-config.aio.block_size // largest)
    if drive.nr_requests is None or asked <= drive.nr_requests:
        return None
    found = f"{asked} requests in flight are configured, the queue holds {drive.nr_requests}"
    meaning = "the rest waits in the kernel: a deeper queue brings nothing"
    remedy = f"write a smaller aio.queue_depth, or echo {asked} | sudo tee /sys/block/{drive.name}/queue/nr_requests"
    return problem(Level.NOTE, "queue depth", found, meaning, remedy)
