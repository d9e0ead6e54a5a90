"""A folder for swap files: can it be used, does it keep its promises, how much room is there."""

import contextlib
import ctypes
import errno
import os
import shlex
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nvme_offload.aio_native import EngineUnavailable, Op, Segment, open_engine
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.host.proc import Mount, mount_of
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.storage.swap_file import MIN_ALIGNMENT, NO_DIRECT_IO, reported_alignment
from nvme_offload.offload.units import GiB, MiB, format_bytes, round_up
from nvme_offload.perf.doctor.engines import engine_options
from nvme_offload.perf.doctor.findings import Finding, Level, saw
from nvme_offload.perf.measure.drives import Drive, find_drive

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


COPY_ON_WRITE = ("btrfs", "zfs", "bcachefs")
NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "orangefs"),
    *("9p", "virtiofs", "fuse", "vboxsf", "prl_fs"),
)
"""File systems whose bytes are somewhere else; `fuse.NAME` counts as `fuse`."""

BYTES_PER_PARAMETER = 10
"""Optimizer state of a bf16 parameter: the lower half of its master weight, and two fp32 moments."""
SAMPLE_BYTES = MiB
_STOPS = "a run stops when it starts"


def check_path(path: Path, config: OffloadConfig, engine: str | None) -> tuple[list[Finding], Drive | None]:
    """Everything about one path, and the drive behind it.

    It writes 1 MiB there, into a file without a name, which is gone when this returns or raises.
    """
    if (obstacle := check_usable(path)) is not None:
        return [obstacle], None
    try:
        fd = _nameless_file(path)
    except OSError as error:
        return [_cannot_write(path, error)], None
    findings, drive = [saw("folder", "exists and can be written")], None
    try:
        mount = mount_of(fd)
        drive = find_drive(os.fstat(fd).st_dev, mount)
        findings.append(check_file_system(fd, mount))
        findings += _check_io(fd, config, engine)
        findings.append(check_space(fd))
        if drive:
            findings += check_drive(drive)
        elif mount and not (mount.is_memory or mount.kind == "overlay" or _is_remote(mount.kind)):
            found = saw("drive", "no block device is known behind it")
            findings.append(found.note("its queue could not be looked at"))
    except OSError as error:  # a drive or a server that fails while it is looked at
        found = saw("folder", f"fails: {error}")
        findings.append(found.error("a run would fail, too", "look at: sudo dmesg | tail"))
    finally:
        os.close(fd)
    return findings, drive


def check_usable(path: Path) -> Finding | None:
    """None if `path` is a directory that this process can write to."""
    quoted = shlex.quote(str(path))
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return saw("folder", "does not exist").error("a run does not make it", f"mkdir -p {quoted}")
    except OSError as error:
        return saw("folder", f"cannot be reached: {error.strerror}").error(_STOPS, f"namei -l {quoted}")
    if not stat.S_ISDIR(mode):
        return saw("folder", "is not a directory").error("swap files go into a directory", "name another one")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        return _cannot_write(path, PermissionError(errno.EROFS if is_read_only else errno.EACCES, ""))
    return None


def _cannot_write(path: Path, error: OSError) -> Finding:
    quoted = shlex.quote(str(path))
    if error.errno == errno.EROFS:
        remedy = f"sudo mount -o remount,rw $(findmnt -no TARGET -T {quoted}), or choose another path"
        return saw("folder", "is mounted read-only").error(_STOPS, remedy)
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = f"sudo install -d -o {os.geteuid()} {shlex.quote(str(path / 'offload'))}, and name that folder"
        return saw("folder", f"cannot be written by user {os.geteuid()}").error(_STOPS, remedy)
    found = saw("folder", f"no file can be made: {os.strerror(error.errno or 0)}")
    return found.error(_STOPS, f"df -h {quoted}; df -i {quoted}")


def _nameless_file(path: Path) -> int:
    """A file that disappears with its descriptor."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fd, name = tempfile.mkstemp(prefix=".offload-doctor-", dir=path)  # NFS and some others have no O_TMPFILE
    os.unlink(name)
    return fd


def _is_remote(kind: str) -> bool:
    return kind.partition(".")[0] in NETWORK


def check_file_system(fd: int, mount: Mount | None) -> Finding:
    """Check what file system it is, and whether space that it promises is really there later."""
    if mount is None:
        unknown = saw("file system", "unknown: it is not in /proc/self/mountinfo")
        return unknown.note("nothing is known about it")
    refused = _refuses_fallocate(fd)
    said = f"{mount.kind}, {mount.source} on {mount.point}"
    found = saw("file system", said)
    elsewhere = "choose a path on ext4 or XFS on an NVMe drive"
    if mount.is_memory:
        meaning = "host memory, not a drive: state that is moved here still takes memory, and is gone with a restart"
        return found.warning(meaning, elsewhere)
    if _is_remote(mount.kind):
        meaning = (
            "the bytes are on another machine or go through another process: slow, and a failure there can stop or "
            "spoil a run; file locks, which tell live runs from dead ones, may not be seen by other machines"
        )
        return found.warning(meaning, elsewhere)
    if mount.kind in COPY_ON_WRITE:
        meaning = (
            "copy-on-write: it cannot promise space, so a full disk can stop a run in the middle; every overwrite goes "
            "to a new place"
        )
        return found.warning(meaning, elsewhere)
    if mount.kind == "overlay":
        meaning = "the writable layer of a container: it promises space only if the file system below it does"
        return found.note(meaning, "choose a path on a volume: docker run -v /mnt/nvme:/mnt/nvme ...")
    if refused:
        meaning = f"it cannot promise space ({refused}): a run writes every block once when it starts, which takes long"
        return found.warning(meaning, elsewhere)
    return saw("file system", f"{said}; it can promise space")


def _refuses_fallocate(fd: int) -> str:
    """Why fallocate(2) does not work, "" if it does. posix_fallocate of the C library hides that by writing zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", libc.fallocate)
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(fd, 0, 0, SAMPLE_BYTES) == 0:
        return ""
    code = ctypes.get_errno()
    return f"fallocate: {errno.errorcode.get(code, code)}, {os.strerror(code)}"


