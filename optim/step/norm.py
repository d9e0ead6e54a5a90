"""Compute the global gradient norm from fp64 sums over fixed blocks, combined in index order."""

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from nvme_offload.offload.devices.device import is_host
from ..kernels import KernelPool, ordered_sum
from ..layout.flat import PartitionStandIn, Sharding
from ..layout.master import TILE_NUMEL
from ..ranks.collective import device_of
from ..state.table import ParamTable
from ..updates.work import Fused

_SQUARED_AT_ONCE = 256 * TILE_NUMEL

_NO_GRADIENT = -1.0
"""Stands for the sum of squares of a rank that has no gradient at all."""


def total_norm(
    table: ParamTable,
    grads: Mapping[int, torch.Tensor],
    pool: KernelPool,
    *,
    norm_group: dist.ProcessGroup | None = None,
    found_inf: bool = False,
    known: Mapping[int, torch.Tensor] | None = None,
) -> float | None:
    """Return the 2-norm of all gradients as stored, before any unscaling, over all ranks.

    The sum of squares of every tile of 65536 elements is an fp64 sum in a fixed order, the tiles are added in the
    order of the parameters, and the ranks' sums in the order of ranks. The result depends on the gradients and on how
    they are sharded alone: not on threads, instruction sets or tiers. It is the same number on every rank. Ranks that
    hold copies of a shard (hybrid sharding, or what tensor parallelism leaves whole) count once; what is not finite in
    one of the copies counts on all of them.

    Args:
        table: all parameters; how they are sharded says which ranks' sums belong together.
        grads: this rank's part of each gradient by index of the parameter, 1D fp32, bf16 or fp16.
        pool: kernels for gradients on the CPU. For those on a device, call `sums_from_device` first.
        norm_group: ranks with other parameters whose gradients belong to the same norm (the stages of a pipeline).
        known: tile sums that are taken already, by index.
        found_inf: somebody else found a gradient of this rank that is not finite.

    Returns:
        The norm; infinity or NaN if an element is. None where no rank has any gradient. Only ranks of `norm_group` can
        differ in that: where some ranks of a mesh have a gradient, FSDP2 reduces it on all of them.
    """
    by_sharding: dict[Sharding | None, list[int]] = {}
    for index in grads:
        by_sharding.setdefault(table[index].layout.sharding, []).append(index)
    start = math.inf if found_inf else 0.0
    total = start if grads or found_inf else _NO_GRADIENT
    for sharding, indices in by_sharding.items():
        part = grads if len(by_sharding) == 1 else {index: grads[index] for index in indices}
        own = start + ordered_sum(_sums_of(part, pool, known or {}))
        for group in _groups(sharding, sharded=True).values():
            own = ordered_sum(_gather(own, group))
        total += own
    for group in _groups_with_copies(by_sharding):
        parts = _gather(total, group)
        total = float(parts[torch.argmin(parts.isfinite().to(torch.uint8))])
    if norm_group is not None:
        parts = _gather(total, norm_group)
        parts = parts[parts != _NO_GRADIENT]
        total = ordered_sum(parts) if len(parts) else _NO_GRADIENT
    if total == _NO_GRADIENT:
        return None
    return math.sqrt(total) if total >= 0 else math.nan


def _groups(sharding: Sharding | None, *, sharded: bool) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return process groups, by their ranks, of the dimensions over which a parameter is sharded or replicated."""
    if sharding is None:
        return {}
    mesh, flags = sharding
    groups = [mesh.get_group(dim) for dim, flag in enumerate(flags) if flag == sharded and mesh.size(dim) > 1]
    return {tuple(dist.get_process_group_ranks(group)): group for group in groups}


def _groups_with_copies(shardings: Iterable[Sharding | None]) -> list[dist.ProcessGroup]:
    """Return groups of ranks that hold copies of some parameters: their sums are equal only if the copies are."""
    shardings = list(shardings)
    summed = [_groups(sharding, sharded=True) for sharding in shardings]
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for sharding, own in zip(shardings, summed, strict=True):
        groups |= own | _groups(sharding, sharded=False)
    return [group for ranks, group in groups.items() if not all(ranks in own for own in summed)]


def _gather(own: float, group: dist.ProcessGroup) -> torch.Tensor:
    mine = torch.tensor([own], dtype=torch.float64, device=device_of(group))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts).cpu()


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return the factor that ``torch.nn.utils.clip_grad_norm_`` clips by, in fp64."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def tile_sums(grad: torch.Tensor, pool: KernelPool) -> torch.Tensor:
    """Return sums of squares of the tiles of a flat gradient in host memory, fp64 [tiles] on the CPU."""
    return grad.partition.landed_sums if isinstance(grad, PartitionStandIn) else pool.tile_sq_sums(grad)


def _sums_of(grads: Mapping[int, torch.Tensor], pool: KernelPool, known: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the tile sums of these gradients in their order, fp64. Neighbours share one kernel call."""
    parts: list[torch.Tensor] = []
    unknown: list[torch.Tensor] = []
    for index, grad in grads.items():
        taken = grad.partition.landed_sums if isinstance(grad, PartitionStandIn) else known.get(index)
        if taken is None:
            unknown.append(grad)
            continue
        if unknown:
            parts.append(pool.tile_sq_sums(*unknown))
            unknown = []
        parts.append(taken)
    if unknown:
        parts.append(pool.tile_sq_sums(*unknown))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def sums_from_device(grads: Mapping[int, torch.Tensor], fused: Fused) -> dict[int, torch.Tensor]:
    """Return the tile sums of those gradients that are on a device, by index: fp64 [tiles] on the CPU.

    `fused` kernels give those of the CPU's, bit for bit. Without them their device sums 16 Mi elements at a time in
    an order of its own, which takes 128 MiB for a moment. The host waits for it once.
    """
    sums = {
        index: sums_on_device(grad, fused)
        for index, grad in grads.items()
        if not (isinstance(grad, PartitionStandIn) or is_host(grad.device))
    }
    if not sums:
        return {}
    parts = torch.split(torch.cat(list(sums.values())).cpu(), [len(part) for part in sums.values()])
    return dict(zip(sums, parts, strict=True))


def sums_on_device(grad: torch.Tensor, fused: Fused) -> torch.Tensor:
    """Return the tile sums of a flat gradient on its own device, fp64 [tiles]."""
    if (kernels := fused(grad.device)) is not None:
        sums: torch.Tensor = kernels.tile_sq_sums(grad)
        return sums
    whole = grad.numel() // TILE_NUMEL * TILE_NUMEL
    pieces = torch.split(grad[:whole], _SQUARED_AT_ONCE)
    parts = [piece.view(-1, TILE_NUMEL).double().square_().sum(1) for piece in pieces]
    if whole < grad.numel():
        parts.append(grad[whole:].double().square_().sum().view(1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]
