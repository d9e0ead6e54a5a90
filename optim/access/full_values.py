"""Read and set one parameter's full values, wherever its pieces are, for debugging."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from nvme_offload.offload._torch_private import local_tensor, shard_offsets, sharded_like
from nvme_offload.offload.warn import door
from ..layout.flat import PartitionStandIn
from ..ranks.collective import on_every_rank, reachable
from ..state.body import StateBody, body_of
from ..state.condition import Need
from ..state.table import ParamRecord, step_entry
from ..tiers.parts import OnePart, drop_gathered, parts_of, split_shard
from .entries import read_entries, set_entries

T = TypeVar("T")


@door
@torch.no_grad()
def get_full_param(param: torch.Tensor) -> torch.Tensor:
    """Return the whole fp32 value of a parameter of an `OffloadOptimizer`, its master weights. Every rank must call it.

    Returns:
        A copy, fp32, on the CPU, in the parameter's global shape, the same on every rank. A frozen 16-bit parameter has
        no master weights: the copy has its dtype, and its bits.

    Raises:
        ValueError: it is no parameter of an open `OffloadOptimizer`.
        SwapIOError: it could not be read from its tier, on any rank.
    """
    body, record = owner_of(param, "get_full_param")
    if isinstance(parts_of(param), OnePart):
        return _gathered(param, param.dtype)
    if "master" in record.entry_names:
        return _gathered_entry(param, body, record.index, "master")
    return _gathered(param)


@door
@torch.no_grad()
def set_full_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set the whole value of a parameter: master weights and what is computed with. Every rank must call it.

    Args:
        param: of an `OffloadOptimizer`.
        value: in the parameter's global shape, the same on every rank; taken as fp32. A frozen 16-bit parameter takes
            the bits of a value in its dtype, and rounds any other.

    Raises:
        ValueError: it is no such parameter, or the value has another shape. Nothing was changed.
        SwapIOError: it could not be written to its tier.
    """
    body, record = owner_of(param, "set_full_param")
    set_param_part(param, body, record, _own_part(param, value, "set_full_param"))


def set_param_part(param: torch.Tensor, body: StateBody, record: ParamRecord, part: torch.Tensor) -> None:
    """Set this rank's part of a parameter: master weights and what is computed with."""
    has_state = record.is_placed or split_shard(param) is None  # one frozen so far has all of its parts itself
    if has_state and "master" in record.entry_names:
        set_entries(body, {record.index: {"master": part.float()}})
    else:
        with body.at_rest():
            body.check(Need.PARAMS)
            local_tensor(param).copy_(part)
        drop_gathered(param)


@door
@torch.no_grad()
def get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the whole gradient of a parameter, as in ``p.grad`` now (under fp16 scaled). Every rank must call it.

    Returns:
        A copy, fp32, on the CPU, in the parameter's global shape; None where there is no gradient.

    Raises:
        ValueError: it is no parameter of an open `OffloadOptimizer`.
        SwapIOError: it could not be read from its tier, on any rank.
    """
    owner_of(param, "get_full_grad")
    if param.grad is None:
        return None
    local = local_tensor(param.grad)
    if not isinstance(local, PartitionStandIn):
        return _gathered(param.grad)
    assert isinstance(param, DTensor)
    return _gathered(sharded_like(_on_ranks_of(param, local.partition.copy), param))


@door
@torch.no_grad()
def set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set the whole gradient of a parameter that has one, in the dtype that it has. Every rank must call it.

    Raises:
        ValueError: it is no parameter of an open `OffloadOptimizer`, has no gradient, or the value has another shape.
        SwapIOError: it could not be read from its tier, where others of its block are kept.
    """
    owner_of(param, "set_full_grad")
    if param.grad is None:
        raise ValueError("set_full_grad: the parameter has no gradient; call it between backward and step")
    set_grad_part(param.grad, _own_part(param, value, "set_full_grad"))


def set_grad_part(grad: torch.Tensor, part: torch.Tensor) -> None:
    """Set this rank's part of a gradient, wherever it is."""
    local = local_tensor(grad)
    if isinstance(local, PartitionStandIn):
        local.partition.set(part)
    else:
        local.copy_(part)


