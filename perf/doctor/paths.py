"""A folder for swap files: what came of a run in it, how much room is there, and what is below it."""

import errno
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp

from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import SwapIOError
from nvme_offload.offload.host.proc import Mount
from nvme_offload.offload.storage.swap_file import MIN_ALIGNMENT
from nvme_offload.offload.units import GiB, format_bytes
from ..measure.machine import Drive, drive_of, mount_at
from .findings import Finding, saw
from .trial import TrialSeen, try_folder

VIRTUAL = ("vd", "xvd")  # drives of virtual machines; the hypervisor says what it likes about rotation
_ON_NVME = "choose a path on an NVMe drive"
NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "orangefs"),
    *("9p", "virtiofs", "fuse", "vboxsf", "prl_fs"),
)
"""File systems whose bytes are somewhere else; `fuse.NAME` counts as `fuse`."""

BYTES_PER_PARAMETER = 10
"""Optimizer state of a bf16 parameter: the lower half of its master weight, and two fp32 moments."""
_STOPS = "a run stops when it starts"
_AS_SAID = "as it says; where it says nothing, choose a path on ext4 or XFS on an NVMe drive"
_ELSEWHERE = "choose a path on ext4 or XFS on an NVMe drive"


def check_path(path: Path, config: OffloadConfig, engines: Sequence[str]) -> tuple[list[Finding], Drive | None]:
    """Everything about one path, and the drive behind it; `engines` are tried there, the one that a run takes first.

    What a trial run writes there is gone when this returns or raises.
    """
    if (obstacle := check_usable(path)) is not None:
        return [obstacle], None
    findings, drive = [saw("folder", "exists and can be written")], None
    try:
        mount, drive = mount_at(path), drive_of(path)
        findings.append(check_file_system(mount))
        if engines:
            aio = config.aio.model_dump(exclude_unset=True, exclude={"path_weights"})
            seen = try_folder(path, aio, engines)
            findings += check_trial(seen, engines, config)
            findings += check_more(path) if seen.moved is False else ()
        findings.append(check_space(path))
        if drive:
            findings += check_drive(drive)
        elif mount and not (mount.is_memory or mount.kind == "overlay" or _is_remote(mount.kind)):
            found = saw("drive", "no block device is known behind it")
            findings.append(found.note("its queue could not be looked at"))
    except OSError as error:  # a drive or a server that fails while it is looked at
        found = saw("folder", f"fails: {error}")
        findings.append(found.error("a run would fail, too", _remedy(error, path)))
    return findings, drive


