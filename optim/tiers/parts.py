"""Hold sharded parameters of FSDP2 as fp32 tensors in parts, and their gradients as partitions.

What is *stored* of a shard between steps is what is gathered; its dtype says what else an fp32 master weight has,
which is the *rest* (`MASTER_DTYPE`): of bf16 the lower half, of fp16 the master itself, of fp32 nothing. The rest is
part of the optimizer's state. An update makes both anew, and so does every write.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from nvme_offload.offload._torch_private import (
    Offered,
    fsdp_groups,
    fsdp_params,
    guard_shards,
    install_extension,
    is_dtensor,
    is_fsdp,
    local_tensor,
    reduce_every_call,
    refuse_conversion,
    sharded_like,
)
from nvme_offload.offload.devices.device import HOST, KINDS, is_device, is_host
from nvme_offload.offload.errors import StateError
from nvme_offload.offload.shards.split_tensor import SplitTensor
from nvme_offload.offload.shards.stored import Padded, ResidentShard, StoredShard, TieredShard
from ..kernels import KernelPool
from ..layout.flat import check_is_no_wrapper
from ..layout.master import FORM_OF_DTYPE, MASTER_DTYPE, TILE_NUMEL

ROOT = "the root module"
"""This is the name of the block of parameters that are in no named part of the model."""

FROZEN = " (frozen)"
"""The name of a block of frozen parameters ends with this."""

COPIED = ", copied"
"""Then its name ends with this, where other frozen parameters beside them are read in place."""

CONVERTED = "of a sharded model would be converted: convert it before it is sharded, and make the optimizer after that"

_DATA = (
    "parameter.data = tensor changes nothing of a sharded parameter: call set_full_param(parameter, tensor) of "
    "nvme_offload on all ranks, or parameter.copy_(other) under torch.no_grad(), with a DTensor of its layout"
)

_OFFLOADED = (
    "split_parameters: the model was sharded with CPUOffloadPolicy, under which FSDP2 copies whole shards to the "
    "device and knows nothing of their parts: call fully_shard without offload_policy"
)


class Storage(NamedTuple):
    """Says how a shard in parts is kept."""

    dtype: torch.dtype
    """The dtype of what is stored: bf16, fp16 or fp32; any for a frozen shard that is kept as it came."""
    accumulate: torch.dtype
    """The dtype of the gradient partition."""


StorageOf = Callable[[Any], Storage | None]
"""It says how to keep the shard of one of FSDP2's records; None: as the tensor that it is."""


