"""Saves, loads and births that end early, anywhere: killed, no power, a full disk, an error. What was there stays."""

import errno
import itertools
import os
import random
import shutil
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nvme_offload import CheckpointWriteError, initialize, weight_items, write_sharded
from nvme_offload.offload.storage.run_directory import RunDirectory
from nvme_offload.optim.checkpoint import files
from nvme_offload.optim.checkpoint.run_state import STATE
from tests.support import build
from tests.support.pairs import each_value_once
from tests.support.power_loss import Crash, History, Recording
from tests.support.ranks import run_ranks
from tests.support.resuming import fresh_engine, steps_of
from tests.support.sandbox import needs_mounts, run_python
from tests.support.sharded_model import digest_of

STRANGERS = {
    "notes.txt": b"mine",
    "old.notes/a": b"b",
    "theirs.partial/state.json": b"{}",
    "theirs.replaced/__0_0.distcp": b"bytes",
    "link.partial": "old.notes",
}
"""Others have these in the folder, some named as ours; a link is noted with where it leads."""


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


section = partial(build.section, stage=2, adamw={"lr": 1e-2}, bf16={"enabled": True})


def small_engine(seed: int = 0, path: Path | None = None) -> Any:
    """An engine whose checkpoint has 30 kB, so that thousands of them are quickly looked at."""
    torch.manual_seed(seed)
    return initialize(small_model(), section(path))


def train(engine: Any, step: int) -> None:
    torch.manual_seed(step)
    engine.backward(engine(torch.randn(3, 8)).float().square().mean())
    engine.step()


def put_strangers(folder: Path, strangers: Mapping[str, bytes | str] = STRANGERS) -> None:
    """Files with their bytes, and links with where they lead."""
    for name, content in strangers.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def strangers_are_whole(folder: Path) -> bool:
    for name, content in STRANGERS.items():
        path = folder / name
        there = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        if there != content:
            return False
    return True


def found_by_the_next_run(root: Path) -> tuple[str, Any]:
    """Name of the folder that is loaded, and its manifest with every file verified; ``("", None)``: there is none."""
    folder = files.find(root, None)
    if folder is None:
        return "", None
    manifest = files.read_manifest(folder)
    for name, record in manifest.items():
        files.verify(folder / name, record)
    return folder.name, manifest


class SaveCase:
    """One save of the small engine, recorded, and the rules for what a crash in it may leave.

    `earlier` is the tag of a checkpoint that is there before, "": none is.
    """

    def __init__(self, folder: Path, earlier: str, tag: str) -> None:
        self.folder, self.tag = folder / "drive", tag
        self._copy = folder / "copy"
        self.folder.mkdir()
        root = self.folder / "runs" / "a" if not earlier else self.folder
        self._root = root.relative_to(self.folder)
        self.before: Any = None
        with small_engine() as engine:
            train(engine, 0)
            self.digests = [digest_of(engine)]  # they are of the engine as it was saved earlier, and as it is saved
            if earlier:
                put_strangers(root)
                engine.save_checkpoint(root, earlier)
                self.before = files.read_manifest(root / earlier)
            train(engine, 1)
            self.digests.append(digest_of(engine))
            with Recording(self.folder) as recording:
                engine.save_checkpoint(root, tag)
                recording.mark("saved")
        self.history = recording.history()
        self.after = files.read_manifest(root / tag)
        self._kept = {earlier} - {""}
        self.strangers = {name.split("/")[0] for name in STRANGERS} if earlier else set()

    def restore(self, crash: Crash) -> Path:
        """The folder of the checkpoints as the crash left it."""
        shutil.rmtree(self._copy, ignore_errors=True)
        return crash.restore(self._copy) / self._root

    def problem(self, crash: Crash) -> str:
        """Say what is wrong after a crash; nothing, if all is as it must be."""
        root = self.restore(crash)
        allowed = [self.after] if "saved" in crash.marks else [self.before, self.after]
        try:
            if found_by_the_next_run(root)[1] not in allowed:
                return "neither the checkpoint before nor, or not yet, the one after"
            save_again(root, self.tag)
        except (OSError, RuntimeError, ValueError) as error:
            return repr(error)
        ours = {self.tag, files.LATEST, *self._kept}
        if (left := {path.name for path in root.iterdir()}) != ours | self.strangers:
            return f"left behind or lost: {sorted(left ^ (ours | self.strangers))}"
        if self.strangers and not strangers_are_whole(root):
            return "something of somebody else's was changed"
        return ""

    def problems(self, crashes: Any) -> list[str]:
        """List the problems of all crashes, each with the crash."""
        found = ((self.problem(crash), crash) for crash in crashes)
        return [f"{problem}: {crash}" for problem, crash in found if problem]


