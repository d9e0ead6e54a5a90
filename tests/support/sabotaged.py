"""Folders in which a run may not end well: what the doctor says of them, and what a run there comes to."""

import json
import multiprocessing
import os
import resource
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvme_offload import OffloadAdamW
from nvme_offload.offload.units import GiB, MiB
from nvme_offload.perf.doctor.command import examine
from tests.support import forked
from tests.support.file_systems import Ground, NotHereError, live, mounted, run, trained
from tests.support.killed_steps import be_ready_to_fork, durable_section
from tests.support.sandbox import become_nobody
from tests.support.training import params_of

_BLKIO = Path("/sys/fs/cgroup/blkio")
_EXT4 = Ground("ext4", make="-m 0", size="3G")


class Sabotage(NamedTuple):
    """A folder is spoiled in this way, and a run there comes to this."""

    spoil: Any = None  # gets what is mounted and the folder in it; what it returns is the folder to name
    ground: Ground = _EXT4
    within: Any = None  # done first by whoever runs there
    error: str = ""  # that a run ends with; "": it ends well
    found: str = ""  # by the doctor, where it finds something
    status: int = 0  # of the doctor
    large: bool = False  # the run takes 160 MiB


def _leave(size_bytes, _, folder):
    """Others take all but so much."""
    with (folder / "taken").open("wb") as file:
        end, piece = 0, GiB
        while piece >= 4096:
            system = os.statvfs(folder)
            with suppress(OSError):
                if system.f_bavail * system.f_frsize - size_bytes >= piece:
                    os.posix_fallocate(file.fileno(), end, piece)
                    end += piece
                    continue
            piece //= 2


def _use_inodes(_, folder):
    with suppress(OSError):
        for number in range(100_000):
            (folder / str(number)).touch()


def _limit(max_bytes, there, folder):
    """A quota, of which the count of free space knows nothing."""
    folder.rmdir()
    run("btrfs", "subvolume", "create", folder)
    run("btrfs", "quota", "enable", there.root)
    run("btrfs", "qgroup", "limit", max_bytes, folder)


def _link(to, _, folder):
    link = folder.with_name("link")
    link.symlink_to(folder if to else folder / "nothing")
    return link


def _file(_, folder):
    (folder / "file").touch()
    return folder / "file"


def _slow(there, _):
    """Whoever joins the group `offload-slow` writes and reads 16 MiB/s."""
    if not (_BLKIO / "blkio.throttle.write_bps_device").exists():
        raise NotHereError("no throttles of control groups")
    group, number = _BLKIO / "offload-slow", os.stat(there.device).st_rdev
    group.mkdir(exist_ok=True)
    there.stack.callback(group.rmdir)
    for way in ("read", "write"):
        limit = f"{os.major(number)}:{os.minor(number)} {16 * MiB}"
        (group / f"blkio.throttle.{way}_bps_device").write_text(limit)


def _join_slow():
    (_BLKIO / "offload-slow/cgroup.procs").write_text(str(os.getpid()))


def _limit_descriptors(num_left):
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + num_left,) * 2)


def _chattr(change, _, folder):
    run("chattr", change, folder)


def _remount(options, there, _):
    run("mount", "-o", f"remount,{options}", there.root)


_NOT_PERMITTED = "Operation not permitted"
_MANY = "Too many open files"
_BTRFS = Ground("btrfs", size="3G")
_FULL = {"error": "ENOSPC, No space left on device", "status": 2}
_FILES_OF = partial(resource.setrlimit, resource.RLIMIT_FSIZE)
SABOTAGES = {
    "none": Sabotage(),
    "read-only": Sabotage(partial(_remount, "ro"), error="EROFS", found="Read-only file system", status=2),
    "noexec": Sabotage(partial(_remount, "noexec,nodev,nosuid")),
    "full": Sabotage(partial(_leave, 0), found="No space left on device", **_FULL),
    "almost full": Sabotage(partial(_leave, 2 * MiB), found="ENOSPC, No space left on device", **_FULL),
    "fuller than the run is large": Sabotage(
        partial(_leave, 64 * MiB), error="ENOSPC", found="64 MiB free of", status=1, large=True
    ),
    "out of inodes": Sabotage(_use_inodes, _EXT4._replace(make="-m 0 -N 16"), found="No space left on device", **_FULL),
    "no direct I/O": Sabotage(
        ground=_EXT4._replace(options="data=journal"), error="has no direct I/O", found="has no direct I/O", status=2
    ),
    "of another user": Sabotage(within=become_nobody, error="EACCES", found="cannot be written by user", status=2),
    "quota": Sabotage(partial(_limit, MiB), _BTRFS, error="EDQUOT", found="Disk quota exceeded", status=2),
    "quota that the run passes": Sabotage(
        partial(_limit, 64 * MiB), _BTRFS, error="EDQUOT", found="Disk quota exceeded", status=1, large=True
    ),
    "short files": Sabotage(within=partial(_FILES_OF, (MiB, MiB)), error="EFBIG", found="EFBIG", status=2),
    "files shorter than the run's": Sabotage(
        within=partial(_FILES_OF, (64 * MiB,) * 2), error="EFBIG", found="File too large", status=1, large=True
    ),
    "few descriptors": Sabotage(within=partial(_limit_descriptors, 6), error=_MANY, found=_MANY, status=2),
    "immutable": Sabotage(partial(_chattr, "+i"), error="EPERM", found=_NOT_PERMITTED, status=2),
    "append-only": Sabotage(partial(_chattr, "+a"), error="EPERM", found=_NOT_PERMITTED, status=2),
    "a link": Sabotage(partial(_link, True)),
    "a dangling link": Sabotage(partial(_link, False), error="ENOENT", found="is a link to", status=2),
    "a file": Sabotage(_file, error="ENOTDIR", found="is not a directory", status=2),
    "memory": Sabotage(ground=Ground("tmpfs", overlay="empty", size="3G"), found="which is memory", status=1),
    "slow": Sabotage(_slow, within=_join_slow),
}


def _trained(folder, large):
    if not large:
        scratch, _ = trained(folder, None)
        lasting, _ = trained(folder, "run")
        return lasting if lasting == scratch else f"{lasting}; scratch {scratch}"
    params = params_of([(1 << 23,)], torch.bfloat16)
    with OffloadAdamW(params, offload=durable_section(folder, "run")) as optimizer:
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
    return "it ended"


def _in(within, act):
    if within:
        within()
    return act()


def _examined(folder):
    forked.FORKED = multiprocessing.get_context("fork")
    with forked.forked_children():
        return examine([folder]).as_dict()


def verdicts(name, place):
    """Return what the doctor says, what a run comes to, and what one in memory does."""
    sabotage, place = SABOTAGES[name], Path(place)
    be_ready_to_fork()
    expected = "it ended" if sabotage.large else live(partial(trained, None, None))[0]
    with mounted(sabotage.ground, place) as there:
        folder = there.folder / "swap"
        folder.mkdir()
        folder = (sabotage.spoil and sabotage.spoil(there, folder)) or folder
        document = live(partial(_in, sabotage.within, partial(_examined, folder)))
        ended = live(partial(_in, sabotage.within, partial(_trained, folder, sabotage.large)))
        left = sorted(os.listdir(folder)) if folder.is_dir() else []
        return {"document": document, "ended": ended, "expected": expected, "left": left}


def main(name, place):
    try:
        json.dump(verdicts(name, place), sys.stdout)
    except NotHereError as missing:
        json.dump({"missing": str(missing)}, sys.stdout)
