"""Saving that ends early: killed, a full disk, a file that may not grow. What was there before is what is there."""

import errno
import itertools
import json
import os

import pytest

from nvme_offload import CheckpointWriteError
from nvme_offload.optim.checkpoint import files
from tests.support.resuming import fresh_engine, steps_of
from tests.support.sandbox import can_mount, run_python
from tests.support.training import run_child

KILLED = "import sys; from tests.support.killed_saves import main; main(*sys.argv[1:])"


@pytest.mark.parametrize("tag", [pytest.param("new", marks=pytest.mark.slow), "old"])
def test_killed_anywhere_the_next_run_finds_a_whole_checkpoint(tag, tmp_path):
    """Under a new tag, and over the tag of the checkpoint that is there."""
    outcomes = json.loads(run_child(KILLED, tmp_path, tag, timeout=300))
    found = [name for where, name, *_ in outcomes if not where.startswith("killed")]
    assert found == sorted(found, reverse=True), "once the new one is found, it stays found"
    assert found.count("old") > 10
    assert found.count("new") > 1
    assert sum(where.startswith("killed") for where, *_ in outcomes) == 3
    for where, name, loaded, left in outcomes:
        assert loaded.removesuffix(".replaced") == (tag if name == "new" else "old"), where
        assert {"old", "next", "latest"} <= set(left) <= {"old", "next", "latest", tag}, where


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("number", [1, 4, 9])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, OSError])
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


FULL_DISK = """
import ctypes, os, shutil, sys, warnings
warnings.simplefilter("ignore")
from types import SimpleNamespace
from nvme_offload import CheckpointWriteError
from nvme_offload.optim.checkpoint import storage as checkpoint_storage
from tests.support.killed_saves import digest_of
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


@pytest.mark.skipif(not can_mount(), reason="mounting is not allowed here")
def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path):
    done = run_python(FULL_DISK, tmp_path, mounts={tmp_path: "tmpfs"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line, name in zip(lines, ["new.partial"] * 2 + ["old.partial"] * 2, strict=True):
        assert f"{name} failed: ENOSPC" in line or f"{name}/" in line
        assert "nothing of it is left and earlier ones are as they were: free space" in line
    assert all("needed 2." in line and "free 2" in line for line in lines[::2])
