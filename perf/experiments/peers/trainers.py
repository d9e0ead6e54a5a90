"""How each contender trains: bf16 compute over fp32 master weights, AdamW, clipping at 1.0, one process."""

from __future__ import annotations

import importlib
import os
import socket
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

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIPPING = 1.0
SUBGROUP = 2**24
"""Elements of a subgroup where state moves, so that a step has about sixteen."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A model in training."""

    iterate: Callable[[Tensor, Tensor], float]
    """Does one whole iteration with inputs and targets; returns the loss."""
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    """Gives names and fp32 master weights, one after the other."""
    settle: Callable[[], None] = lambda: None
    """Waits until nothing runs on behind the latest iteration."""
    close: Callable[[], None] = dist.destroy_process_group
    """Lets everything go."""


def trainer_of(name: str, model: nn.Module, swap: Path) -> Trainer:
    """The trainer of a contender; `swap` is a folder on the drive."""
    if name in ("ours", "ours-memory"):
        return _ours(model, {"device": "nvme", "nvme_path": str(swap)} if name == "ours" else {"device": "cpu"})
    if name == "deepspeed":
        return _deepspeed(model, swap)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    if name == "torchao":
        return _torchao(model)
    return _fsdp2(model, CPUOffloadPolicy(pin_memory=False) if name == "cpu-offload" else OffloadPolicy())


def _section(state: dict[str, Any]) -> dict[str, Any]:
    """What ours and DeepSpeed have in common."""
    return {
        "zero_optimization": {"stage": 3, "sub_group_size": SUBGROUP, "offload_optimizer": state},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "bf16": {"enabled": True},
        "gradient_clipping": CLIPPING,
    }


def _iteration_of(engine: Any) -> Callable[[Tensor, Tensor], float]:
    def iterate(inputs: Tensor, targets: Tensor) -> float:
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return float(loss)

    return iterate


def _ours(model: nn.Module, state: dict[str, Any]) -> Trainer:
    engine = initialize(model, _section(state))
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
    state = {
        "device": "nvme",
        "nvme_path": str(swap),
        "pin_memory": False,
        "buffer_count": 12,
        "pipeline_read": True,
        "pipeline_write": True,
    }
    aio = {"block_size": 2**20, "queue_depth": 32, "single_submit": False, "overlap_events": True}
    section = {**_section(state), "train_micro_batch_size_per_gpu": 1, "aio": aio}
    engine = deepspeed.initialize(model=model, config=section)[0]
    return Trainer(
        iterate=_iteration_of(engine),
        weights=lambda: ((name, whole(param)) for name, param in engine.module.named_parameters()),
    )


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The master weights on this one rank."""
    for name, param in model.named_parameters():
        value = param.detach()
        yield name, (value.full_tensor() if isinstance(value, DTensor) else value).float()
