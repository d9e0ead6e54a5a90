"""Control groups of version 1, as containers of older hosts have them: a process gets into one of its own."""

import os
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def available(kind):
    """Whether this process may make groups of a kind."""
    return (ROOT / kind / "cgroup.procs").exists() and os.access(ROOT / kind, os.W_OK)


@contextmanager
def group(kind, limits):
    """A group with some limits, by the names of their files, which is gone afterwards with all that was in it."""
    folder = ROOT / kind / f"nvme-offload-{os.getpid()}"
    folder.mkdir()
    try:
        for name, value in limits.items():
            (folder / name).write_text(str(value))
        yield folder
    finally:
        with suppress(OSError):  # who is still in it: it goes with its processes
            folder.rmdir()


def enter(folder):
    """Put this process into a group."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