def _check_io(fd: int, config: OffloadConfig, engine: str | None) -> Iterator[Finding]:
    """Check direct I/O, then a sample through the engine."""
    direct_fd, refusal = None, 0
    try:
        direct_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        refusal = error.errno or errno.EIO
    try:
        reported = None if direct_fd is None else reported_alignment(direct_fd)
        direct = direct_fd is not None and reported != NO_DIRECT_IO
        alignment = max(MIN_ALIGNMENT, *(reported or (0, 0)))
        yield check_alignment(reported, config) if direct else no_direct_io(refusal, config)
        use = fd if direct_fd is None or not direct or config.aio.direct == "disabled" else direct_fd
        if engine is not None and (direct or config.aio.direct != "required"):
            yield check_sample(use, config, engine, alignment, direct=use is direct_fd)
    finally:
        if direct_fd is not None:
            os.close(direct_fd)


def no_direct_io(code: int, config: OffloadConfig) -> Finding:
    """Return what a refused O_DIRECT means under the configured policy; or one that is taken (0) and has no effect."""
    refused = f"refused with {errno.errorcode.get(code, code)} (O_DIRECT)"
    policy, said = config.aio.direct, refused if code else "there is none, statx says, although O_DIRECT is taken"
    found, remedy = saw("direct I/O", said), "choose ext4 or XFS"
    if policy == "required":
        return found.error('aio.direct = "required": a run stops', f'{remedy}, or write "optional" for aio.direct')
    meaning = "bytes go through the page cache, which takes host memory and processor time"
    return found.at(Level.WARNING if policy == "optional" else Level.NOTE, meaning, remedy)


def check_alignment(reported: tuple[int, int] | None, config: OffloadConfig) -> Finding:
    """Check what statx says about the alignment of addresses and offsets."""
    if reported is None:
        return saw("direct I/O", f"works; the alignment is not reported, {MIN_ALIGNMENT} B is used")
    memory, offset = reported
    found = saw("direct I/O", f"works, addresses aligned to {memory} B and offsets to {offset} B")
    if config.aio.block_size % max(MIN_ALIGNMENT, memory, offset):
        meaning = f"aio.block_size = {format_bytes(config.aio.block_size)} is no multiple of that"
        remedy = f"write a multiple of {format_bytes(max(memory, offset))} for aio.block_size"
        return found.error(meaning, remedy)
    if config.aio.direct == "disabled":
        meaning = 'aio.direct = "disabled": the page cache is used nevertheless'
        return found.note(meaning, 'write "required" for aio.direct')
    return found


def check_sample(fd: int, config: OffloadConfig, engine: str, alignment: int, *, direct: bool) -> Finding:
    """Write 1 MiB through the engine, read it back, compare."""
    size = round_up(SAMPLE_BYTES, alignment)
    source, target = HostRegion(size), HostRegion(size)
    pattern = os.urandom(size)
    ctypes.memmove(source.address, pattern, size)
    through = f"{format_bytes(size)} through {engine}{' with direct I/O' if direct else ''}"
    remedy = "look at: sudo dmesg | tail; choose another path, or another aio.engine"
    try:
        opened = open_engine(engine, engine_options(config, alignment)).engine
    except (EngineUnavailable, OSError, ValueError) as error:
        return saw("sample", f"{engine} cannot be opened").error(str(error), remedy)
    with contextlib.closing(opened):
        for op, region in ((Op.WRITE, source), (Op.READ, target)):
            operation = opened.submit(op, [Segment(fd, 0, region.address, size)])
            if operation is None:
                raise AssertionError("an engine without work is busy")
            operation.wait()
            if failure := operation.failure:
                verb = "writing" if op is Op.WRITE else "reading"
                name = errno.errorcode.get(failure.errno, str(failure.errno))
                found = saw("sample", f"{verb} {through} failed: {name}, {os.strerror(failure.errno)}")
                return found.error("a run would fail the same way", remedy)
    if ctypes.string_at(target.address, size) != pattern:
        meaning = "this drive, its file system or the engine changes data"
        return saw("sample", f"{through} came back different").error(meaning, "do not use this path")
    return saw("sample", f"{through}, written and read back")


def check_space(fd: int) -> Finding:
    """Check that there is room for swap files."""
    system = os.fstatvfs(fd)
    free, total = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
    if not system.f_blocks:
        return saw("space", "not counted by this file system")
    said = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < GiB:
        meaning = f"optimizer state takes {BYTES_PER_PARAMETER} bytes per bf16 parameter"
        return saw("space", said).warning(meaning, "free some, or choose another path")
    billions = free / BYTES_PER_PARAMETER / 1e9
    return saw("space", f"{said}: state of {billions:.2g} billion bf16 parameters")
