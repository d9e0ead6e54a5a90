"""How each contender trains: bf16 compute over fp32 master weights, AdamW, clipping at 1.0, one process."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

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


class Trainer(Protocol):
    """A model in training."""

    def iterate(self, inputs: Tensor, targets: Tensor) -> float:
        """One whole iteration; returns the loss."""

    def settle(self) -> None:
        """Wait until nothing runs on behind the latest iteration."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and fp32 master weights, one after the other."""

    def close(self) -> None:
        """Let everything go."""


def trainer_of(name: str, model: nn.Module, swap: Path) -> Trainer:
    """The trainer of a contender; `swap` is a folder on the drive."""
    if name in ("ours", "ours-memory"):
        return _Ours(model, swap if name == "ours" else None)
    if name == "deepspeed":
        return _DeepSpeed(model, swap)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    if name == "torchao":
        return _torchao(model)
    return _fsdp2(model, CPUOffloadPolicy(pin_memory=False) if name == "cpu-offload" else OffloadPolicy())


class _Ours:
    def __init__(self, model: nn.Module, swap: Path | None) -> None:
        on = {"device": "nvme", "nvme_path": str(swap)} if swap else {"device": "cpu"}
        section = {
            "zero_optimization": {"stage": 3, "sub_group_size": SUBGROUP, "offload_optimizer": on},
            "optimizer": {"type": "AdamW", "params": ADAMW},
            "bf16": {"enabled": True},
            "gradient_clipping": CLIPPING,
        }
        self._engine = initialize(model, section)

    def iterate(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self._engine(inputs, targets)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss)

    def settle(self) -> None:
        self._engine.optimizer.synchronize()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self._engine.module.named_parameters():
            yield name, _whole(param)

    def close(self) -> None:
        self._engine.close()


class _Torch:
    """A loop in plain PyTorch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, clips: bool) -> None:
        self._model = model
        self._optimizer = optimizer
        self._clips = clips

    def iterate(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self._model(inputs, targets)
        loss.backward()
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIPPING)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss)

    def settle(self) -> None:
        pass

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self._model.named_parameters():
            yield name, _whole(param)

    def close(self) -> None:
        dist.destroy_process_group()


def _fsdp2(model: nn.Module, offload: OffloadPolicy) -> _Torch:
    """Every block a unit of its own, as `initialize` does it; shards and gradients in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for unit in [*model.get_submodule("blocks").children(), model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return _Torch(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), clips=True)


def _torchao(model: nn.Module) -> _Torch:
    """Its optimizer takes every gradient off the device as soon as it is there, and so cannot clip."""
    of = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return _Torch(model, of(model.parameters(), torch.optim.AdamW, fused=True, **ADAMW), clips=False)


class _DeepSpeed:
    """With what makes it quickest here: both directions pipelined, as many buffers as that needs, deep queues."""

    def __init__(self, model: nn.Module, swap: Path) -> None:
        os.environ.update(DS_ACCELERATOR="cpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        deepspeed = importlib.import_module("deepspeed")
        self._whole = importlib.import_module("deepspeed.utils").safe_get_full_fp32_param
        offload = {
            "device": "nvme",
            "nvme_path": str(swap),
            "pin_memory": False,
            "buffer_count": 12,
            "pipeline_read": True,
            "pipeline_write": True,
        }
        section = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "sub_group_size": SUBGROUP, "offload_optimizer": offload},
            "aio": {"block_size": 2**20, "queue_depth": 32, "single_submit": False, "overlap_events": True},
            "optimizer": {"type": "AdamW", "params": ADAMW},
            "bf16": {"enabled": True},
            "gradient_clipping": CLIPPING,
        }
        self._engine = deepspeed.initialize(model=model, config=section)[0]

    def iterate(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self._engine(inputs, targets)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss)

    def settle(self) -> None:
        pass

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self._engine.module.named_parameters():
            yield name, self._whole(param)

    def close(self) -> None:
        dist.destroy_process_group()


def _whole(param: Tensor) -> Tensor:
    """The master weights of a parameter on this one rank."""
    value = param.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).float()
