"""Trainings on file systems that are made for them, in images, and are seen by one child process alone."""

import errno
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import NamedTuple

import torch

from nvme_offload import OffloadAdamW, OffloadConfig
from nvme_offload.perf.doctor.findings import Level
from nvme_offload.perf.doctor.paths import check_trial
from nvme_offload.perf.doctor.trial import TrialSite, trial
from tests.support.engine_tools import available_engines
from tests.support.killed_steps import NUM_STEPS, be_ready_to_fork, durable_section, fork, train_optimizer
from tests.support.training import params_of

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN
_NO_FLUSH = 2  # nor of the journal: as when the power fails
_ZRAM = Path("/sys/class/zram-control")
KILLED_BEHIND, CUT_BEHIND, FULL_BEHIND = 3, 5, 7  # steps


class Ground(NamedTuple):
    """A file system, and what is below and above it."""

    kind: str
    make: str = ""  # options of mkfs
    options: str = ""  # of mount
    on: str = "disk"  # "memory": its image is in a tmpfs; "zram"; "thin": the image has less space than its size
    loop: str = ""  # options of losetup
    overlay: str = ""  # what is below its layer, "empty" or "squashfs"; or a program that shows it at another place
    size: str = "320M"
    keeps: bool = True  # promises of space
    level: Level = Level.OK  # of what the doctor finds there
    says: str = ""  # what it says then


_MEMORY = {"level": Level.WARNING, "says": "which is memory"}
_FILLED = {"level": Level.WARNING, "says": "cannot promise space (fallocate)"}
_UNSEEN = {"level": Level.NOTE, "says": "the file system does not say where its blocks are"}
GROUNDS = {
    "ext2": Ground("ext2", **_FILLED),
    "ext3": Ground("ext3", **_FILLED),
    "ext4, blocks of 1 KiB": Ground("ext4", make="-b 1024"),
    "ext4, blocks of 4 KiB": Ground("ext4", make="-b 4096"),
    "ext4, loop with direct I/O": Ground("ext4", loop="--direct-io=on"),
    "ext4, quota": Ground("ext4", make="-O quota,project"),
    "ext4, thin": Ground("ext4", on="thin", keeps=False),
    "ext4, data=journal": Ground("ext4", options="data=journal", level=Level.ERROR, says="has no direct I/O"),
    "XFS": Ground("xfs"),
    "XFS, blocks of 16 KiB": Ground("xfs", make="-b size=16384"),
    "XFS, blocks of 64 KiB": Ground("xfs", make="-b size=65536"),
    "XFS, sectors of 4 KiB": Ground("xfs", make="-s size=4096"),
    "XFS, sectors of 16 KiB": Ground("xfs", make="-b size=16384 -s size=16384"),
    "XFS, sectors of 32 KiB": Ground("xfs", make="-b size=65536 -s size=32768"),
    "XFS, reflink=0": Ground("xfs", make="-m reflink=0"),
    "XFS, thin": Ground("xfs", on="thin", keeps=False),
    "XFS, loop with direct I/O": Ground("xfs", loop="--direct-io=on"),
    "btrfs": Ground("btrfs"),
    "btrfs, nodatacow": Ground("btrfs", options="nodatacow"),
    "btrfs, compress": Ground("btrfs", options="compress-force=zstd"),
    "tmpfs": Ground("tmpfs", **_MEMORY),
    "ext4, loop on tmpfs": Ground("ext4", on="memory", **_MEMORY),
    "ext4, zram": Ground("ext4", on="zram", **_MEMORY),
    "FUSE (fuse2fs)": Ground("fuse", keeps=False, **_UNSEEN),
    "FUSE (bindfs) on XFS": Ground("xfs", overlay="bindfs", **_UNSEEN),
    "FUSE (fuse-overlayfs) on ext4": Ground("ext4", overlay="fuse-overlayfs", **_UNSEEN),
    "overlay on ext2": Ground("ext2", overlay="empty", **_FILLED),
    "overlay on ext3": Ground("ext3", overlay="empty", **_FILLED),
    "overlay on ext4": Ground("ext4", overlay="empty"),
    "overlay on XFS": Ground("xfs", overlay="empty"),
    "overlay on btrfs": Ground("btrfs", overlay="empty"),
    "overlay on ext4, above squashfs": Ground("ext4", overlay="squashfs"),
    "overlay on tmpfs": Ground("tmpfs", overlay="empty", **_MEMORY),
    "overlay on ext4, zram": Ground("ext4", on="zram", overlay="empty", **_MEMORY),
}


