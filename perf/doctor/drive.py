"""Whether a block device suits: its kind and its scheduler."""

from collections.abc import Iterator

from nvme_offload.perf.doctor.findings import Finding, saw
from nvme_offload.perf.measure.drives import Drive

VIRTUAL = ("vd", "xvd")  # drives of virtual machines; the hypervisor says what it likes about rotation
_ON_NVME = "choose a path on an NVMe drive"


def check_drive(drive: Drive) -> Iterator[Finding]:
    """Return what kind of drive it is, and whether its scheduler suits."""
    yield _kind(drive)
    harmless = {None, "none"}
    harmless |= set() if drive.name.startswith("nvme") else {"mq-deadline"}
    if drive.rotational is False and drive.scheduler not in harmless:
        meaning = "it orders requests for drives that need it, and costs processor time for each one on this one"
        remedy = f"echo none | sudo tee /sys/block/{drive.name}/queue/scheduler"
        yield saw("scheduler", f"{drive.scheduler} on a solid-state drive").note(meaning, remedy)


def _kind(drive: Drive) -> Finding:
    words = [
        {True: "rotational", False: "not rotational", None: "rotation unknown"}[drive.rotational],
        f"scheduler {drive.scheduler}",
        f"{drive.nr_requests} requests of up to {drive.max_sectors_kb} KiB",
    ]
    model = f" ({drive.model})" if drive.model else ""
    members = f" on {', '.join(drive.members)}" if drive.members else ""
    found = saw("drive", f"{drive.name}{model}{members}: {', '.join(words)}")
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
