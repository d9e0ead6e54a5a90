"""The child process of one contender: how it trains; bf16 compute over fp32 masters, AdamW, clipping at 1.0."""

import hashlib
import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nvme_offload import initialize
from nvme_offload.offload.devices.device import HOST, is_host, use, wait_for_all
from nvme_offload.optim.telemetry.stats import OptimizerStats, Span
from nvme_offload.optim.telemetry.trace import write_trace
from ...measure.child import Send
from ...measure.machine import (
    moved_since,
    peak_resident_bytes,
    reset_peak_resident_bytes,
    settled_resident_bytes,
    storage_bytes,
    version_of,
)
from ...measure.on_device import copied_by, peak_reserved_bytes, reset_peak_reserved_bytes
from ...measure.sections import MODES, merged, section
from ...measure.trainings import full
from ..gpt import CONTEXT, ByteGPT, batches, load_corpus, parse_size

SEED = 0
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIPPING = 1.0
MICRO_BATCHES = 2  # of a step of the demo
SUBGROUP = 2**24  # elements of a subgroup where state moves, so that a step has about sixteen


OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-int8": {"optimizer": {"params": {"state_dtype": "int8"}}},
    "ours-memory": {},
    "ours-backward": {"overlap_step": "backward", "gradient_clipping": 0.0, "skip_non_finite": False},
    "ours-device": {"device_budget": "1TiB"},
}
"""Contenders of ours, each with the keys of its section beside those that all have."""
_ON_NVME = ("ours", "ours-int8")
_PIPELINED = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
_SUPER = {"super_offload": True, "ratio": 0.9, "cpuadam_cores_perc": 0.8}
DEEPSPEEDS: dict[str, dict[str, Any]] = {
    "deepspeed": {"offload_optimizer": _PIPELINED},
    "zero-offload": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "superoffload": {"offload_optimizer": _SUPER},
}
"""The same of DeepSpeed's, with what makes each quickest: on NVMe both directions pipelined, as many buffers as that
needs, deep queues; the others as their tutorials have them."""


@dataclass(frozen=True, kw_only=True)
class SideOrder:
    """The child process of a contender is to do this; `Side` says who and where."""

    contender: str = ""
    package: str | None = None
    threads: int
    swap: str = ""  # folder on the drive
    weights: str = ""  # file for the master weights at the end
    turn: int = 2  # iterations of a turn


@dataclass(frozen=True, kw_only=True)
class Order(SideOrder):
    """One child process is to train the GPT."""

    size: str  # layers and width of the model, as `16x1024`
    tokens: int  # tokens of one iteration
    device: str = HOST.type  # where the model computes
    keys: dict[str, Any] = field(default_factory=dict)  # in place of those of the section, in the demo
    demo: bool = False
    """Whether ours is looked at closely: a step is two micro-batches, parameters begin in bf16, forward and backward
    compute in fp32 (processors without bf16 instructions take many times as long in bf16), and the file `weights` gets
    the trace of all iterations."""


@dataclass(frozen=True)
class Ended:
    """The child saw this of itself, the first iteration left out."""

    iterations: int
    peak_bytes: int  # most resident memory while it trained
    moved: tuple[int, int] | None  # bytes read and written, as the kernel counts them
    counted: tuple[int, int] = (0, 0)  # the same of optimizer state, as ours counts them
    busy_seconds: float = 0.0  # of the drive meanwhile
    grown_bytes: int = 0  # resident memory after training beyond what was resident before the optimizer was made
    engine: str = ""  # who moved the bytes, and why
    digests: dict[str, str] = field(default_factory=dict)  # SHA-256 of masters and states, in the demo
    device_peak_bytes: int = 0  # most memory of the device that torch's allocator reserved while it trained
    copied: tuple[int, int] | None = None  # bytes of the copies of one iteration, to the device and from it


