"""The bytes and the memory of a step are measured, in each order of its micro-batches, with everything on NVMe."""

import hashlib
import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import torch
import typer

from nvme_offload import OffloadConfig, initialize
from nvme_offload.optim.telemetry.stats import OptimizerStats
from nvme_offload.perf.experiments.durable import runs_removed, unused_name
from nvme_offload.perf.measure.command_line import Folder, SaveTo
from nvme_offload.perf.measure.experiment import Row, run_experiment
from nvme_offload.perf.measure.machine import peak_resident_bytes, reset_peak_resident_bytes, storage_bytes
from nvme_offload.perf.measure.sections import section
from nvme_offload.perf.measure.training import layered_model

_WARM_STEPS = 2
_STATE_BYTES, _DURABLE_BYTES = 11, 24
_LEAST_BUFFER = 1 << 20


def micro_batches(
    path: Folder,
    count: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 8,
    layers: Annotated[int, typer.Option(min=4, help="Layers, each of 8 x width^2 parameters.")] = 48,
    width: Annotated[int, typer.Option(min=64, help="Width of the model.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 3,
    order: Annotated[list[str] | None, typer.Option(help="micro_batch_order; repeat it. By default both.")] = None,
    in_backward: Annotated[bool, typer.Option(help="Update blocks in backward, without clipping.")] = False,
    rewrite_every: Annotated[int, typer.Option(min=0, help="Make the run durable with this period; 0: it is not.")] = 0,
    save_to: SaveTo = None,
) -> None:
    """Count the bytes of a step with parameters, gradients and state on NVMe, block by block and one by one."""
    numel = 8 * width**2
    held = _STATE_BYTES if not rewrite_every else _DURABLE_BYTES
    state: dict[str, Any] = {"buffer_count": 2, "staging_budget": 2 * max(held * numel, _LEAST_BUFFER)}
    more: dict[str, Any] = {"gradient_accumulation_steps": count, "gradient_clipping": 1.0, "bf16": {"enabled": True}}
    if in_backward:
        more |= {"overlap_step": "backward", "gradient_clipping": 0.0, "skip_non_finite": False}

    def outcomes() -> Iterator[Row]:
        for each in order or ("horizontal", "vertical"):
            torch.manual_seed(0)
            batches = torch.randn(count, tokens, width)
            lasts = {"durable": unused_name(), "rewrite_every": rewrite_every} if rewrite_every else {}
            config = section(path, state={**state, **lasts}, params=2, grads=2, micro_batch_order=each, **more)
            asked = OffloadConfig.of(config)
            yield measured(f"{each}, {count}", asked, layers, width, batches, steps)

    title = "Bytes per parameter and step by the order of micro-batches, everything on NVMe"
    with runs_removed(path):
        run_experiment("micro-batches", title, outcomes(), path=path, save_to=save_to)


def measured(name: str, config: OffloadConfig, layers: int, width: int, batches: torch.Tensor, steps: int) -> Row:
    """Train a new model with micro-batches [count, tokens, width]; count bytes per parameter and step.

    A step is counted from the end of its first forward to that of the next step's, when no update is left to be done.
    The first steps do not count.
    """
    with initialize(layered_model(layers, width), config) as engine:
        optimizer, ends = engine.optimizer, list[tuple[float, tuple[int, int] | None, OptimizerStats]]()

        def loss_of(batch: torch.Tensor) -> torch.Tensor:
            loss = engine(batch).float().square().mean()
            if batch.data_ptr() == batches.data_ptr():
                optimizer.synchronize()
                ends.append((time.perf_counter(), storage_bytes(), optimizer.stats()))
            return loss  # type: ignore[no-any-return]

        for number in range(_WARM_STEPS + steps + 1):
            engine.accumulate(loss_of, batches)
            engine.step()
            if number == _WARM_STEPS:
                reset_peak_resident_bytes()
        (_, before, stats), (_, after, now) = ends[_WARM_STEPS], ends[-1]
        elements = steps * sum(param.numel() for param in engine.parameters())
        digest = hashlib.sha256()
        for _, value in engine.weights("fp32"):
            digest.update(value.numpy().tobytes())
    if before is None or after is None:
        raise RuntimeError("the kernel does not count here what the block layer moves: see proc(5), /proc/pid/io")
    moved = {"read": after[0] - before[0], "written": after[1] - before[1]}
    kinds = ("param_bytes_read", "param_bytes_written", "grad_bytes_read", "grad_bytes_written")
    moved |= {kind: getattr(now, kind) - getattr(stats, kind) for kind in kinds}
    each = {kind: count / elements for kind, count in moved.items()}
    shown = {"order, micro-batches": name, **{kind.replace("_bytes", ""): f"{each[kind]:.2f}" for kind in each}}
    more = {
        "seconds": median(after - before for (before, *_), (after, *_) in pairwise(ends[_WARM_STEPS:])),
        "peak_bytes": peak_resident_bytes(),
        "digest": digest.hexdigest()[:12],
    }
    shown |= {"seconds": f"{more['seconds']:.2f}", "weights": str(more["digest"])}
    return Row(shown, {**each, **more})