def save_again(root: Path, tag: str) -> None:
    """Do what the next save does around the bytes of its tensors."""
    root.mkdir(parents=True, exist_ok=True)
    partial = files.begin(root, tag)
    files.write_manifest(partial, {STATE: files.write_durably(partial / STATE, b"{}")})
    files.publish(partial, tag)
    assert found_by_the_next_run(root)[0] == tag


def load_quietly(engine: Any, root: Path) -> None:
    """Load what is there; without a word where that is nothing, or gives up a loss scale."""
    with warnings.catch_warnings(action="ignore"):
        engine.load_checkpoint(root)


CASES = {
    "first": ("", "new"),
    "new tag": ("old", "new"),
    "same tag": ("old", "old"),
}


@pytest.fixture
def undurable(monkeypatch):
    """A restored state needs no drive."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def case_of(name, folder):
    (folder / name).mkdir()
    return SaveCase(folder / name, *CASES[name])


@pytest.fixture
def case(request, in_memory, alone, undurable):
    return case_of(request.param, in_memory)


every_case = pytest.mark.parametrize("case", CASES, indirect=True)


@every_case
def test_killed_anywhere(case):
    crashes = list(case.history.kills())
    assert len(crashes) > 15
    assert not case.problems(crashes)


@pytest.mark.parametrize("case", ["new tag", "same tag"], indirect=True)
def test_power_lost_anywhere(case):
    crashes = list(case.history.power_losses(num_random=50))
    assert len(crashes) > 50
    assert not case.problems(crashes)


@pytest.mark.slow
@every_case
def test_power_lost_in_many_ways(case):
    assert not case.problems(case.history.power_losses(at_most=1024, num_random=20_000, seed=1))


@pytest.mark.usefixtures("alone", "undurable")
def test_every_sync_is_needed(in_memory):
    """Left out alone, each leads somewhere to neither checkpoint, or to something that stays for ever."""
    unneeded = {}
    for name in CASES:
        case = case_of(name, in_memory)
        for sync in case.history.syncs:
            place = os.path.basename(sync.what), sync.caller
            if unneeded.get(place, True):
                unneeded[place] = not any(map(case.problem, case.history.losses_without(sync)))
    assert len(unneeded) > 10
    assert not [place for place in unneeded if unneeded[place]]


@pytest.mark.parametrize("case", ["new tag", "same tag"], indirect=True)
def test_a_run_goes_on_with_the_bits_of_either_and_saves(case):
    """The whole of it, with an engine: at every kill, and at some of the power losses."""
    sampled = random.Random(0).sample(list(case.history.power_losses(num_random=500)), 8)
    found = []
    with small_engine(seed=1) as engine:
        for crash in [*list(case.history.kills())[::-4], *sampled]:
            root = case.restore(crash)
            load_quietly(engine, root)
            found.append(case.digests.index(digest_of(engine)))
            assert found[-1] == 1 or "saved" not in crash.marks, str(crash)
            train(engine, 2)
            engine.save_checkpoint(root, "next")
            assert (
                {"old", "next", "latest"} <= set(os.listdir(root)) - case.strangers <= {"old", "new", "next", "latest"}
            )
    assert set(found) == {0, 1}


def save_and_record(rank, world_size, root):
    with small_engine() as engine:
        train(engine, 0)
        engine.save_checkpoint(root, "old")
        train(engine, 1)
        dist.barrier()
        with Recording(root) as recording:
            dist.barrier()
            engine.save_checkpoint(root, "new")
            recording.mark(f"saved on rank {rank}")
        dist.barrier()
    return recording.base, recording.events


def test_the_save_of_two_ranks(in_memory, undurable):
    """Both write into one folder; one history is made of what each of them recorded."""
    root = in_memory / "root"
    root.mkdir()
    history = History.merged(root, run_ranks(save_and_record, 2, root))
    assert {"__0_0.distcp", "__1_0.distcp"} <= {os.path.basename(sync.what) for sync in history.syncs}
    before, after = (files.read_manifest(root / tag) for tag in ("old", "new"))
    assert before != after
    copies = (in_memory / str(number) for number in itertools.count())
    count = 0
    for crash in itertools.chain(history.kills(), itertools.islice(history.power_losses(num_random=200), 0, None, 8)):
        copy = crash.restore(next(copies))
        assert found_by_the_next_run(copy)[1] in ([after] if crash.marks else [before, after]), str(crash)
        save_again(copy, "new")
        assert sorted(os.listdir(copy)) == ["latest", "new", "old"], str(crash)
        count += 1
    assert count > 40


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("kind", "number"), each_value_once([KeyboardInterrupt, MemoryError, OSError], [1, 4, 9]))
def test_what_ends_a_write_is_what_the_save_raises(tmp_path, monkeypatch, kind, number):
    write, writes = files.HashingStream.write, itertools.count(1)

    def ended(stream, data):
        if next(writes) == number:
            raise kind(errno.EIO, "ended") if kind is OSError else kind
        return write(stream, data)

    with fresh_engine("bf16") as engine:
        steps_of(engine, 0, range(1))
        engine.save_checkpoint(tmp_path, "old")
        with monkeypatch.context() as patch:
            patch.setattr(files.HashingStream, "write", ended)
            with pytest.raises(CheckpointWriteError if kind is OSError else kind):
                engine.save_checkpoint(tmp_path, "new")
        assert sorted(os.listdir(tmp_path)) == ["latest", "old"]
        engine.save_checkpoint(tmp_path, "new")
    assert torch.serialization.get_crc32_options(), "for what others save"


FULL_DISK = """
import ctypes, os, shutil, sys, warnings
warnings.simplefilter("ignore")
from types import SimpleNamespace
from nvme_offload import CheckpointWriteError
from nvme_offload.optim.checkpoint import storage as checkpoint_storage
from tests.support.sharded_model import digest_of
from tests.support.resuming import fresh_engine, steps_of
root = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mount(b"tmpfs", os.fsencode(root), b"tmpfs", ctypes.c_ulong(32), b"size=5m") == 0
with fresh_engine("bf16") as engine:
    steps_of(engine, 0, range(1))
    engine.save_checkpoint(root, "old")
    expected = digest_of(engine)
    steps_of(engine, 0, range(1, 2))
    for tag in ("new", "old"):
        for disk_usage in (shutil.disk_usage, lambda path: SimpleNamespace(free=1 << 40)):  # before, and in the middle
            checkpoint_storage.shutil = SimpleNamespace(disk_usage=disk_usage)
            try:
                engine.save_checkpoint(root, tag)
            except CheckpointWriteError as error:
                print(error)
            else:
                sys.exit("it fitted")
            assert sorted(os.listdir(root)) == ["latest", "old"], os.listdir(root)
    steps_of(engine, 0, range(2, 3))
