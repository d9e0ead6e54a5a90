"""The child process of one contender: how it trains; bf16 compute over fp32 masters, AdamW, clipping at 1.0."""

import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nvme_offload import initialize
from nvme_offload.perf.experiments.gpt import CONTEXT, ByteGPT, batches, load_corpus, parse_size
from nvme_offload.perf.measure.child import Send
from nvme_offload.perf.measure.machine import (
    moved_since,
    peak_resident_bytes,
    reset_peak_resident_bytes,
    storage_bytes,
    version_of,
)
from nvme_offload.perf.measure.sections import MODES, section

SEED = 0
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIPPING = 1.0
SUBGROUP = 2**24  # elements of a subgroup where state moves, so that a step has about sixteen


@dataclass(frozen=True, kw_only=True)
class Order:
    """One child process is to do this."""

    contender: str
    package: str | None
    size: str  # layers and width of the model, as `16x1024`
    tokens: int  # tokens of one iteration
    threads: int
    swap: str  # folder on the drive
    weights: str  # file for the master weights at the end


@dataclass(frozen=True)
class Ended:
    """The child saw this of itself, the first iteration left out."""

    iterations: int
    peak_bytes: int  # most resident memory while it trained
    moved: tuple[int, int] | None  # bytes read and written, as the kernel counts them


def work(told: Iterator[Any], send: Send) -> None:
    """Train as told, number by number of iterations, of which each time seconds and losses are sent.

    Nothing runs on between two. At the end of what is told the master weights are written down.
    """
    order: Order = next(told)
    torch.set_num_threads(order.threads)
    model = model_of(order.size)
    data = batches(load_corpus(), order.tokens // CONTEXT, SEED)
    trainer = trainer_of(order.contender, model, Path(order.swap))
    del model
    trainer.iterate(*next(data))  # what is made once is made now
    trainer.settle()
    reset_peak_resident_bytes()
    before, iterations = storage_bytes(), 0
    send("ready", order.package and version_of(order.package))
    for count in told:
        seconds, losses = [], []
        for _ in range(count):
            batch = next(data)
            start = time.perf_counter()
            losses.append(trainer.iterate(*batch))
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        trainer.settle()
        seconds[-1] += time.perf_counter() - start
        iterations += count
        send("turn", (seconds, losses))
    peak, moved = peak_resident_bytes(), moved_since(before)
    torch.save({name: weight.clone() for name, weight in trainer.weights()}, order.weights)
    trainer.close()
    send("ended", Ended(iterations, peak, moved))


def model_of(size: str) -> ByteGPT:
    """Make the model of the demo, in fp32, with the same values each time; it computes in bf16."""
    torch.manual_seed(SEED)
    return ByteGPT(parse_size(size), CONTEXT, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A model in training."""

    iterate: Callable[[Tensor, Tensor], float]  # does one whole iteration with inputs and targets; returns the loss
    weights: Callable[[], Iterator[tuple[str, Tensor]]]  # gives names and fp32 master weights, one after the other
    settle: Callable[[], None] = lambda: None  # waits until nothing runs on behind the latest iteration
    close: Callable[[], None] = dist.destroy_process_group  # lets everything go


def trainer_of(name: str, model: nn.Module, swap: Path) -> Trainer:
    """The trainer of a contender; `swap` is a folder on the drive."""
    if name in ("ours", "ours-memory"):
        return _ours(model, swap if name == "ours" else None)
    if name == "deepspeed":
        return _deepspeed(model, swap)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    if name == "torchao":
        return _torchao(model)
    return _fsdp2(model, CPUOffloadPolicy(pin_memory=False) if name == "cpu-offload" else OffloadPolicy())


def _section(swap: Path | None, **state: Any) -> dict[str, Any]:
    """Return what ours and DeepSpeed have in common."""
    adamw = {"type": "AdamW", "params": ADAMW}
    common = {"optimizer": adamw, "gradient_clipping": CLIPPING, **MODES["bf16"]}
    return section(swap, state=state, sub_group_size=SUBGROUP, **common)


def _iteration_of(engine: Any) -> Callable[[Tensor, Tensor], float]:
    def iterate(inputs: Tensor, targets: Tensor) -> float:
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return float(loss)

    return iterate


def _ours(model: nn.Module, swap: Path | None) -> Trainer:
    engine = initialize(model, _section(swap))
    return Trainer(
        iterate=_iteration_of(engine),
        weights=lambda: _weights(engine.module),
        settle=engine.optimizer.synchronize,
        close=engine.close,
    )


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


def _fsdp2(model: nn.Module, offload: OffloadPolicy) -> Trainer:
    """Every block a unit of its own, as `initialize` does it; shards and gradients in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for unit in [*model.get_submodule("blocks").children(), model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return _plain(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), clips=True)


def _torchao(model: nn.Module) -> Trainer:
    """Its optimizer takes every gradient off the device as soon as it is there, and so cannot clip."""
    of = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return _plain(model, of(model.parameters(), torch.optim.AdamW, fused=True, **ADAMW), clips=False)


def _deepspeed(model: nn.Module, swap: Path) -> Trainer:
    """With what makes it quickest here: both directions pipelined, as many buffers as that needs, deep queues."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    deepspeed = importlib.import_module("deepspeed")
    whole = importlib.import_module("deepspeed.utils").safe_get_full_fp32_param
    pipelined = {"pin_memory": False, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    aio = {"block_size": 2**20, "queue_depth": 32, "single_submit": False, "overlap_events": True}
    config = {**_section(swap, **pipelined), "train_micro_batch_size_per_gpu": 1, "aio": aio}
    engine = deepspeed.initialize(model=model, config=config)[0]
    return Trainer(
        iterate=_iteration_of(engine),
        weights=lambda: ((name, whole(param)) for name, param in engine.module.named_parameters()),
    )


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The master weights on this one rank."""
    for name, param in model.named_parameters():
        value = param.detach()
        yield name, (value.full_tensor() if isinstance(value, DTensor) else value).float()
