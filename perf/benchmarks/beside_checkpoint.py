"""How long iterations take beside a checkpoint that is written in the background, by turns with and without: A B B A.

python -m nvme_offload.perf.benchmarks.beside_checkpoint FOLDER [--millions 100] [--quads 5] [--share 0.25]
    [--iterations 2] [--compute 0.0]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from nvme_offload import OffloadEngine, initialize
from nvme_offload.perf.benchmarks.durable_bytes import NAME, remove_runs, settle
from nvme_offload.perf.hidden_step.models import SleepingModel
from nvme_offload.perf.hidden_step.training import section

_LAYERS = 24


@dataclass(frozen=True)
class Beside:
    """What a checkpoint costs those who train beside it."""

    share: float
    """Of the time that writing it may take."""
    ratio: float
    """Seconds of iterations beside it over those without: the median of the quads."""
    low: float
    high: float
    seconds: float
    """Of an iteration without, the median."""
    progress: float
    """How much of the checkpoint was written beside them, the median: the rest was not waited for in these seconds."""


def measure(path: Path, *, millions: int, quads: int, share: float, iterations: int, compute: float) -> Beside:
    """Train, and save by turns. A turn begins when everything before it lasts."""
    width = int((millions * 1e6 / _LAYERS) ** 0.5)
    model = SleepingModel(width, _LAYERS, "layers")
    model.compute_for(compute)
    of_run = section("forward", path, sub_group_size=width**2, buffers=4, durable=f"{NAME}{time.time_ns()}")
    ratios, plain, written = [], [], []
    with tempfile.TemporaryDirectory(dir=path) as saved, initialize(model, of_run) as engine:
        batch = model.sample.bfloat16()
        _train(engine, batch, 3)
        for quad in range(quads):
            turns = [(beside, _turn(engine, batch, iterations, share, saved, beside)) for beside in (0, 1, 1, 0)]
            own = {beside: sum(seconds for of, (seconds, _) in turns if of == beside) for beside in (0, 1)}
            ratios.append(own[1] / own[0])
            plain.append(own[0] / (2 * iterations))
            written += [progress for of, (_, progress) in turns if of]
            sys.stderr.write(f"quad {quad + 1} of {quads}: {ratios[-1]:.3f}\n")
    median = statistics.median
    return Beside(share, median(ratios), min(ratios), max(ratios), median(plain), median(written))


def _turn(
    engine: OffloadEngine, batch: torch.Tensor, iterations: int, share: float, saved: str, beside: int
) -> tuple[float, float]:
    if beside:
        engine.save_checkpoint(saved, "newest", background=True, share=share)
    seconds = _train(engine, batch, iterations)
    progress = engine.optimizer.stats().checkpoint_progress
    engine.wait_for_checkpoint()
    settle(engine.optimizer)
    return seconds, 1.0 if progress is None else progress


def _train(engine: OffloadEngine, batch: torch.Tensor, iterations: int) -> float:
    start = time.perf_counter()
    for _ in range(iterations):
        engine.backward(nn.functional.mse_loss(engine(batch), batch))
        engine.step()
    engine.optimizer.synchronize()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the ratio as JSON. Run and checkpoints are removed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--quads", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--iterations", type=int, default=2, help="of a turn")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of each iteration without the processor")
    given = vars(parser.parse_args(arguments))
    folder = given.pop("folder")
    found = measure(Path(folder), **given)
    remove_runs(folder)
    sys.stdout.write(json.dumps(asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
