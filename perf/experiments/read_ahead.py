"""How much of the reading of parameters is hidden: one training with read-ahead and one without, on one drive."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer

from nvme_offload import OffloadEngine, initialize
from nvme_offload.perf.measure.command_line import Folder, SaveTo
from nvme_offload.perf.measure.experiment import Column, Experiment, Figures
from nvme_offload.perf.measure.models import layered_model


@dataclass(frozen=True)
class Waiting(Figures):
    """What one training did for its parameters, from its second step on."""

    name: str
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

    COLUMNS = (
        Column("", "name"),
        Column("reads", "reads"),
        Column("ahead", "reads_ahead"),
        Column("for nothing", "reads_unused"),
        Column("uses", "uses"),
        Column("waited s", "wait_seconds", ".3f"),
        Column("of that in forward and backward", "wait_in_passes_seconds", ".3f"),
        Column("step s", "step_seconds", ".3f"),
    )
    BESIDES = ("share_ahead",)


def measure(
    path: Path,
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
    nvme = {"device": "nvme", "nvme_path": str(path)}
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
    if dist.is_initialized():
        dist.destroy_process_group()
    return Waiting(
        name="with read-ahead" if read_ahead else "without",
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


def read_ahead(
    path: Folder,
    layers: Annotated[int, typer.Option(min=1, help="Layers, each a block.")] = 8,
    width: Annotated[int, typer.Option(min=1, help="Width of a layer.")] = 1024,
    tokens: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 256,
    steps: Annotated[int, typer.Option(min=2, help="Steps; the first is not counted.")] = 4,
    buffer_count: Annotated[int, typer.Option(min=1, help="Staging buffers of the parameters.")] = 4,
    state: Annotated[Literal["cpu", "nvme"], typer.Option(help="Tier of the optimizer's state.")] = "cpu",
    save_to: SaveTo = None,
) -> None:
    """Measure how much of the reading of parameters is hidden."""
    how: dict[str, Any] = {"layers": layers, "width": width, "tokens": tokens, "steps": steps, "state": state}
    title = f"Reads of parameters, {layers} layers of width {width}, state on {state}"
    Experiment(name="read-ahead", title=title, head=Waiting.head(), path=path, save_to=save_to).run(
        (measure(path, read_ahead=ahead, buffer_count=buffer_count, **how) for ahead in (True, False)), _notes
    )


def _notes(found: list[Waiting]) -> list[str]:
    """Say what is left of the waiting; nothing, where nobody waited because all blocks fit into the buffers."""
    if len(found) < 2 or not found[1].wait_seconds > 0:
        return []
    share = found[0].wait_seconds / found[1].wait_seconds
    return [f"with read-ahead {share:.0%} of the waiting is left"]
