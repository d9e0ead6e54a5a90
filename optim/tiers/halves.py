"""Sharded parameters of FSDP2 as fp32 tensors in two halves, and their gradients as 16-bit partitions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import (
    fsdp_groups,
    install_extension,
    local_tensor,
    refuse_conversion,
    sharded_like,
)
from nvme_offload.offload.errors import StateError
from nvme_offload.offload.shards.param_tier import ResidentUpper, UnbornUpper, UpperHalf
from nvme_offload.offload.shards.split_tensor import SplitTensor
from nvme_offload.optim.kernels import KernelPool
from nvme_offload.optim.tiers.gatherers import remember_gatherers

ROOT = "the root module"
"""What the block of parameters is called that is in no named part of the model."""


CONVERTED = "of a sharded model would be converted: convert it before it is sharded, and make the optimizer after that"
"""What `refuse_conversion` says."""


@dataclass(eq=False)
class GatherGroup:
    """The split parameters of this rank that FSDP2 gathers together: one block of the tiers."""

    name: str
    """Name of the module that gathers the parameters."""
    params: list[torch.Tensor] = field(default_factory=list)
    """The parameters as the user knows them, frozen ones too."""
    padded_shapes: list[torch.Size] = field(default_factory=list)


class Halves:
    """What all halves have in common: an upper one that FSDP2 gathers, from wherever it is.

    Args:
        owner: the module that gathers them.
        group: what is gathered together.
        upper: the upper half.
    """

    def __init__(self, owner: FSDPModule, group: GatherGroup, upper: UpperHalf) -> None:
        self.owner = owner
        """The module that gathers the parameter."""
        self.group = group
        """The parameters that are gathered together with this one."""
        self.upper = upper
        self.accumulation_dtype: torch.dtype | None = None
        """Dtype of the gradient partition. See `keep_grad_in`."""

    @property
    def device(self) -> torch.device:
        """Device that the upper half is gathered from."""
        return self.upper.device

    @property
    def gathered(self) -> torch.Tensor:
        """The upper half, padded as FSDP2 gathers it."""
        return self.upper.gather()

    def end_gather(self) -> None:
        """Let the upper half go: FSDP2 has copied it."""
        self.upper.end_gather()

    def held(self, *, change: bool) -> AbstractContextManager[torch.Tensor]:
        """The upper half, 1D with the padding, outside a gather; what is done to it with `change` is kept."""
        return self.upper.held(change=change)

    def declared(self, shape: torch.Size) -> torch.Tensor:
        """The upper half without padding, or a stand-in for it."""
        return self.upper.declared(shape)


class ResidentHalves(Halves):
    """The lower half in memory: a parameter between `split_parameters` and the construction of its optimizer.

    A frozen parameter stays like this until it has its first gradient.

    Args:
        values: fp32, this rank's shard; the upper half stays on its device, the lower one comes to host memory.
        padded_shape: shape that FSDP2 gathers, at least as large.
        owner: the module that gathers it.
        kernels: to split and join with.
        group: what is gathered together.
    """

    def __init__(
        self,
        values: torch.Tensor,
        padded_shape: torch.Size,
        owner: FSDPModule,
        kernels: KernelPool,
        group: GatherGroup,
    ) -> None:
        upper = torch.zeros(padded_shape, dtype=torch.bfloat16, device=values.device)
        super().__init__(owner, group, ResidentUpper(upper))
        self.lower = torch.empty(values.numel(), dtype=torch.uint16)
        self._kernels = kernels
        self._shape = values.shape
        self.write(values)

    def read(self) -> torch.Tensor:
        """Both halves joined: a new plain fp32 tensor in the shard's shape."""
        with self.upper.held(change=False) as upper:
            joined = self._kernels.join(upper[: self.lower.numel()].cpu(), self.lower)
        return joined.view(self._shape).to(self.device)

    def write(self, values: torch.Tensor) -> None:
        """Split fp32 values into the halves."""
        with self.upper.held(change=True) as upper:
            kept = upper[: self.lower.numel()]
            on_host = kept if kept.device.type == "cpu" else torch.empty_like(kept, device="cpu")
            self._kernels.split(values.cpu().contiguous().view(-1), out=(on_host, self.lower))
            if on_host is not kept:
                kept.copy_(on_host)
        self.owner.reshard()


class UnbornHalves(Halves):
    """Halves of a parameter that has no value yet: a place for the upper one, and nothing for the lower one.

    A model built on the meta device has them until its optimizer is made; see `optim.birth.birth`.

    Args:
        padded_shape: shape that FSDP2 gathers.
        owner: the module that gathers it.
        group: what is gathered together.
        device: where the upper half will be; None: on the parameter tier. In host memory zeros are promised, which take
            no memory before something else is written there.
    """

    def __init__(
        self, padded_shape: torch.Size, owner: FSDPModule, group: GatherGroup, device: torch.device | None
    ) -> None:
        resident = ResidentUpper(torch.zeros(padded_shape, dtype=torch.bfloat16, device=device)) if device else None
        super().__init__(owner, group, resident or UnbornUpper(padded_shape))

    def read(self) -> torch.Tensor:
        """Raises StateError: there is nothing to read."""
        raise StateError("a parameter of a model that was on meta", "a value", "none: initialize() gives it one")

    def write(self, values: torch.Tensor) -> None:
        """Raises StateError: there is no place for the lower half."""
        raise StateError("a parameter of a model that was on meta", "an optimizer", "none: initialize() makes it")