def run(*command):
    try:
        subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NotHereError(f"{command[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        raise NotHereError(f"{command[0]}: {error.stderr.strip().splitlines()[-1:]}") from None


class NotHereError(Exception):
    """This machine has no such file system, or no tool for it."""


class Mounted:
    """A file system that can be mounted again, and what is to be undone."""

    def __init__(self, ground, place, stack):
        self.ground, self.stack = ground, stack
        self.root, self.layers, self.overlay = place / "root", place / "layers", place / "overlay"
        for folder in (self.root, self.layers, self.overlay):
            folder.mkdir()
        self.device = None if ground.kind == "tmpfs" else self._device(place)
        self.folder = self.overlay if ground.overlay else self.root
        if ground.overlay == "squashfs":
            (place / "content").mkdir()
            run("mksquashfs", place / "content", place / "squash", "-quiet")
            self._show("mount", "-t", "squashfs", "-o", "loop,ro", place / "squash", self.layers)
        self.mount()

    def _device(self, place):
        ground = self.ground
        if ground.on == "zram":
            number = (_ZRAM / "hot_add").read_text().strip() if _ZRAM.exists() else ""
            if not number:
                raise NotHereError("no zram")
            self.stack.callback((_ZRAM / "hot_remove").write_text, number)
            device = Path(f"/dev/zram{number}")
            Path(f"/sys/block/zram{number}/disksize").write_text(ground.size)
        else:
            if ground.on == "memory":
                (place / "memory").mkdir()
                self._show("mount", "-t", "tmpfs", "none", place / "memory")
                place = place / "memory"
            if ground.on == "thin":
                (place / "small").mkdir()
                run("truncate", "-s", "160M", place / "below")
                run("mkfs.ext4", "-F", "-q", place / "below")
                self._show("mount", "-o", "loop", place / "below", place / "small")
                place = place / "small"
                run("fallocate", "-l", "32M", place / "spare")
            device = place / "image"
            run("truncate", "-s", ground.size, device)
            if ground.kind != "fuse":
                command = ["losetup", "--find", "--show", *ground.loop.split(), device]
                device = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
                self.stack.callback(subprocess.run, ["losetup", "--detach", device])
        kind = "ext4" if ground.kind == "fuse" else ground.kind
        quiet = ["-F", "-q"] if kind.startswith("ext") else ["-f", "-q"]
        run(f"mkfs.{kind}", *quiet, *ground.make.split(), device)
        return device

    def _show(self, *command):
        """Mount something, at the place that comes last."""
        run(*command)
        self.stack.callback(subprocess.run, ["umount", command[-1]], capture_output=True)

    def mount(self):
        ground = self.ground
        options = ["-o", ground.options] if ground.options else []
        if ground.kind == "fuse":
            self._show("fuse2fs", self.device, self.root)
        elif ground.kind == "tmpfs":
            self._show("mount", "-t", "tmpfs", "-o", f"size={ground.size}", "none", self.root)
        else:
            self._show("mount", "-t", ground.kind, *options, self.device, self.root)
        if ground.overlay == "bindfs":
            self._show("bindfs", self.root, self.overlay)
        elif ground.overlay:
            upper, work = self.root / "upper", self.root / "work"
            upper.mkdir(exist_ok=True)
            work.mkdir(exist_ok=True)
            below = f"lowerdir={self.layers},upperdir={upper},workdir={work}"
            program = [ground.overlay] if ground.overlay.startswith("fuse") else ["mount", "-t", "overlay", "overlay"]
            self._show(*program, "-o", below, self.overlay)

    def mount_again(self):
        for folder in (self.overlay, self.root) if self.ground.overlay else (self.root,):
            for _ in range(300):  # the ring of a dead process may hold files for a while
                if subprocess.run(["umount", folder]).returncode == 0:
                    break
                time.sleep(0.1)
        self.mount()

    def cut(self):
        """The power fails: nothing that is not on the drive gets there; OSError where that cannot be played."""
        fd = os.open(self.root, os.O_RDONLY)
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("=I", _NO_FLUSH))


