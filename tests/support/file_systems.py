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
    on: str = "disk"  # "memory": its image is in a tmpfs; "zram"
    loop: str = ""  # options of losetup
    overlay: str = ""  # what is below its layer: "empty", "squashfs"
    size: str = "320M"
    keeps: bool = True  # promises of space
    level: Level = Level.OK  # of what the doctor finds there
    says: str = ""  # what it says then


_MEMORY = {"level": Level.WARNING, "says": "which is memory"}
_FILLED = {"level": Level.WARNING, "says": "cannot promise space (fallocate)"}
GROUNDS = {
    "ext2": Ground("ext2", **_FILLED),
    "ext3": Ground("ext3", **_FILLED),
    "ext4, blocks of 1 KiB": Ground("ext4", make="-b 1024"),
    "ext4, blocks of 4 KiB": Ground("ext4", make="-b 4096"),
    "ext4, loop with direct I/O": Ground("ext4", loop="--direct-io=on"),
    "ext4, data=journal": Ground("ext4", options="data=journal", level=Level.ERROR, says="has no direct I/O"),
    "XFS": Ground("xfs"),
    "XFS, blocks of 16 KiB": Ground("xfs", make="-b size=16384"),
    "XFS, sectors of 4 KiB": Ground("xfs", make="-s size=4096"),
    "XFS, loop with direct I/O": Ground("xfs", loop="--direct-io=on"),
    "btrfs": Ground("btrfs"),
    "btrfs, nodatacow": Ground("btrfs", options="nodatacow"),
    "btrfs, compress": Ground("btrfs", options="compress-force=zstd"),
    "tmpfs": Ground("tmpfs", **_MEMORY),
    "ext4, loop on tmpfs": Ground("ext4", on="memory", **_MEMORY),
    "ext4, zram": Ground("ext4", on="zram", **_MEMORY),
    "FUSE (fuse2fs)": Ground(
        "fuse", keeps=False, level=Level.NOTE, says="the file system does not say where its blocks are"
    ),
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
            self._mount("-t", "squashfs", "-o", "loop,ro", place / "squash", self.layers)
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
                self._mount("-t", "tmpfs", "none", place / "memory")
                place = place / "memory"
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

    def _mount(self, *arguments):
        run("mount", *arguments)
        self.stack.callback(subprocess.run, ["umount", arguments[-1]], capture_output=True)

    def mount(self):
        options = ["-o", self.ground.options] if self.ground.options else []
        if self.ground.kind == "fuse":
            run("fuse2fs", self.device, self.root)
            self.stack.callback(subprocess.run, ["umount", self.root], capture_output=True)
        elif self.ground.kind == "tmpfs":
            self._mount("-t", "tmpfs", "-o", f"size={self.ground.size}", "none", self.root)
        else:
            self._mount("-t", self.ground.kind, *options, self.device, self.root)
        if self.ground.overlay:
            upper, work = self.root / "upper", self.root / "work"
            upper.mkdir(exist_ok=True)
            work.mkdir(exist_ok=True)
            below = f"lowerdir={self.layers},upperdir={upper},workdir={work}"
            self._mount("-t", "overlay", "-o", below, "overlay", self.overlay)

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
        folder = there.folder
        findings = live(partial(found_by_doctor, folder))
        assert not isinstance(findings, str), findings
        worst = max(findings, key=lambda finding: finding.level.rank if finding.check != "written" else -1)
        assert worst.level is ground.level, findings
        assert ground.says in worst.found, worst
        fate["doctor"] = worst.level
        begun = live(partial(trained, folder, "run", KILLED_BEHIND, _kill))
        if ground.level is Level.ERROR:
            assert ground.says in begun, begun
            return fate | {"kill, resume": "refused: " + begun.partition("swap (")[2].partition(") cannot")[0]}
        assert begun == "killed"
        full = live(partial(trained, folder, "run", FULL_BEHIND, partial(fill, folder)))
        fate |= {"kill, resume": "equal", "full disk": "equal"}
        if ground.keeps:
            assert_same_end(full, expected, KILLED_BEHIND)
        else:
            assert "ENOSPC, No space left on device; the file system is full" in full, full
            fate["full disk"] = "SwapIOError (ENOSPC), with room again equal"
        large = params_of([(1 << 22,)], torch.bfloat16)
        refused = live(partial(OffloadAdamW, large, offload=durable_section(folder, "large")))
        assert "ENOSPC, No space left on device; the file system is full: free space on it" in refused, refused
        (folder / "filler").unlink()
        again, step = live(partial(trained, folder, "run"))
        assert again == expected
        assert step == NUM_STEPS or not ground.keeps, "a step on the full disk is not committed"
        cut = live(partial(trained, folder, "cut", CUT_BEHIND, there.cut))
        if os.strerror(errno.ENOTTY) in cut:
            return fate | {"shutdown": "not there"}
        assert cut.startswith("SwapIOError: "), cut
        assert str(folder) in cut, cut
        there.mount_again()
        assert_same_end(live(partial(trained, folder, "cut")), expected, CUT_BEHIND)
        return fate | {"shutdown": "SwapIOError; equal"}


def main(name, place):
    try:
        json.dump(all_of(name, Path(place)), sys.stdout)
    except NotHereError as missing:
        json.dump({"missing": str(missing)}, sys.stdout)