def work(told: Iterator[Any], send: Send) -> None:
    """Train as told, number by number of iterations, of which each time seconds, losses and figures are sent.

    Nothing runs on between two. At the end of what is told the master weights are written down, or digested.
    """
    order: Order = next(told)
    torch.set_num_threads(order.threads)  # the same in every process: arithmetic is repeatable
    device = torch.device(order.device)
    use(device)
    model = model_of(order.size, in_fp32=order.demo).to(device)
    data = (
        (inputs.to(device), targets.to(device))
        for inputs, targets in batches(load_corpus(), order.tokens // CONTEXT, SEED)
    )
    for inputs, targets in islice(data, 2 * order.demo):  # what a pass takes is no memory of the optimizer's
        model(inputs, targets).backward()
        model.zero_grad()
    before_all = settled_resident_bytes()
    trainer = trainer_of(order, model)
    del model
    ended = train(told, send, trainer, data, device, order.package)
    there = peak_reserved_bytes(device)  # before the profiler has memory of its own
    ended = replace(ended, device_peak_bytes=there, copied=copied_by(device, partial(one_more, trainer, data, device)))
    if order.demo:
        ended.digests.update({name: digest(value) for name, value in trainer.weights()})
        ended = replace(ended, grown_bytes=settled_resident_bytes() - before_all)
    else:
        torch.save({name: weight.clone().cpu() for name, weight in trainer.weights()}, order.weights)
    trainer.close()
    send("ended", ended)


def train(
    told: Iterator[Any],
    send: Send,
    trainer: "Trainer",
    data: Iterator[tuple[Tensor, ...]],
    device: torch.device,
    package: str | None,
) -> Ended:
    """Take the turns that are told; return what was seen until nothing more is told."""
    one_more(trainer, data, device)  # what is made once is made now
    reset_peak_resident_bytes()
    reset_peak_reserved_bytes(device)
    before, iterations = storage_bytes(), 0
    send("ready", package and version_of(package))
    for count in told:
        seconds, losses, figures = [], [], []
        trainer.begin()
        for _ in range(count):
            batch = next(data)
            start = time.perf_counter()
            losses.append(trainer.iterate(*batch))
            seconds.append(time.perf_counter() - start)
            figures.append(trainer.look())
        start = time.perf_counter()
        settle(trainer, device)
        seconds[-1] += time.perf_counter() - start
        iterations += count
        send("turn", (seconds, losses, figures))
    return Ended(iterations, peak_resident_bytes(), moved_since(before), **trainer.sum_up())


def settle(trainer: "Trainer", device: torch.device) -> None:
    """Wait until nothing runs on, on the host or on the device."""
    trainer.settle()
    if not is_host(device):
        wait_for_all(device)


def one_more(trainer: "Trainer", data: Iterator[tuple[Tensor, ...]], device: torch.device) -> None:
    """Do an iteration, and all that runs on behind it."""
    trainer.iterate(*next(data))
    settle(trainer, device)


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of the bytes of a tensor on the CPU."""
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def model_of(size: str, *, in_fp32: bool = False) -> ByteGPT:
    """Make a model in fp32 that computes in bf16, or the other way round; with the same values each time."""
    torch.manual_seed(SEED)
    if in_fp32:
        return ByteGPT(parse_size(size), CONTEXT, torch.float32).bfloat16()
    return ByteGPT(parse_size(size), CONTEXT, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A model in training."""

    iterate: Callable[..., float]  # does one whole iteration with a batch, as inputs and targets; returns the loss
    weights: Callable[[], Iterator[tuple[str, Tensor]]]  # gives names and fp32 master weights, one after the other
    begin: Callable[[], None] = lambda: None  # begins a turn
    look: Callable[[], dict[str, Any]] = dict  # gives figures of the latest iteration
    settle: Callable[[], None] = lambda: None  # waits until nothing runs on behind the latest iteration
    sum_up: Callable[[], dict[str, Any]] = dict  # gives more of `Ended`
    close: Callable[[], None] = dist.destroy_process_group  # lets everything go


def trainer_of(order: Order, model: nn.Module) -> Trainer:
    """The trainer of a contender."""
    name, swap, device = order.contender, Path(order.swap), torch.device(order.device)
    if name in OURS:
        made = merged(_section(swap if name in _ON_NVME else None), OURS[name])
        made |= {"run_log": f"{order.weights}.jsonl"} if order.demo and name == "ours" else {}
        return _in_detail(model, order, made) if order.demo else _ours(model, made)
    if name in DEEPSPEEDS:
        return _deepspeed(model, name, swap, device)
    backend = "gloo" if is_host(device) else None  # of every kind of device its own
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    if name == "torchao":
        return _torchao(model)
    offload = CPUOffloadPolicy(pin_memory=not is_host(device)) if name == "cpu-offload" else OffloadPolicy()
    return _fsdp2(model, offload, device)


def _section(swap: Path | None) -> dict[str, Any]:
    """Return what ours and DeepSpeed have in common."""
    adamw = {"type": "AdamW", "params": ADAMW}
    common = {"optimizer": adamw, "gradient_clipping": CLIPPING, **MODES["bf16"]}
    return section(swap, sub_group_size=SUBGROUP, **common)


def _iteration_of(engine: Any) -> Callable[[Tensor, Tensor], float]:
    def iterate(inputs: Tensor, targets: Tensor) -> float:
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return float(loss)

    return iterate


def _ours(model: nn.Module, section: dict[str, Any]) -> Trainer:
    engine = initialize(model, section)
    return Trainer(
        iterate=_iteration_of(engine),
        weights=lambda: _weights(engine.module),
        settle=engine.optimizer.synchronize,
        close=engine.close,
    )


def _in_detail(model: nn.Module, order: Order, section: dict[str, Any]) -> Trainer:
    """Ours as the demo shows it: two micro-batches a step, with figures of each, and states beside the weights."""
    engine = initialize(model, merged(section, order.keys))
    optimizer, spans, begun = engine.optimizer, set[Span](), list[OptimizerStats]()

    def iterate(inputs: Tensor, targets: Tensor) -> float:
        pairs = zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)
        losses = engine.accumulate(lambda pair: engine(*pair), pairs)
        engine.step()
        return float(torch.stack(losses).mean())

    def look() -> dict[str, Any]:
        spans.update(optimizer.timeline())
        stats, latest = optimizer.stats(), optimizer.stats().iteration
        found = {"ended": time.monotonic(), "norm": stats.total_norm, "step_seconds": stats.step_seconds}
        return found | ({"share": latest.share_of_ideal, "limit": latest.limit} if latest else {})

    def settle() -> None:
        optimizer.synchronize()
        spans.update(optimizer.timeline() if begun else ())  # what ran on behind the last step
        begun[:] = begun or [optimizer.stats()]

    def sum_up() -> dict[str, Any]:
        write_trace(sorted(spans, key=lambda span: span.start_ns), order.weights)
        now, [then] = optimizer.stats(), begun
        counted = now.bytes_read - then.bytes_read, now.bytes_written - then.bytes_written
        busy = now.drive_busy_seconds - then.drive_busy_seconds
        return {"counted": counted, "busy_seconds": busy, "engine": f"{now.engine} ({now.engine_reason})"}

    begin = optimizer.begin_iteration
    made: dict[str, Any] = {"begin": begin, "look": look, "settle": settle, "sum_up": sum_up, "close": engine.close}
    return Trainer(iterate=iterate, weights=lambda: full(engine), **made)


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, *, clips: bool) -> Trainer:
    """A loop in plain PyTorch."""

    def iterate(inputs: Tensor, targets: Tensor) -> float:
        loss = model(inputs, targets)
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return Trainer(iterate=iterate, weights=lambda: _weights(model))