@contextmanager
def mounted(ground, place):
    with ExitStack() as stack:
        yield Mounted(ground, place, stack)


def fill(folder):
    """Others take all that is free, with bytes that cannot be compressed."""
    content = os.urandom(1 << 20)
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with suppress(OSError):
                while file.write(content[:size]):
                    os.fsync(file.fileno())


def live(act):
    """Do something in a fork; what it returns, or the error that it ended with, in words; "killed" by a signal."""
    reader, writer = Pipe(duplex=False)

    def life():
        try:
            writer.send(act())
        except Exception as error:
            writer.send(f"{type(error).__name__}: {error}")

    pid = fork(life)
    writer.close()
    with suppress(EOFError):
        said = reader.recv()
        os.waitpid(pid, 0)
        return said
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    return "killed"


def trained(folder, name, behind=0, act=lambda: None):
    """Train to the end, and do something behind a step; the digest, and the step that it went on from."""
    first = []

    def note(resumed, begun, returned):
        first.append(resumed)
        if returned == begun == behind > resumed:
            act()

    return train_optimizer(folder, name, note), first[0]


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def found_by_doctor(folder):
    """What the doctor says of a run there."""
    seen, engines = [], [*dict.fromkeys((available_engines()[0], "aiofiles"))]
    trial(iter([TrialSite(folder, {}, engines)]), lambda _, each: seen.append(each))
    return [*check_trial(seen[0], engines, OffloadConfig())]


def assert_same_end(said, expected, step):
    """A life ended with the digest of a run in memory; it went on from a step, or the one before."""
    assert said in ((expected, step), (expected, step - 1)), said


def all_of(name, place):
    """All that a run may meet on this ground; its fate in words, by what it met."""
    ground = GROUNDS[name]
    be_ready_to_fork()
    (expected, _), fate = live(partial(trained, None, None)), {}
    with mounted(ground, place) as there:
        findings = live(partial(found_by_doctor, there.folder))
        assert not isinstance(findings, str), findings
        worst = max(findings, key=lambda finding: finding.level.rank if finding.check != "written" else -1)
        assert worst.level is ground.level, findings
        assert ground.says in worst.found, worst
        fate["doctor"] = worst.level
        begun = live(partial(trained, there.folder, "run", KILLED_BEHIND, _kill))
        if ground.level is Level.ERROR:
            assert ground.says in begun, begun
            return fate | {"kill, resume": "refused: " + begun.partition("swap (")[2].partition(") cannot")[0]}
        assert begun == "killed"
        fate["kill, resume"] = "equal"
        for column, meet in {
            "full disk": _run_thin if ground.on == "thin" else _run_full,
            "copy": _be_copied,
            "freeze": _be_frozen,
            "read-only": _lose_writes,
            "shutdown": _be_cut,
        }.items():
            fate[column] = meet(there, expected)
        return fate


def _run_full(there, expected):
    """Others take all that is free; then they give it back."""
    folder = there.folder
    full = live(partial(trained, folder, "run", FULL_BEHIND, partial(fill, folder)))
    if there.ground.keeps:
        assert_same_end(full, expected, KILLED_BEHIND)
    else:
        assert "ENOSPC, No space left on device; the file system is full" in full, full
    large = params_of([(1 << 22,)], torch.bfloat16)
    refused = live(partial(OffloadAdamW, large, offload=durable_section(folder, "large")))
    assert "ENOSPC, No space left on device; the file system is full: free space on it" in refused, refused
    (folder / "filler").unlink()
    again, step = live(partial(trained, folder, "run"))
    assert again == expected
    assert step == NUM_STEPS or not there.ground.keeps, "a step on the full disk is not committed"
    return "equal" if there.ground.keeps else "SwapIOError (ENOSPC), with room again equal"


