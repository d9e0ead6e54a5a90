"""What a snapshot costs: its time, and the bytes that the block layer wrote for it, by the kernel's own counters.

python -m nvme_offload.perf.benchmarks.snapshots FOLDER [--millions 100] [--snapshots 3]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nvme_offload import OffloadAdamW
from nvme_offload.perf.benchmarks.durable_bytes import block_io, optimizer_of, remove_runs, settle


@dataclass(frozen=True)
class Pinned:
    """One snapshot, and the steps beside it."""

    seconds: float
    """Of `snapshot`, with the commit of the step before it done."""
    written: int
    """Bytes meanwhile, those that a sync of all files afterwards brings included."""
    reserved: int
    """Bytes of the drive that the swap file has more."""


def measure(path: str, *, millions: int, snapshots: int) -> list[Pinned]:
    """Take a step over bf16 parameters before each snapshot."""
    with optimizer_of(path, millions=millions, durable=True) as optimizer:
        return [_measured(optimizer, f"number-{number}") for number in range(snapshots)]


def _measured(optimizer: OffloadAdamW, name: str) -> Pinned:
    optimizer.step()
    settle(optimizer)
    files = [optimizer.commits.run.space.path_of(fd) for fd in optimizer.commits.run.space.fds]
    held, before, start = _held(files), block_io()[1], time.perf_counter()
    optimizer.snapshot(name)
    seconds = time.perf_counter() - start
    return Pinned(seconds, block_io()[1] - before, _held(files) - held)


def _held(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the snapshots as JSON. The durable run is removed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--snapshots", type=int, default=3)
    given = parser.parse_args(arguments)
    found = measure(given.folder, millions=given.millions, snapshots=given.snapshots)
    remove_runs(given.folder)
    sys.stdout.write(json.dumps([asdict(each) for each in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
