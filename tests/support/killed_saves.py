"""What a save that is killed leaves behind, at every call that touches the checkpoint's folder.

A killed process leaves the files as they are at that moment. So one save gives all moments: the folder is copied before
each call. Some are killed with SIGKILL in earnest.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from nvme_offload.optim.checkpoint import files as checkpoint_files
from tests.support.resuming import fresh_engine, steps_of
from tests.support.sharded_model import full_state

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
WRITES_PER_EVENT = 2000  # torch.save writes in small portions
KILLED_AT = (4, 9, 14)


class Moments:
    """Calls `act` before every call that touches a folder, and between writes of data, while the block runs."""

    def __init__(self, folder, act):
        self._folder = str(folder)
        self._act = act
        self._write = checkpoint_files.HashingStream.write
        self._writes = 0
        self._armed = False

    def __enter__(self):
        sys.addaudithook(self._on_event)
        checkpoint_files.HashingStream.write = lambda stream, data: self._on_write(stream, data)
        self._armed = True

    def __exit__(self, *exception):
        self._armed = False
        checkpoint_files.HashingStream.write = self._write

    def _on_event(self, event, arguments):
        if self._armed and event in EVENTS and str(arguments[0]).startswith(self._folder):
            self._armed = False
            self._act()
            self._armed = True

    def _on_write(self, stream, data):
        self._writes += 1
        if self._writes % WRITES_PER_EVENT == 0:
            stream.flush()
            self._act()
        return self._write(stream, data)


def digest_of(engine):
    digest = hashlib.sha256(str(engine.global_steps).encode())
    for value in full_state(engine.module, engine.optimizer).values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def save_twice(folder, tag, act):
    """Save as "old", then another step as `tag`, with `act` before every call; returns both digests."""
    torch.set_num_threads(1)
    digests = []
    with fresh_engine("bf16") as engine:
        steps_of(engine, 0, range(1))
        engine.save_checkpoint(folder, "old")
        digests.append(digest_of(engine))
        steps_of(engine, 0, range(1, 2))
        with Moments(folder, act):
            engine.save_checkpoint(folder, tag)
        digests.append(digest_of(engine))
    return digests


def kill_a_save(folder, tag, countdown):
    """In a forked process, at the `countdown`-th call."""
    pid = os.fork()
    if pid == 0:
        calls = iter(range(1, countdown + 1))
        save_twice(folder, tag, lambda: next(calls) == countdown and os.kill(os.getpid(), signal.SIGKILL))
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "it was not killed"
    assert os.WTERMSIG(status) == signal.SIGKILL, status


def main(root, tag):
    """Per moment, and per kill: which checkpoint the next run loads ("old" or "new"), and what it leaves there."""
    root = Path(root)
    killed = [root / f"killed{countdown}" for countdown in KILLED_AT]
    for folder, countdown in zip(killed, KILLED_AT, strict=True):
        kill_a_save(folder, tag, countdown)
    copies = []

    def copy():
        copies.append(root / f"copy{len(copies)}")
        shutil.copytree(root / "whole", copies[-1])

    old, new = save_twice(root / "whole", tag, copy)
    names, outcomes = {old: "old", new: "new"}, []
    with fresh_engine("bf16", seed=1) as engine:
        for folder in [*copies, root / "whole", *killed]:
            path, _ = engine.load_checkpoint(folder)
            found = names[digest_of(engine)]
            engine.save_checkpoint(folder, "next")
            outcomes.append((folder.name, found, Path(path).name, sorted(os.listdir(folder))))
    json.dump(outcomes, sys.stdout)