@dataclass(eq=False)
class GatherGroup:
    """Parameters of this rank in parts that FSDP2 gathers together: one block of the tiers.

    Those that are frozen when the model is sharded are a group of their own: their block is never written again.
    """

    name: str
    together: object = field(default_factory=object)
    """The same object for those trained and those frozen, which FSDP2 gathers together."""
    params: list[torch.Tensor] = field(default_factory=list)
    """The parameters as the user knows them."""

    @property
    def forms(self) -> list[Padded]:
        """The forms that the parameters are stored in."""
        return [parts.stored.form for parts in self.parts]

    @property
    def parts(self) -> list[ShardParts]:
        """The parts of all parameters."""
        return [parts for leaf in self.params if (parts := parts_of(leaf)) is not None]

    @property
    def device(self) -> torch.device:
        """The device that computes with the parameters, where their gradients arrive."""
        return next((parts.device for parts in self.parts), HOST)

    @property
    def partitions(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        """The parameters that have gradients, and the dtype that those are accumulated in."""
        pairs = zip(self.params, self.parts, strict=True)
        return [(leaf, parts.accumulate) for leaf, parts in pairs if leaf.requires_grad]


class ShardParts(ABC):
    """All parts have something stored, which FSDP2 gathers, wherever it is.

    Args:
        owner: the module that gathers the parameter.
        group: what is gathered together.
        stored: the bytes that a gather takes.
        accumulate: dtype of the gradient partition.
    """

    rest: torch.Tensor | None = None
    """1D, on the CPU, of `MASTER_DTYPE`; None if `stored` says all, as for weights that were always 16 bits, and where
    the optimizer's state has it."""
    is_in_state = False
    """Whether the optimizer's state has the rest, or will have it from the parameter's birth on."""
    num_writes = 0
    """Writes so far, but for those of the optimizer's state."""

    def __init__(self, owner: Any, group: GatherGroup, stored: StoredShard, accumulate: torch.dtype) -> None:
        self.owner = owner
        self.group = group
        self.stored = stored
        self.accumulate = accumulate

    def store_in(self, stored: StoredShard) -> None:
        """Switch to another place that already has the same bytes."""
        self.stored = stored

    @property
    def device(self) -> torch.device:
        """The device that the parameter is gathered from."""
        return self.stored.device

    def gathered(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what FSDP2 gathers, padded and, under autocast, rounded. Every gather comes here."""
        return self.stored.gather().to(dtype)

    def offered(self, gathered: torch.Tensor) -> Offered:
        """Return for how long what was gathered is there, if no cast has made a copy of it."""
        stored = self.stored
        if isinstance(stored, ResidentShard):
            return Offered(stays=stored.form.dtype is gathered.dtype)
        if isinstance(stored, TieredShard) and is_host(stored.device) and _is_at(stored.view(), gathered):
            return Offered(lend=stored.lend)
        return Offered()

    def end_gather(self) -> None:
        """Let what was gathered go: FSDP2 has copied it."""
        self.stored.end_gather()

    def between_steps(self) -> AbstractContextManager[None]:
        """Hold what is stored as the latest step leaves it."""
        return nullcontext()

    def held(self, *, change: bool) -> AbstractContextManager[torch.Tensor]:
        """Hold what is stored, 1D with the padding, outside a gather; with `change`, changes are kept."""
        return self.stored.held(change=change)

    def declared(self, shape: torch.Size) -> torch.Tensor:
        """Return what is stored, without padding, or a stand-in for it."""
        return self.stored.declared(shape)

    @abstractmethod
    def read(self) -> torch.Tensor:
        """Return the parts joined: a new plain fp32 tensor in the shard's shape."""

    @abstractmethod
    def write(self, values: torch.Tensor) -> None:
        """Divide fp32 values of the shard's shape among the parts."""


class OwnParts(ShardParts):
    """Parts with the rest in memory: before the optimizer is made, and of a frozen parameter for good.

    Args:
        values: this rank's shard; shape and, of one that is not on meta, values.
        stored: full of zeros.
    """

    def __init__(
        self,
        values: torch.Tensor,
        stored: StoredShard,
        owner: Any,
        group: GatherGroup,
        accumulate: torch.dtype,
        kernels: KernelPool,
    ) -> None:
        super().__init__(owner, group, stored, accumulate)
        self._kernels = kernels
        self._shape = values.shape
        if not values.is_meta:
            self.write(values)

    def read(self) -> torch.Tensor:
        """Return the parts joined: a new plain fp32 tensor in the shard's shape."""
        with self.stored.held(change=False) as flat:
            joined = self._kernels.joined(flat[: self._shape.numel()].cpu(), self.rest)
        return joined.view(self._shape).to(self.device)

    def write(self, values: torch.Tensor) -> None:
        """Divide fp32 values among the parts."""
        self.num_writes += 1
        with self.stored.held(change=True) as flat:
            kept = flat[: self._shape.numel()]
            on_host = kept if is_host(kept.device) else torch.empty_like(kept, device="cpu")
            rest_dtype = MASTER_DTYPE[FORM_OF_DTYPE[kept.dtype]]
            rest = None if rest_dtype is None else torch.empty(kept.numel(), dtype=rest_dtype, device="cpu")
            self._kernels.divide(values.cpu().contiguous().view(-1), on_host, rest)
            if on_host is not kept:
                kept.copy_(on_host)
            self.rest = None if rest is None or _says_all(on_host, rest) else rest
        self.owner.reshard()


def _says_all(stored: torch.Tensor, rest: torch.Tensor) -> bool:
    """Return whether masters are no finer than what is stored of them."""
    if rest.dtype is torch.uint16:
        words = rest.view(torch.int16)
        return not (words[:TILE_NUMEL].any() or words.any())  # of weights that were fp32 the first few say it
    return torch.equal(rest, stored.float())


class OnePart(ShardParts):
    """A frozen parameter, all stored as it came: it may be codes of a quantized base, which no number stands for.

    One in 16 bits is its own master until it is unfrozen.
    """

    def __init__(
        self, values: torch.Tensor, stored: StoredShard, owner: Any, group: GatherGroup, accumulate: torch.dtype
    ) -> None:
        super().__init__(owner, group, stored, accumulate)
        self._shape = values.shape
        if not values.is_meta:
            self.write(values)

    def gathered(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what is stored, padded; in `dtype` where it is in 16 bits. 8 bits go as uint8: gloo knows no fp8."""
        if self.stored.form.dtype in FORM_OF_DTYPE:
            return super().gathered(dtype)
        kept = self.stored.gather()
        return kept.view(torch.uint8) if kept.itemsize == 1 else kept

    def read(self) -> torch.Tensor:
        """Return a copy of the shard, in its own dtype."""
        with self.stored.held(change=False) as flat:
            return flat[: self._shape.numel()].view(self._shape).to(self.device, copy=True)

    def write(self, values: torch.Tensor) -> None:
        """Store other values of the shard's shape and dtype."""
        self.num_writes += 1
        with self.stored.held(change=True) as flat:
            flat[: self._shape.numel()].copy_(values.reshape(-1))
        self.owner.reshard()


class UnbornParts(ShardParts):
    """Parts of a parameter that has no value yet: perhaps a place for what is stored, and nothing for the rest.

    A model built on the meta device has them until its optimizer is made; see `optim.birth.birth`.
    """

    is_in_state = True

    def read(self) -> torch.Tensor:
        """Raise StateError: there is nothing to read."""
        raise StateError("a parameter of a model that was on meta", "a value", "none: initialize() gives it one")

    def write(self, values: torch.Tensor) -> None:
        """Raise StateError: there is no place for the rest."""
        raise StateError("a parameter of a model that was on meta", "an optimizer", "none: initialize() makes it")


def split_parameters(
    model: nn.Module, accumulation_dtype: torch.dtype | None = None, *, fp32_too: bool = False
) -> nn.Module:
    """Turn FSDP2's fp32 shards into parts. Only the part that is gathered stays in memory.

    Call it after ``fully_shard`` and before the optimizer is made. It changes the parameters that are fp32 and gathered
    in 16 bits (``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``, or ``torch.float16``), in place; they go on
    behaving as fp32 tensors, and no bit of an fp32 weight is lost. The reduced gradient of each is kept in ``p.grad``
    as a partition of `accumulation_dtype`, into which later micro-batches accumulate.

    Args:
        model: a module after ``fully_shard``; all of its parts are searched.
        accumulation_dtype: bf16, fp16 or fp32; by default what a parameter is gathered in.
        fp32_too: also shards that are gathered in fp32, which are stored whole. ``offload_param`` and
            ``offload_gradients`` can move parts alone, and parts alone wait for updates behind a step.

    Returns:
        The model.

    Raises:
        ValueError: no part of the model is managed by FSDP2, it is still on the meta device, it was sharded with
            ``CPUOffloadPolicy``, or a parameter is of a class that keeps its values in other tensors.
    """
    for name, param in model.named_parameters():
        check_is_no_wrapper(local_tensor(param), f"split_parameters: {name!r}")

    def storage_of(record: Any) -> Storage | None:
        gathered = record.mp_policy.param_dtype or record.sharded_param.dtype
        if record.sharded_param.dtype is not torch.float32 or (gathered is torch.float32 and not fp32_too):
            return None
        return Storage(gathered, accumulation_dtype or gathered)

    take_apart(model, storage_of)
    reduce_every_call(model)
    return model


def take_apart(model: nn.Module, storage_of: StorageOf) -> None:
    """Do what `split_parameters` does, with the shards for which `storage_of` names a storage."""
    kernels = KernelPool(torch.get_num_threads())
    found = False
    for owner, group, records in gather_groups(model):
        found = True
        for record in records:
            storage, shard = storage_of(record), local_tensor(record.sharded_param)
            if storage is None or isinstance(shard, SplitTensor):
                continue
            if not (is_host(shard.device) or is_device(shard.device)):
                raise ValueError(f"split_parameters: a shard is on {shard.device}; it must be on {KINDS}")
            if record.offload_to_cpu:
                raise ValueError(_OFFLOADED)
            zeros = torch.zeros(record.padded_sharded_param_size, dtype=storage.dtype, device=shard.device)
            stored = ResidentShard(zeros)
            parts: ShardParts
            if shard.dtype is torch.float32:
                parts = OwnParts(shard.detach(), stored, owner, group, storage.accumulate, kernels)
            else:
                parts = OnePart(shard.detach(), stored, owner, group, storage.accumulate)
            install_parts(record, SplitTensor(parts, shard), install_extension)
    if not found:
        raise ValueError("split_parameters needs a module after torch.distributed.fsdp.fully_shard")
    for module in model.modules():
        if is_fsdp(module):
            refuse_conversion(module, CONVERTED)
    remember_gatherers(model)


def gather_groups(model: nn.Module) -> Iterator[tuple[Any, GatherGroup, list[Any]]]:
    """Yield what FSDP2 gathers together: the module that does it, a new group without members, and FSDP2's records.

    Trainable parameters come first, then frozen ones. What several modules gather together comes once.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        for records in fsdp_groups(module):
            if id(records[0]) in seen:
                continue
            seen.update(map(id, records))
            together = object()
            for trainable in (True, False):
                alike = [record for record in records if record.sharded_param.requires_grad is trainable]
                if alike:
                    yield module, GatherGroup((name or ROOT) + ("" if trainable else FROZEN), together), alike


def install_parts(record: Any, local: SplitTensor, install: Callable[[Any, SplitTensor], None]) -> None:
    """Make a shard a split one, in the group of its parts; `install` hands it to FSDP2's `record`."""
    install(record, local)
    assert isinstance(local.parts, ShardParts)
    local.parts.group.params.append(record.sharded_param)
    if local.dtype in FORM_OF_DTYPE:  # others are never trained
        keep_grad_in(record.sharded_param, local.parts.accumulate)


def split_shard(leaf: torch.Tensor) -> SplitTensor | None:
    """Return the split shard of a parameter, if it has one."""
    local = local_tensor(leaf)
    return local if isinstance(local, SplitTensor) else None


def parts_of(leaf: torch.Tensor) -> ShardParts | None:
    """Return the parts of a parameter, if it is a split shard."""
    split = split_shard(leaf)
    return split.parts if split is not None and isinstance(split.parts, ShardParts) else None


def keep_grad_in(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Keep the reduced gradient of a sharded parameter in `dtype`, also if it is frozen now and unfrozen later."""
    param.grad_dtype = None  # permits a gradient of another dtype than the parameter's

    def to_partition(arrived: torch.Tensor) -> None:
        grad = arrived.grad
        if is_dtensor(grad) and grad.dtype != dtype:
            arrived.grad = sharded_like(local_tensor(grad).to(dtype), grad)

    # torch refuses to exchange a parameter to which there is a weak reference: the hook would be lost.
    to_partition.present = weakref.ref(param)  # type: ignore[attr-defined]
    trainable = param.requires_grad
    param.requires_grad_(True)  # torch takes no such hook otherwise
    param.register_post_accumulate_grad_hook(to_partition)  # type: ignore[no-untyped-call]
    param.requires_grad_(trainable)


# Neither attributes of the parameters, which would be copied and pickled with them, nor weak references to them, with
# which `Module.to` cannot exchange a sharded parameter.
_gatherers: dict[int, weakref.ref[Any]] = {}


def remember_gatherers(model: nn.Module) -> None:
    """Note which part of a model gathers which parameter. Call it after ``fully_shard``."""
    for gone in [key for key, known in _gatherers.items() if known() is None]:
        del _gatherers[gone]
    for module in model.modules():
        for record in fsdp_params(module):
            _gatherers[id(record.sharded_param)] = weakref.ref(module)
    guard_shards(lambda param: _gatherer_of(param)[1], _is_own_data, _DATA)


def drop_gathered(param: torch.Tensor) -> None:
    """Free what FSDP2 still holds gathered of a parameter and its neighbours: it has the old value."""
    module, record = _gatherer_of(param)
    if record is not None:
        module.reshard()


def _gatherer_of(param: torch.Tensor) -> tuple[Any, Any]:
    """Return the module that gathers a parameter, and FSDP2's record of it; two times None for any other tensor."""
    known = _gatherers.get(id(param))
    module = known() if known else None
    records = fsdp_params(module) if module is not None else ()
    return next(((module, record) for record in records if record.sharded_param is param), (None, None))


def _is_own_data(param: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor is the shard that it would be assigned to, as ``param.data`` is."""
    own, other = local_tensor(param), local_tensor(value) if is_dtensor(value) else value
    if isinstance(own, SplitTensor):
        return isinstance(other, SplitTensor) and other.parts is own.parts and other.shape == own.shape
    return own.shape == other.shape and own.data_ptr() == other.data_ptr()


def _is_at(view: torch.Tensor, gathered: torch.Tensor) -> bool:
    try:
        return view.data_ptr() == gathered.data_ptr()
    except RuntimeError:
        return False  # a transform of torch.func has wrapped it: it has no memory of its own
