"""Measure what each of many small tensors costs beside a step of torch's foreach AdamW, by turns in one process.

python -m scripts.many_tensors DRIVE [--count 20000 100000] [--rounds 3]    # processor time in us a tensor, medians
"""

import argparse
import gc
import sys
import time
import tracemalloc
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from nvme_offload import OffloadAdamW
from nvme_offload.perf.measure.machine import environment
from nvme_offload.perf.measure.results import page

NUMEL = 64  # of a tensor
TORCH = "torch's step"


def params_of(count: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return parameters [NUMEL] with gradients."""
    params = [nn.Parameter(torch.full((NUMEL,), 0.5, dtype=dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def taken(call: Callable[[], object]) -> float:
    """Return seconds of processor time of a call, in all threads."""
    gc.collect()
    gc.disable()
    begun = time.process_time()
    call()
    gc.enable()
    return time.process_time() - begun


def calls(params: list[nn.Parameter], drive: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is measured, by name, in the order of a life: in place, then durable, then durable once more."""
    made: list[OffloadAdamW] = []

    def make(durable: str | None = None) -> OffloadAdamW:
        keys = {"device": "nvme", "nvme_path": str(drive)} | ({"durable": durable} if durable else {})
        made.append(OffloadAdamW(params, offload={"zero_optimization": {"offload_optimizer": keys}}))
        return made[-1]

    def step(commit: bool) -> None:
        made[-1].step()
        made[-1].synchronize()
        if commit:
            made[-1].commit()

    yield "construct and place", lambda: make().place()
    step(False)
    yield "step", lambda: step(False)
    given: dict[str, Any] = {}
    yield "state_dict", lambda: given.update(made[-1].state_dict())
    yield "load_state_dict", lambda: made[-1].load_state_dict(given)
    made[-1].close()
    make("many").resume()
    step(True)
    yield "step that is committed", lambda: step(True)
    yield "commit of what is unchanged", lambda: made[-1].commit()
    made[-1].close()
    make("many")
    yield "resume", lambda: made[-1].resume()
    made[-1].close()


def measured(count: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return us a tensor of each call, with torch's step before and behind it."""
    found: dict[str, list[float]] = defaultdict(list)
    theirs = torch.optim.AdamW(params_of(count, torch.float32), foreach=True)
    theirs.step()
    for _ in range(rounds):
        with TemporaryDirectory(dir=folder) as drive:
            for name, call in calls(params_of(count, torch.bfloat16), Path(drive)):
                found[TORCH].append(taken(theirs.step) / count * 1e6)
                found[name].append(taken(call) / count * 1e6)
    return found


def memory(count: int, folder: Path) -> float:
    """Return bytes of Python's memory that the optimizer takes for each tensor, behind its second step."""
    params = params_of(count, torch.bfloat16)
    with TemporaryDirectory(dir=folder) as drive:
        tracemalloc.start()
        named = calls(params, Path(drive))
        for _ in range(2):
            next(named)[1]()
        taken_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for _ in named:
            pass
    return taken_bytes / count


def main() -> None:
    """Print a table for each count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drive", type=Path)
    parser.add_argument("--count", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for count in options.count:
        found = measured(count, options.rounds, options.drive)
        theirs = median(found[TORCH])
        rows = [
            {
                "call": name,
                "us a tensor": f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})",
                "beside torch's step": f"{median(values) / theirs:.2f}",
            }
            for name, values in found.items()
        ]
        notes = [f"Python's memory: {memory(2000, options.drive):.0f} bytes a tensor"]
        sys.stdout.write(
            page(f"{count:,} tensors of {NUMEL} elements", environment([options.drive]), rows, notes) + "\n"
        )


if __name__ == "__main__":
    main()
