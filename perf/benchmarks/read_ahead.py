"""How much of the reading of parameters is hidden: one training with read-ahead and one without, on one drive.

python -m nvme_offload.perf.benchmarks.read_ahead FOLDER [--layers 8] [--width 1024] [--tokens 256] [--steps 4]
[--state cpu]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from rich.console import Console

from nvme_offload import OffloadEngine, initialize
from nvme_offload.perf.measure.layers import layered_model


@dataclass(frozen=True)
class Waiting:
    """What one training did for its parameters, from its second step on."""

    reads: int
    reads_ahead: int
    reads_unused: int
    uses: int
    wait_seconds: float
    wait_in_step_seconds: float
    """Seconds of waiting in updates. A state in memory is updated faster than some drives move a block in and out."""
    step_seconds: float
    """Time of one step, forward and backward included."""

    @property
    def wait_in_passes_seconds(self) -> float:
        """Seconds of waiting in forward and backward."""
        return self.wait_seconds - self.wait_in_step_seconds

    @property
    def share_ahead(self) -> float:
        """Reads that were started before they were needed, of all reads."""
        return self.reads_ahead / self.reads if self.reads else 1.0


def measure(
    path: str,
    *,
    read_ahead: bool,
    layers: int = 8,
    width: int = 1024,
    tokens: int = 256,
    steps: int = 4,
    state: str = "cpu",
    buffer_count: int = 4,
) -> Waiting:
    """Train a stack of layers with its parameters on NVMe.

    Args:
        path: folder on the drive.
        read_ahead: `zero_optimization.offload_param.read_ahead`.
        layers: how many; each is one block of about 8 x width x width parameters.
        width: of a layer.
        tokens: rows of a batch.
        steps: with the first, which is not counted; at least 2.
        state: tier of the optimizer's state, "cpu" or "nvme".
        buffer_count: staging buffers of the parameters.
    """
    torch.manual_seed(0)
    model = layered_model(layers, width)
    nvme = {"device": "nvme", "nvme_path": path}
    config = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": nvme if state == "nvme" else {"device": state},
            "offload_param": {**nvme, "buffer_count": buffer_count, "read_ahead": read_ahead},
        },
        "bf16": {"enabled": True},
    }
    with initialize(model, config) as engine:
        _train(engine, torch.randn(tokens, width), 1)
        before, start = engine.optimizer.stats(), time.monotonic()
        wait_in_step = _train(engine, torch.randn(tokens, width), steps - 1)
        after, seconds = engine.optimizer.stats(), time.monotonic() - start
    return Waiting(
        reads=after.param_reads - before.param_reads,
        reads_ahead=after.param_reads_ahead - before.param_reads_ahead,
        reads_unused=after.param_reads_unused - before.param_reads_unused,
        uses=after.param_uses - before.param_uses,
        wait_seconds=after.param_wait_seconds - before.param_wait_seconds,
        wait_in_step_seconds=wait_in_step,
        step_seconds=seconds / (steps - 1),
    )


def _train(engine: OffloadEngine, batch: torch.Tensor, steps: int) -> float:
    """Train on one batch; returns the seconds that the updates waited for parameters."""
    waited = 0.0
    for _ in range(steps):
        engine.backward(engine(batch).float().square().mean())
        before = engine.optimizer.stats().param_wait_seconds
        engine.step()
        waited += engine.optimizer.stats().param_wait_seconds - before
    return waited


def _share(part: float, whole: float) -> float | None:
    """Quotient of two times; None where nothing was waited for, as where all blocks fit into the buffers."""
    return part / whole if whole > 0 else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both ways and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="folder on the drive")
    for name, default in (("layers", 8), ("width", 1024), ("tokens", 256), ("steps", 4), ("buffer_count", 4)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--state", choices=("cpu", "nvme"), default="cpu", help="tier of the optimizer's state")
    options = vars(parser.parse_args(arguments))
    if options["steps"] < 2:
        parser.error(f"--steps {options['steps']}: the first step is not counted; write 2 or more")
    ahead, waiting = (measure(read_ahead=read_ahead, **options) for read_ahead in (True, False))
    report = {
        "options": options,
        "with read-ahead": {**asdict(ahead), "share_ahead": ahead.share_ahead},
        "without": asdict(waiting),
        "waiting, of that without": _share(ahead.wait_seconds, waiting.wait_seconds),
        "in forward and backward": _share(ahead.wait_in_passes_seconds, waiting.wait_in_passes_seconds),
    }
    Console().print_json(json.dumps(report))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
