"""Bytes, memory and time of a step are measured, in each order of its micro-batches, with everything on NVMe."""

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
import typer
from torch.utils.checkpoint import checkpoint

from nvme_offload import OffloadConfig, OffloadEngine, initialize
from nvme_offload.offload.units import GiB
from nvme_offload.optim.telemetry.stats import OptimizerStats
from nvme_offload.perf.measure.command_line import Folder, Quads, SaveTo
from nvme_offload.perf.measure.comparison import Case
from nvme_offload.perf.measure.durable_runs import runs_removed, unused_name
from nvme_offload.perf.measure.experiment import Row, run_experiment
from nvme_offload.perf.measure.machine import (
    peak_resident_bytes,
    reset_peak_resident_bytes,
    settled_resident_bytes,
    storage_bytes,
)
from nvme_offload.perf.measure.paced import STANDS_IN_FOR, Pace, paced_drive
from nvme_offload.perf.measure.sections import MODES, section
from nvme_offload.perf.measure.training import SleepingModel, layered_model
from nvme_offload.perf.plan.machine import Drives, Machine
from nvme_offload.perf.plan.placing import Job
from nvme_offload.perf.plan.prediction import Prediction, predict
from nvme_offload.perf.plan.shape import ModelShape

_WARM_STEPS = 2
_STATE_BYTES, _DURABLE_BYTES = 11, 24
_LEAST_BUFFER = 1 << 20
Order = Literal["horizontal", "vertical"]
_ORDERS: tuple[Order, ...] = ("horizontal", "vertical")
_RATIOS = (1, 2, 4)  # seconds of the drive over those of computing, of the plain loop
_LIMIT = 1.05  # most that an iteration may take over what the plan says
_ITERATIONS = 4  # measured over a paced drive, after two that are not

micro_batches = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure the orders of micro-batches with everything on NVMe."
)
Count = Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")]
Layers = Annotated[int, typer.Option(min=4, help="Layers, each of 8 x width^2 parameters.")]
Width = Annotated[int, typer.Option(min=64, help="Width of the model.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch.")]


@micro_batches.command("bytes")
def bytes_of_steps(
    path: Folder,
    count: Count = 8,
    layers: Layers = 48,
    width: Width = 128,
    tokens: Tokens = 64,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 3,
    in_backward: Annotated[bool, typer.Option(help="Update blocks in backward, without clipping.")] = False,
    rewrite_every: Annotated[int, typer.Option(min=0, help="Make the run durable with this period; 0: it is not.")] = 0,
    boundaries: Annotated[bool, typer.Option(help="Keep what enters blocks on NVMe, too.")] = False,
    order: Annotated[Order | None, typer.Option(help="Measure one order, whose peak of memory is its own.")] = None,
    mode: Annotated[Literal["bf16", "fp32"], typer.Option(help="Precision.")] = "bf16",
    save_to: SaveTo = None,
) -> None:
    """Count the bytes of a step and its memory, block by block and one by one."""
    numel = 8 * width**2
    held = _STATE_BYTES if not rewrite_every else _DURABLE_BYTES
    state: dict[str, Any] = {"buffer_count": 2, "staging_budget": 2 * max(held * numel, _LEAST_BUFFER)}
    more: dict[str, Any] = {"gradient_accumulation_steps": count, "gradient_clipping": 1.0, **MODES[mode]}
    if in_backward:
        more |= {"overlap_step": "backward", "gradient_clipping": 0.0, "skip_non_finite": False}
    if boundaries:
        more["activations"] = {"device": "nvme", "nvme_path": str(path), "host_budget": "1MiB", "min_bytes": 4096}

    def outcomes() -> Iterator[Row]:
        for each in (order,) if order else _ORDERS:
            torch.manual_seed(0)
            batches = torch.randn(count, tokens, width)
            lasts = {"durable": unused_name(), "rewrite_every": rewrite_every} if rewrite_every else {}
            config = section(path, state={**state, **lasts}, params=2, grads=2, micro_batch_order=each, **more)
            yield measured(f"{each}, {count}", OffloadConfig.of(config), layers, width, batches, steps)

    title = "Bytes per parameter and step by the order of micro-batches, everything on NVMe"
    with runs_removed(path):
        run_experiment("micro-batches", title, outcomes(), path=path, save_to=save_to)


def measured(name: str, config: OffloadConfig, layers: int, width: int, batches: torch.Tensor, steps: int) -> Row:
    """Train a new model with micro-batches [count, tokens, width]; count bytes per parameter and step.

    A step is counted from the end of its first forward to that of the next step's, when no update is left to be done.
    The first steps do not count. The model is born on its tier: free memory of one that was whole would hide a peak.
    """
    with torch.device("meta"):
        model = layered_model(layers, width)
    with initialize(model, config) as engine:
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
                settled_resident_bytes()
                reset_peak_resident_bytes()
        peak = peak_resident_bytes()
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
        "peak_bytes": peak,
        "digest": digest.hexdigest()[:12],
    }
    shown |= {"seconds": f"{more['seconds']:.2f}", "peak MiB": f"{peak / 2**20:.0f}"}
    return Row(shown | {"weights": str(more["digest"])}, {**each, **more})