def _run_thin(there, expected):
    """The drive has no room for what its file system has promised; then it has."""
    full = live(partial(trained, there.folder, "thin", 1, partial(fill, there.folder)))
    assert full.startswith("SwapIOError: "), full
    assert "ENOSPC" in full, full
    (there.root.with_name("small") / "spare").unlink()
    there.mount_again()
    assert_same_end(live(partial(trained, there.folder, "thin")), expected, 1)
    return "SwapIOError (ENOSPC), with room again equal"


def _be_copied(there, expected):
    """Somebody takes a copy that shares blocks with the swap, in the middle."""
    copy = there.folder / "copy"

    def share():
        (swap,) = there.folder.glob("nvme-durable-copied-*/swap")
        run("cp", "--reflink=always", swap, copy)
        copy.with_suffix(".bytes").write_bytes(copy.read_bytes())

    ended = live(partial(trained, there.folder, "copied", CUT_BEHIND, share))
    if "NotHereError" in ended:
        return "shares no blocks"
    assert_same_end(ended, expected, 0)
    assert copy.read_bytes() == copy.with_suffix(".bytes").read_bytes(), "the copy has bytes of later steps"
    assert live(partial(trained, there.folder, "copied")) == (expected, NUM_STEPS)
    return "equal"


def _be_frozen(there, expected):
    """Nothing can be written for two seconds, as while somebody takes a snapshot of the drive."""
    thawed = there.root.with_name("thawed")

    def freeze():
        run("fsfreeze", "--freeze", there.root)
        subprocess.Popen(["sh", "-c", f"sleep 2; touch {thawed}; fsfreeze --unfreeze {there.root}"])

    ended = live(partial(trained, there.folder, "frozen", CUT_BEHIND, freeze))
    if "NotHereError" in ended:
        return "not there"
    assert thawed.exists(), "it went on while nothing could be written"
    assert_same_end(ended, expected, 0)
    return "equal"


def _lose_writes(there, expected):
    """Somebody wants to mount it read-only; then the file system does that itself, because of an error."""
    error = Path("/sys/fs/ext4", Path(there.device or "none").name, "trigger_fs_error")

    def remount():
        assert subprocess.run(["mount", "-o", "remount,ro", there.root], capture_output=True).returncode, "not busy"
        if error.exists():
            run("mount", "-o", "remount,errors=remount-ro", there.root)
            error.write_text("1")

    lost = live(partial(trained, there.folder, "lost", CUT_BEHIND, remount))
    if not error.exists():
        assert lost == (expected, 0), lost
        return "refused; equal"
    assert lost.startswith("SwapIOError: "), lost
    assert "EROFS, Read-only file system" in lost, lost
    there.mount_again()
    assert_same_end(live(partial(trained, there.folder, "lost")), expected, CUT_BEHIND)
    return "SwapIOError (EROFS); equal"


def _be_cut(there, expected):
    """The power fails."""
    cut = live(partial(trained, there.folder, "cut", CUT_BEHIND, there.cut))
    if os.strerror(errno.ENOTTY) in cut:
        return "not there"
    assert cut.startswith("SwapIOError: "), cut
    assert str(there.folder) in cut, cut
    there.mount_again()
    assert_same_end(live(partial(trained, there.folder, "cut")), expected, CUT_BEHIND)
    return "SwapIOError; equal"


def main(name, place):
    try:
        json.dump(all_of(name, Path(place)), sys.stdout)
    except NotHereError as missing:
        json.dump({"missing": str(missing)}, sys.stdout)