def check_usable(path: Path) -> Finding | None:
    """None if `path` is a directory that this process can write to."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        target = Path(os.path.realpath(path))
        found = f"is a link to {target}, which does not exist" if path.is_symlink() else "does not exist"
        return saw("folder", found).error("a run does not make it", f"mkdir -p {shlex.quote(str(target))}")
    except OSError as error:
        return saw("folder", f"cannot be reached: {error.strerror}").error(_STOPS, f"namei -l {shlex.quote(str(path))}")
    if not stat.S_ISDIR(mode):
        return saw("folder", "is not a directory").error("swap files go into a directory", "name another one")
    try:
        os.scandir(path).close()
        os.rmdir(mkdtemp(prefix=".offload-doctor-", dir=path))
    except OSError as error:
        return _cannot_write(path, error)
    return None


def _cannot_write(path: Path, error: OSError) -> Finding:
    if error.errno == errno.EACCES:
        remedy = f"sudo install -d -o {os.geteuid()} {shlex.quote(str(path / 'offload'))}, and name that folder"
        return saw("folder", f"cannot be written by user {os.geteuid()}").error(_STOPS, remedy)
    found = saw("folder", f"nothing can be made in it: {os.strerror(error.errno or 0)}")
    return found.error(_STOPS, _remedy(error, path))


def _remedy(error: OSError, path: Path) -> str:
    """Return what a run would say that is to be done."""
    return SwapIOError(error.errno or errno.EIO, path=path, direction="allocate").remedy


def _is_remote(kind: str) -> bool:
    return kind.partition(".")[0] in NETWORK


def check_file_system(mount: Mount | None) -> Finding:
    """Say what file system it is, and what a trial on one machine cannot show of it."""
    if mount is None:
        unknown = saw("file system", "unknown: it is not in /proc/self/mountinfo")
        return unknown.note("nothing is known about it")
    found = saw("file system", f"{mount.kind}, {mount.source} on {mount.point}")
    if _is_remote(mount.kind):
        meaning = (
            "the bytes are on another machine or go through another process: slow, and a failure there can stop or "
            "spoil a run; file locks, which tell live runs from dead ones, may not be seen by other machines"
        )
        return found.warning(meaning, _ELSEWHERE)
    return found


def check_trial(seen: TrialSeen, engines: Sequence[str], config: OffloadConfig) -> Iterator[Finding]:
    """Say what came of a run in the folder, in the words of the run itself, and what the kernel did."""
    first = engines[0]
    if first in seen.failures:
        found = saw("run", f"through {first}: {seen.failures[first]}")
        yield found.error("a run here ends the same way", _AS_SAID)
    for engine in seen.failures if first not in seen.failures else ():
        found = saw("run", f"through {engine}: {seen.failures[engine]}")
        meaning = f"it cannot take the place of {first}: where that is lost, a run ends"
        yield found.warning(meaning, "look at: sudo dmesg | tail")
    if passed := [engine for engine in engines if engine not in seen.failures]:
        what = "two steps, a commit, a kill, a resume, an activation, a swap"
        yield saw("run", f"{what}: the bits of a run in memory, through {', '.join(passed)}")
    for text in seen.said:
        yield saw("run says", text).warning("a run here warns of it, too", _AS_SAID)
    if first in passed:
        yield check_direct_io(seen, config)
        yield check_promises(seen)
        yield check_reached(seen)


def check_direct_io(seen: TrialSeen, config: OffloadConfig) -> Finding:
    """Whether what was written went past the page cache."""
    if seen.num_cached:
        found = saw("direct I/O", f"{seen.num_cached} pages of the swap file were in memory behind a commit")
        meaning = "bytes go through the page cache, which takes host memory and processor time"
        if config.aio.direct == "disabled":
            return found.note(f'aio.direct = "disabled": {meaning}', 'write "required" for aio.direct')
        return found.warning(meaning, _ELSEWHERE)
    alignment = f"the alignment is not reported, {MIN_ALIGNMENT} B is used"
    if seen.alignment:
        alignment = "addresses aligned to {} B and offsets to {} B".format(*seen.alignment)
    return saw("direct I/O", f"works, {alignment}")


def check_promises(seen: TrialSeen) -> Finding:
    """Whether space that was promised is there for every overwrite."""
    if seen.moved is False:
        return saw("promised space", "overwrites stay in the blocks that were promised")
    meaning = "a full disk can stop a run in the middle, although space was promised when it started"
    if seen.moved is None:
        return saw("promised space", "the file system does not say where its blocks are").note(f"perhaps {meaning}")
    return saw("promised space", "overwrites go to other blocks: copy-on-write").warning(meaning, _ELSEWHERE)


def check_reached(seen: TrialSeen) -> Finding:
    """Whether what was committed is on a drive."""
    if seen.reached_bytes is None:
        return saw("written", f"{format_bytes(seen.written_bytes)}; its drive is not known").note(
            "whether a commit reaches a drive could not be seen"
        )
    found = saw("written", f"{format_bytes(seen.written_bytes)} by two steps, {format_bytes(seen.reached_bytes)} there")
    if seen.reached_bytes < seen.written_bytes // 2:
        return found.warning("what is committed does not all reach the drive that this folder is on", _ELSEWHERE)
    return found


def check_space(path: Path) -> Finding:
    """Check that there is room for swap files."""
    system = os.statvfs(path)
    free, total = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
    if not system.f_blocks:
        return saw("space", "not counted by this file system")
    said = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < GiB:
        meaning = f"optimizer state takes {BYTES_PER_PARAMETER} bytes per bf16 parameter"
        return saw("space", said).warning(meaning, "free some, or choose another path")
    billions = free / BYTES_PER_PARAMETER / 1e9
    return saw("space", f"{said}: state of {billions:.2g} billion bf16 parameters")


def check_more(path: Path) -> Iterator[Finding]:
    """Whether much more than a trial takes can be reserved: free space counts neither quotas nor limits of files."""
    making = os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC  # gone with its descriptor, however this ends
    system = os.statvfs(path)
    size_bytes = min(GiB, system.f_bavail * system.f_frsize // 2)
    found = saw("reserve", f"{format_bytes(size_bytes)} at once")
    try:
        with Descriptor(os.open, path, making) as fd:
            os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            found = saw("reserve", f"{found.found}: {error.strerror}")
            yield found.warning("a run that takes so much stops", _remedy(error, path))
    else:
        yield found


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