@door
@torch.no_grad()
def get_full_optimizer_state(param: torch.Tensor, name: str) -> torch.Tensor:
    """Return the whole of a state of a parameter, as ``exp_avg``, or its ``step``. Every rank must call it.

    Returns:
        A copy, fp32, on the CPU, in the parameter's global shape; of ``step`` a scalar, fp64 beyond 2**24.

    Raises:
        ValueError: it is no parameter of an open `OffloadOptimizer`, or has no such state.
        SwapIOError: it could not be read from its tier, on any rank.
    """
    body, record = owner_of(param, "get_full_optimizer_state")
    check_state_name(record, name, "get_full_optimizer_state")
    if name == "step":
        with body.at_rest():
            return step_entry(record.steps)
    return _gathered_entry(param, body, record.index, name)


@door
@torch.no_grad()
def set_full_optimizer_state(param: torch.Tensor, name: str, value: torch.Tensor) -> None:
    """Set the whole of a state of a parameter, as ``exp_avg``, or its ``step``. Every rank must call it.

    Raises:
        ValueError: it is no parameter of an open `OffloadOptimizer`, has no such state, or the value has another shape.
        SwapIOError: it could not be written to its tier.
    """
    body, record = owner_of(param, "set_full_optimizer_state")
    check_state_name(record, name, "set_full_optimizer_state")
    part = value if name == "step" else _own_part(param, value, "set_full_optimizer_state")
    set_entries(body, {record.index: {name: part}})


def owner_of(param: torch.Tensor, caller: str) -> tuple[StateBody, ParamRecord]:
    """Return the state that a parameter belongs to, and its record there; ValueError if there is none."""
    body = body_of(param) if isinstance(param, torch.Tensor) else None
    record = body.table.find(param) if body is not None else None
    if body is None or record is None:
        what = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
        raise ValueError(
            f"{caller}: {what} is no parameter of an OffloadOptimizer that is still there; after an evaluation "
            "FSDP2 may show gathered copies in their place: take the parameter from optimizer.param_groups, or call "
            "reshard() on the module that holds it"
        )
    body.check_usable()
    return body, record


def check_state_name(record: ParamRecord, name: str, caller: str) -> None:
    """Raise ValueError for what is no state of a parameter."""
    known = record.entry_names
    if name not in known:
        raise ValueError(f"{caller}: {name!r} is no optimizer state of this parameter; it has {', '.join(known)}")


def _own_part(param: torch.Tensor, value: torch.Tensor, caller: str) -> torch.Tensor:
    if isinstance(value, DTensor):
        raise ValueError(
            f"{caller}: needs a whole tensor of shape {tuple(param.shape)}, not a DTensor, of which each rank has a "
            "part: give value.full_tensor(), on every rank"
        )
    if not isinstance(value, torch.Tensor) or value.shape != param.shape:
        found = f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{caller}: needs a whole tensor of shape {tuple(param.shape)}, not {found}")
    part = value.detach()
    if isinstance(param, DTensor):
        for dim, (start, length) in enumerate(zip(shard_offsets(param), local_tensor(param).shape, strict=True)):
            part = part.narrow(dim, start if length else 0, length)
    return part


def _gathered_entry(param: torch.Tensor, body: StateBody, index: int, name: str) -> torch.Tensor:
    return _gathered(_on_ranks_of(param, lambda: read_entries(body, {index: (name,)}))[index][name])


def _on_ranks_of(param: torch.Tensor, read: Callable[[], T]) -> T:
    """Run `read` on every rank that has a part of `param`: if it fails on one, no other begins to gather."""
    groups = param.device_mesh.get_all_groups() if isinstance(param, DTensor) else []
    return on_every_rank(read, *groups) if groups else read()


def _gathered(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    whole = tensor.detach()
    whole = reachable(whole).full_tensor() if isinstance(whole, DTensor) else whole
    return whole.cpu().to(dtype).clone()