def split_parameters(model: nn.Module, accumulation_dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Turn FSDP2's fp32 shards into halves, of which only the upper one, bf16, stays in memory.

    Call it after ``fully_shard`` and before the optimizer is made. It changes the parameters that are fp32 and gathered
    in bf16 (``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``), in place; they go on behaving as fp32 tensors, and
    fp32 weights reach the lower half without passing through 16 bits. The reduced gradient of each is kept in
    ``p.grad`` as a partition of `accumulation_dtype`, into which later micro-batches accumulate.

    Args:
        model: a module after ``fully_shard``; all of its parts are searched.
        accumulation_dtype: bf16, fp16 or fp32.

    Returns:
        The model.

    Raises:
        ValueError: no part of the model is managed by FSDP2, or it is still on the meta device.
    """
    kernels = KernelPool(torch.get_num_threads())
    found = False
    for owner, group, records in gather_groups(model):
        found = True
        for record in records:
            if will_split(record) and not isinstance(local_tensor(record.sharded_param), SplitTensor):
                _split(record, owner, kernels, group)
                keep_grad_in(record.sharded_param, accumulation_dtype)
    if not found:
        raise ValueError("split_parameters needs a module after torch.distributed.fsdp.fully_shard")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            refuse_conversion(module, CONVERTED)
    remember_gatherers(model)
    return model


def gather_groups(model: nn.Module) -> Iterator[tuple[FSDPModule, GatherGroup, list[Any]]]:
    """What FSDP2 gathers together: the module that does it, a new group without members, and FSDP2's records."""
    for name, module in model.named_modules():
        for records in fsdp_groups(module):
            assert isinstance(module, FSDPModule)
            yield module, GatherGroup(name or ROOT), records


def will_split(record: Any) -> bool:
    """Whether FSDP2's record is of a parameter that is fp32 and gathered in bf16."""
    return record.mp_policy.param_dtype is torch.bfloat16 and record.sharded_param.dtype is torch.float32


def install_halves(record: Any, local: SplitTensor, install: Callable[[Any, SplitTensor], None]) -> None:
    """Make a shard a split one, and a member of the group of its halves.

    Args:
        record: FSDP2's.
        local: the shard.
        install: how FSDP2 gets it.
    """
    install(record, local)
    assert isinstance(local.halves, Halves)
    local.halves.group.params.append(record.sharded_param)
    local.halves.group.padded_shapes.append(record.padded_sharded_param_size)


def _split(record: Any, owner: FSDPModule, kernels: KernelPool, group: GatherGroup) -> None:
    """Make one fp32 shard two halves."""
    shard = local_tensor(record.sharded_param)
    if shard.device.type not in ("cpu", "cuda"):
        raise ValueError(f"split_parameters: a shard is on {shard.device}; it must be on the CPU or a CUDA device")
    halves = ResidentHalves(shard.detach(), record.padded_sharded_param_size, owner, kernels, group)
    install_halves(record, SplitTensor(halves, shard), install_extension)


def split_shard(leaf: torch.Tensor) -> SplitTensor | None:
    """The split shard of a parameter, if it has one."""
    local = local_tensor(leaf)
    return local if isinstance(local, SplitTensor) else None


def split_halves(leaf: torch.Tensor) -> Halves | None:
    """Where the halves of a parameter are, if it is a split shard."""
    split = split_shard(leaf)
    return split.halves if split is not None and isinstance(split.halves, Halves) else None


def keep_grad_in(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Keep the reduced gradient of a sharded parameter in `dtype`, however FSDP2 hands it over.

    Of one that is frozen too: it may be unfrozen later.
    """
    halves = split_halves(param)
    if halves is not None:
        halves.accumulation_dtype = dtype
    param.grad_dtype = None  # permits a gradient of another dtype than the parameter's

    def to_partition(arrived: torch.Tensor) -> None:
        grad = arrived.grad
        if isinstance(grad, DTensor) and grad.dtype != dtype:
            arrived.grad = sharded_like(local_tensor(grad).to(dtype), grad)

    # torch refuses to exchange a parameter to which there is a weak reference: the hook would be lost.
    to_partition.present = weakref.ref(param)  # type: ignore[attr-defined]
    trainable = param.requires_grad
    param.requires_grad_(True)  # torch takes no such hook otherwise
    param.register_post_accumulate_grad_hook(to_partition)  # type: ignore[no-untyped-call]
    param.requires_grad_(trainable)