@micro_batches.command()
def paced(
    counts: Annotated[list[int] | None, typer.Option("--count", help="Micro-batches; by default 1, then 8.")] = None,
    layers: Layers = 16,
    width: Width = 512,
    compute: Annotated[float, typer.Option(help="Seconds that the plain loop computes in an iteration.")] = 0.8,
    save_to: SaveTo = None,
) -> None:
    """Measure over one drive of an exact rate, whose bytes are in memory, beside what `offload plan` says."""
    notes = [
        f"{layers * width**2:,} parameters in {layers} layers that sleep; all tiers share one server, which moves the "
        f"bytes of the plain loop in {', '.join(map(str, _RATIOS))} times the seconds that it computes",
    ]

    def with_verdict(found: list[Row]) -> list[str]:
        within = sum(row.figures["quotient"] <= _LIMIT for row in found)
        return [*notes, f"at most {_LIMIT:g} times the plan: {within} of {len(found)}"]

    with TemporaryDirectory() as folder:
        cells = _paced_cells(Path(folder), counts or (1, 8), (layers, width), compute)
        run_experiment(
            "micro-batches-paced", "Orders of micro-batches over a paced drive", cells, with_verdict, save_to=save_to
        )


def _paced_cells(path: Path, counts: Sequence[int], size: tuple[int, int], compute: float) -> Iterator[Row]:
    layers, width = size
    loops = dict[tuple[int, int], float]()  # seconds of an iteration of the loop, by micro-batches and ratio
    for count in counts:
        loop = OffloadConfig.of(_paced_section(path, "horizontal", count, width))
        moved = _planned(loop, size, 1.0, math.inf).total_traffic
        for order in _ORDERS:
            with paced_drive() as pace:
                torch.manual_seed(0)
                model = SleepingModel(width, layers, "layers")
                config = OffloadConfig.of(_paced_section(path, order, count, width))
                with initialize(model, config) as engine:
                    batches = [model.sample] * count
                    own = _iterations(engine, batches, 2)
                    model.compute_for(max(0.0, compute - own) / count)
                    for ratio in _RATIOS:
                        rate = (moved.read + moved.written) / (ratio * compute)
                        row = _paced_row(engine, batches, pace, rate, partial(_planned, config, size))
                        seconds = row.figures["seconds"]
                        beside = seconds / loops.setdefault((count, ratio), seconds)
                        name = {"order, micro-batches, I/O : compute": f"{order}, {count}, {ratio}"}
                        yield Row(
                            {**name, **row.shown, "of the loop": f"{beside:.2f}"}, {**row.figures, "loop": beside}
                        )


def _paced_row(engine: OffloadEngine, batches: Sequence[torch.Tensor], pace: Pace, rate: float, planned: Any) -> Row:
    pace.rate = math.inf
    computing = _iterations(engine, batches, 2)
    pace.rate = rate
    seconds, prediction = _iterations(engine, batches, _ITERATIONS), planned(computing, rate)
    bound = prediction.time.seconds
    shown = {"computing s": f"{computing:.3f}", "iteration s": f"{seconds:.3f}", "plan s": f"{bound:.3f}"}
    figures = {"computing": computing, "seconds": seconds, "plan": bound, "quotient": seconds / bound}
    return Row(shown | {"quotient": f"{seconds / bound:.3f}"}, figures)


def _paced_section(path: Path, order: str, count: int, width: int) -> dict[str, Any]:
    more = {"gradient_accumulation_steps": count, "gradient_clipping": 1e3, "micro_batch_order": order}
    more |= {"aio": {"engine": STANDS_IN_FOR}, **MODES["bf16"]}
    return section(path, state={"buffer_count": 4}, params=4, grads=4, sub_group_size=width**2, **more)


def _planned(config: OffloadConfig, size: tuple[int, int], computing: float, rate: float) -> Prediction:
    """Plan iterations that compute for so many seconds, over a drive of a rate, in layers of one matrix each."""
    layers, width = size
    shape = ModelShape.of_numbers(layers * width**2, layers, width)
    job = Job(shape=shape, config=config, tokens=1, checkpointing=False, baseline_bytes=0)
    operations = (8 if job.computes_again else 6) * shape.numel * job.micro_batches
    drives = Drives(read=rate, write=rate, mixed=rate)
    machine = Machine(host_memory=64 * GiB, drives=drives, flops=operations / computing, update_rate=1e15)
    return predict(job, machine)


@micro_batches.command()
def turns(path: Folder, layers: Layers = 12, width: Width = 512, quads: Quads = 6, save_to: SaveTo = None) -> None:
    """Measure block by block beside the loop with activation checkpointing, by turns on a real drive."""
    batches = list(torch.randn(8, 128, width))
    with ExitStack() as stack:
        arms = []
        for order in reversed(_ORDERS):
            model = layered_model(layers, width)
            for layer in model if order == "horizontal" else ():
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
            its = section(path, params=4, grads=4, micro_batch_order=order, gradient_accumulation_steps=8)
            engine = stack.enter_context(initialize(model, {**its, **MODES["bf16"], "gradient_clipping": 1.0}))
            arms.append(partial(_iterations, engine, batches, 1, 1))
        found = Case(name="8 micro-batches of 128 tokens", ours=arms[0], reference=arms[1]).measure(quads)
        title, notes = "Block by block beside the loop with checkpointing", [f"{layers} layers of {8 * width**2:,}"]
        run_experiment("micro-batches-turns", title, found, lambda found: notes, path=path, save_to=save_to)


def _iterations(engine: OffloadEngine, batches: Sequence[torch.Tensor], count: int, before: int = _WARM_STEPS) -> float:
    """Train; give the mean seconds of `count` iterations after some that do not count, and wait for all that runs."""
    moments = []
    for _ in range(before + count):
        engine.accumulate(lambda batch: engine(batch).float().square().mean(), batches)
        engine.step()
        moments.append(time.perf_counter())
    engine.optimizer.synchronize()
    return mean(after - start for start, after in pairwise(moments[before - 1 :]))