with fresh_engine("bf16", seed=1) as engine:
    engine.load_checkpoint(root)
    assert digest_of(engine) == expected
"""


@needs_mounts
def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path):
    done = run_python(FULL_DISK, tmp_path, mounts={tmp_path: "tmpfs"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line, name in zip(lines, ["new.partial"] * 2 + ["old.partial"] * 2, strict=True):
        assert f"{name} failed: ENOSPC" in line or f"{name}/" in line
        assert "nothing of it is left and earlier ones are as they were: free space" in line
    assert all("needed 2." in line and "free 2" in line for line in lines[::2])


ON_THE_PATH = ("nvme-offload-1-0/notes.txt", ".nvme-offload-2-0/lock/mine", "nvme-offload-mine/swap", "swap", "lock")
"""Others have these on the path of the swap files, named as ours are."""


def train_two_steps(engine):
    """The second waits for what the first wrote. What the last one writes may be dropped together with its file."""
    train(engine, 2)
    train(engine, 3)


def born_from_files(drive):
    with torch.device("meta"):
        model = small_model()
    with initialize(model, section(drive / "nvme"), weights=drive / "weights") as engine:
        train_two_steps(engine)


def loaded(drive):
    with small_engine(seed=1, path=drive / "nvme") as engine:
        load_quietly(engine, drive / "checkpoints")
        train_two_steps(engine)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("life", [born_from_files, loaded])
def test_a_crash_leaves_run_directories_and_the_next_run_removes_them(tmp_path, in_memory, monkeypatch, life):
    drive = tmp_path / "drive"
    put_strangers(drive / "nvme", dict.fromkeys(ON_THE_PATH, b"theirs"))
    with small_engine() as engine:
        train(engine, 0)
        engine.save_checkpoint(drive / "checkpoints", "old")
    write_sharded(drive / "weights", weight_items(small_model()), max_shard_bytes=200)
    with Recording(drive) as recording:
        life(drive)
    history = recording.history()
    kills, losses = list(history.kills()), list(history.power_losses(num_random=2000))
    before = kills[0].image
    assert any(path.endswith("/swap") and content for crash in losses for path, content in crash.image.items())
    assert len(kills) >= 8
    assert len(losses) >= 20
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for number, crash in enumerate([*kills, *losses]):
        new = {path for path in crash.image if path not in before}
        assert all(path.startswith(("nvme/nvme-offload-", "nvme/.nvme-offload-")) for path in new), str(crash)
        assert {path: crash.image[path] for path in before} == before, str(crash)
        path = crash.restore(in_memory / str(number)) / "nvme"
        RunDirectory(path).remove()
        left = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
        assert left == set(ON_THE_PATH), str(crash)
        assert len(os.listdir(path)) == len(ON_THE_PATH), str(crash)