def _fsdp2(model: nn.Module, offload: OffloadPolicy, device: torch.device) -> Trainer:
    """Every block a unit of its own, as `initialize` does it; shards and gradients in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
    for unit in [*model.get_submodule("blocks").children(), model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return _plain(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), clips=True)


def _torchao(model: nn.Module) -> Trainer:
    """Its optimizer takes every gradient off the device as soon as it is there, and so cannot clip."""
    of = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return _plain(model, of(model.parameters(), torch.optim.AdamW, fused=True, **ADAMW), clips=False)


def deepspeed_of(
    model: nn.Module, section: dict[str, Any], device: torch.device = HOST
) -> tuple[Any, Callable[[nn.Parameter], Tensor]]:
    """Return DeepSpeed's engine in a process group of its own, and what gives a parameter's fp32 master."""
    os.environ.update(DS_ACCELERATOR=device.type, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    deepspeed = importlib.import_module("deepspeed")
    aio = {"block_size": 2**20, "queue_depth": 32, "single_submit": False, "overlap_events": True}
    config = {**section, "train_micro_batch_size_per_gpu": 1, "aio": aio}
    engine = deepspeed.initialize(model=model, config=config)[0]
    return engine, importlib.import_module("deepspeed.utils").safe_get_full_fp32_param


def _deepspeed(model: nn.Module, name: str, swap: Path, device: torch.device) -> Trainer:
    """Each of its ways to offload, with the keys of `DEEPSPEEDS`."""
    made = merged(_section(swap if name == "deepspeed" else None), {"zero_optimization": DEEPSPEEDS[name]})
    made["zero_optimization"]["offload_optimizer"]["pin_memory"] = not is_host(device)
    engine, whole = deepspeed_of(model, made, device)
    return Trainer(
        iterate=_iteration_of(engine),
        weights=lambda: ((name, whole(param)) for name, param in engine.module.named_parameters()),
    )


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The master weights on this one rank."""
    for name, param in model.named_parameters():
        value = param.detach()
        yield name, (value.full_tensor() if isinstance(value, DTensor) else value).float()
