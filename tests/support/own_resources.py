"""What this process holds: open files, threads, memory, and what is registered with io_uring."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Resources(NamedTuple):
    """Everything that can leak and can be counted exactly."""

    files: tuple[tuple[str, int], ...]  # what open descriptors refer to, and how many of them
    num_threads: int
    """Without the workers to which the kernel hands requests that would block: it starts and ends them as it likes."""
    registered: tuple[str, ...]  # files and buffers registered with each ring, as far as the kernel shows them
    pinned: str  # memory that the kernel holds for registered buffers

    @classmethod
    def now(cls) -> Resources:
        """What is held at this moment."""
        files: Counter[str] = Counter()
        registered = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of this very listing
                target = os.readlink(f"/proc/self/fd/{fd}")
                files[target] += 1
                if target == "anon_inode:[io_uring]":
                    registered += _registered_with(fd)
        status = Path("/proc/self/status").read_text().splitlines()
        pinned = next((line for line in status if line.startswith("VmPin:")), "")
        return cls(tuple(sorted(files.items())), _num_threads(), tuple(registered), pinned)

    @classmethod
    def steady(cls) -> Resources:
        """What is held when threads that have been told to end have ended, and dropped objects are gone."""
        gc.collect()
        before = None
        while before != (before := cls.now()):
            time.sleep(0.1)
        return before

    @classmethod
    def settled(cls, expected: Resources, held: Resources | None = None, patience: float = 5.0) -> Resources:
        """`expected` as soon as no more than that is held; what is held if it never comes to that."""
        held = held or cls.now()
        deadline = time.monotonic() + patience
        while held.beyond(expected) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
            held = cls.now()
        return held

    def beyond(self, before: Resources) -> str:
        """What is held now and was not before, in words; empty if nothing. Less is no leak: others may have let go."""
        files = Counter(dict(self.files)) - Counter(dict(before.files))
        registered = Counter(self.registered) - Counter(before.registered)
        threads = self.num_threads - before.num_threads
        found = [f"files {dict(files)}"] if files else []
        found += [f"{threads} threads"] if threads > 0 else []
        found += [f"registered {dict(registered)}"] if registered else []
        return ", ".join(found)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _num_threads() -> int:
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((thread / "comm").read_text())
    return sum(not name.startswith("iou-wrk-") for name in names)


def _registered_with(ring_fd: str) -> list[str]:
    """What the kernel says of a ring; it says nothing while the ring is in use, so it is asked again."""
    for _ in range(100):
        lines = Path(f"/proc/self/fdinfo/{ring_fd}").read_text().splitlines()
        if shown := [line for line in lines if line.startswith(("UserFiles:", "UserBufs:"))]:
            return shown
    return []
