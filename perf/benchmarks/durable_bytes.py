"""What a durable step moves, by the kernel's own counters, beside the same steps that end with their process.

python -m nvme_offload.perf.benchmarks.durable_bytes FOLDER [--millions 100] [--steps 6] [--rewrite-every 1]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nvme_offload import OffloadAdamW, OffloadOptimizer
from nvme_offload.offload.durable.inventory import find_runs, remove_run

_WARM_STEPS = 2
_TENSORS = 8
NAME = "benchmark-"
"""With which the names of their runs begin."""


@dataclass(frozen=True)
class Moved:
    """Bytes per parameter and step, and seconds of a step, after the first steps."""

    read: float
    written: float
    step_seconds: float
    commits: int
    commit_wait_seconds: float
    """Of all measured steps."""


def measure(path: str, *, millions: int, steps: int, durable: bool, rewrite_every: int) -> Moved:
    """Take steps over bf16 parameters with gradients at hand, and count what the block layer moved for them."""
    with optimizer_of(path, millions=millions, durable=durable, rewrite_every=rewrite_every) as optimizer:
        for _ in range(max(_WARM_STEPS, rewrite_every)):  # until all take turns
            optimizer.step()
        settle(optimizer)
        before, waited, start = block_io(), optimizer.stats().commit_wait_seconds, time.perf_counter()
        for _ in range(steps):
            optimizer.step()
        settle(optimizer)
        seconds, after, stats = time.perf_counter() - start, block_io(), optimizer.stats()
        moved = steps * sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    read, written = ((b - a) / moved for a, b in zip(before, after, strict=True))
    return Moved(read, written, seconds / steps, stats.commits, stats.commit_wait_seconds - waited)


def optimizer_of(path: str, *, millions: int, durable: bool, rewrite_every: int = 1) -> OffloadAdamW:
    """Of bf16 parameters that have gradients, with clipping."""
    numel = millions * 1_000_000 // _TENSORS
    params = [torch.nn.Parameter(torch.randn(numel).mul_(0.05).bfloat16()) for _ in range(_TENSORS)]
    for param in params:
        param.grad = torch.randn(numel).bfloat16()
    section = {
        "zero_optimization": {
            "sub_group_size": 4_194_304,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": path,
                "buffer_count": 4,
                "staging_budget": "320MiB",
                "durable": f"{NAME}{time.time_ns()}" if durable else False,
                "rewrite_every": rewrite_every if durable else 1,
            },
        },
        "gradient_clipping": 1.0,
    }
    return OffloadAdamW(params, lr=1e-3, offload=section)


def settle(optimizer: OffloadOptimizer) -> None:
    """Wait until the latest step is done, and lasts."""
    optimizer.synchronize()
    if optimizer.is_durable:
        optimizer.commits.settle()


def block_io() -> tuple[int, int]:
    """Bytes that this process has made the block layer read and write: see proc(5), /proc/pid/io."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def remove_runs(folder: str) -> None:
    """Delete the runs of benchmarks that have ended."""
    for run in find_runs([Path(folder)]):
        if run.name.startswith(NAME):
            remove_run(run)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both, and print them as JSON. The durable run is removed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--steps", type=int, default=6, help="whole periods, or the figures are of a part of one")
    parser.add_argument("--rewrite-every", type=int, default=1)
    given = parser.parse_args(arguments)
    how = {"millions": given.millions, "steps": given.steps, "rewrite_every": given.rewrite_every}
    found = {
        name: asdict(measure(given.folder, durable=durable, **how))
        for name, durable in (("in place", False), ("durable", True))
    }
    remove_runs(given.folder)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
