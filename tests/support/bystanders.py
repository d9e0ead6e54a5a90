"""Trainings beside one that is killed again and again, all on one path.

Runs in a process of its own, as `killed_steps` does.
"""

import hashlib
import mmap
import os
import traceback
from itertools import count
from pathlib import Path

from nvme_offload.offload.durable.inventory import find_runs, remove_run
from tests.support.killed_steps import be_ready_to_fork, fork, kill, train_optimizer

BESIDE = {"durable": {"rewrite_every": 3, "buffers": 2}, "durable in place": {}, "plain": None}
"""How each of the others is made to last; None: it ends with its process."""


class Stranger:
    """Files of somebody else, one of them named as a run's, that must stay as they are."""

    def __init__(self, path):
        self._files = [path / "notes.txt", path / "nvme-durable-thesis.tar", path / "data" / "swap"]
        for number, file in enumerate(self._files):
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(hashlib.sha256(str(number).encode()).digest() * 9999)
        self._before = self._seen()

    def _seen(self):
        found = [(file.stat(), hashlib.sha256(file.read_bytes()).hexdigest()) for file in self._files]
        return [(stat.st_ino, stat.st_size, stat.st_mtime_ns, digest) for stat, digest in found]

    def check(self):
        assert self._seen() == self._before


class Bystander:
    """A training that is repeated in a process of its own until it is told to stop."""

    def __init__(self, path, name, how, expected):
        self.path, self.name, self.how, self.expected = path, name, how, expected
        self._page = mmap.mmap(-1, mmap.PAGESIZE)  # told to stop; trainings that came to their end
        self._parent = os.getpid()
        self._pid = fork(self._train)

    def _train(self):
        for number in count(1):
            name = None if self.how is None else f"{self.name.replace(' ', '-')}-{number}"
            digest = train_optimizer(self.path, name, lambda *_: None, **(self.how or {}))
            assert digest == self.expected, f"{self.name}, training {number}: other bits"
            self._page[1] = min(number, 255)
            if self._page[0] or os.getppid() != self._parent:
                return
            if name:
                [run] = [run for run in find_runs([self.path]) if run.name == name]
                remove_run(run)

    def stop(self):
        """How many trainings have come to their end, each with the bits that it has alone."""
        self._page[0] = 1
        status = os.waitpid(self._pid, 0)[1]
        assert status == 0, f"{self.name} ended with status {status}"
        return self._page[1]


def main(root, num_kills, seed, *kinds):
    """Kill runs of these kinds beside the others, and return what became of all of them."""
    be_ready_to_fork()
    path = Path(root)
    stranger = Stranger(path)
    expected = train_optimizer(path, None, lambda *_: None)
    others = [Bystander(path, name, how, expected) for name, how in BESIDE.items()]
    try:
        killed = {kind: kill(path, kind, int(num_kills), int(seed), None) for kind in kinds}
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        ended = {other.name: other.stop() for other in others}
        stranger.check()
    return {"killed": killed, "ended": ended}
