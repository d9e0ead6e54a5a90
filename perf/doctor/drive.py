"""Whether a block device suits: its kind, its queue, its health, and which processors are near it."""

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.units import TB, KiB, format_bytes
from nvme_offload.perf.doctor.findings import Finding, saw
from nvme_offload.perf.measure.drives import Drive, Health, HealthError, read_health, temperature

VIRTUAL = ("vd", "xvd")  # drives of virtual machines; the hypervisor says what it likes about rotation
_ON_NVME = "choose a path on an NVMe drive"
HOT = 70.0  # degrees Celsius from which on makers' drives begin to go slower
WORN = 90  # percent of its endurance from which on a drive is soon at its end
_NO_DRIVES = ("zram", "ram", "brd", "loop")
_WARNINGS = {1: "its spare blocks run out", 4: "it is not reliable any more", 8: "it takes no more writes"}


def check_drive(drive: Drive, config: OffloadConfig) -> Iterator[Finding]:
    """Return what kind of drive it is, and whether its queue suits the requests."""
    yield _kind(drive)
    queue, harmless = f"/sys/block/{drive.name}/queue", {None, "none"}
    harmless |= set() if drive.name.startswith("nvme") else {"mq-deadline"}
    if drive.rotational is False and drive.scheduler not in harmless:
        meaning = "it orders requests for drives that need it, and costs processor time for each one on this one"
        remedy = f"echo none | sudo tee {queue}/scheduler"
        yield saw("scheduler", f"{drive.scheduler} on a solid-state drive").note(meaning, remedy)
    largest, block = (drive.max_sectors_kb or 0) * KiB, config.aio.block_size
    if 0 < largest < block:
        remedy = "nothing needs to be done; the drive takes no larger ones"
        if (hardware := drive.max_hw_sectors_kb or 0) * KiB > largest:
            remedy = f"echo {min(hardware, block // KiB)} | sudo tee {queue}/max_sectors_kb"
        meaning = f"the kernel splits each request of {format_bytes(block)} into {-(-block // largest)}"
        yield saw("request size", f"the drive takes {format_bytes(largest)} at once").note(meaning, remedy)
    asked = config.aio.queue_depth * config.aio.rings * -(-block // (largest or block))
    if drive.nr_requests is not None and asked > drive.nr_requests:
        found = f"{asked} requests in flight are configured, the queue holds {drive.nr_requests}"
        meaning = "the rest waits in the kernel: a deeper queue brings nothing"
        remedy = f"write a smaller aio.queue_depth, or echo {asked} | sudo tee {queue}/nr_requests"
        yield saw("queue depth", found).note(meaning, remedy)


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
    found = saw("drive", f"{drive.name}{model}{members}: {', '.join(words)}", **asdict(drive))
    if drive.name.startswith(("zram", "ram", "brd")):
        return found.warning("host memory, not a drive: nothing is gained by moving state to it", _ON_NVME)
    if drive.name.startswith("loop"):
        meaning = "a file that plays a drive: every byte goes through two file systems"
        return found.note(meaning, "choose a path on the drive itself")
    if drive.rotational and drive.name.startswith(VIRTUAL):
        meaning = "virtual drives often claim to rotate and do not; a hard disk would be some 20 times too slow"
        return found.note(meaning, "measure it: offload bench --path PATH")
    if drive.rotational:
        meaning = "a hard disk: some 20 times slower than an NVMe drive, and worse with reads and writes mixed"
        return found.warning(meaning, _ON_NVME)
    return found


def check_health(drive: Drive) -> Iterator[Finding]:
    """Each disk of a drive, and where it is in the machine."""
    for disk in drive.disks:
        if not disk.startswith(_NO_DRIVES):
            yield _health_of(disk)
    if drive.numa_node is None:  # the machine has one node, or nobody says
        return
    found = saw("NUMA", f"{drive.name} is on node {drive.numa_node}", numa_node=drive.numa_node)
    near = drive.near_cpus
    if near and not os.sched_getaffinity(0) & near:
        meaning = "this process may only run on other nodes: every byte crosses between sockets"
        remedy = f"numactl --cpunodebind={drive.numa_node} --membind={drive.numa_node} for the ranks that use this path"
        found = found.note(meaning, remedy)
    yield found


def _health_of(disk: str) -> Finding:
    warmth = temperature(disk)
    try:
        return judged(disk, read_health(disk), warmth)
    except HealthError as error:
        found = f"{disk}: SMART not known ({error})" + ("" if warmth is None else f"; {warmth:.0f} °C")
    remedy = f"sudo nvme smart-log {shlex.quote(f'/dev/{disk}')}" if disk.startswith("nvme") else ""
    return saw("health", found, disk=disk, temperature=warmth).note("its wear and errors were not looked at", remedy)


def judged(disk: str, health: Health, warmth: float | None = None) -> Finding:
    """Return what the health of a disk means for a run; `warmth` is newer than what SMART has of it."""
    now = health.temperature if warmth is None else warmth
    parts = [
        f"{health.percent_used} % of its endurance used",
        f"{health.bytes_written / TB:.1f} TB written in {health.power_on_hours} h",
        f"{health.spare} % of the spare blocks left",
    ]
    parts += [] if now is None else [f"{now:.0f} °C"]
    found = saw("health", f"{disk}: {', '.join(parts)}", **asdict(health) | {"disk": disk, "temperature": now})
    if health.critical_warning & sum(_WARNINGS) or health.spare < health.spare_threshold:
        said = [words for bit, words in _WARNINGS.items() if health.critical_warning & bit]
        meaning = f"the drive itself warns: {', '.join(said) or 'its spare blocks run out'}"
        return found.warning(meaning, "keep nothing on it that is needed, and replace it")
    if health.media_errors:
        meaning = f"{health.media_errors} times it could not give back what was written: a run that reads there stops"
        return found.warning(meaning, "watch the count, set aio.checksums, and replace it when it grows")
    if health.percent_used >= WORN:
        meaning = "an optimizer on it writes all of its state in every step: it may not last"
        return found.warning(meaning, "offload plan --tbw says for how long; replace it in time")
    if now is not None and now >= HOT:
        meaning = "drives go slower when they are hot, and a run keeps them busy"
        return found.note(meaning, "give it air or a heat sink; offload bench --duration 600 shows what it costs")
    if health.throttled_seconds or health.warm_minutes:
        seconds, minutes = health.throttled_seconds, health.warm_minutes
        slow = f"{seconds} s slower" if seconds else f"{minutes} min too warm"
        remedy = "offload bench --duration 600 shows if it is now"
        return found.note(f"it has been {slow} for heat in its life", remedy)
    return found
