"""Updates in torch operators, for rules without a native kernel: the same masters, states and checks, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nvme_offload.optim.kernels import KernelPool
from nvme_offload.optim.layout.flat import unflatten
from nvme_offload.optim.layout.master import TILE_NUMEL, num_tiles
from nvme_offload.optim.rules.rule import ThroughWhole, UpdateRule


class StepScalars(NamedTuple):
    """What one update of a parameter takes besides tensors, each exactly an fp32 number."""

    of_rule: tuple[float, ...]
    grad_scale: float
    """What the gradient is multiplied by: unscaling and clipping in one factor, negative to maximize."""


class RunTensors(NamedTuple):
    """A run of elements of one parameter with all that its update needs, 1D [numel] each."""

    param: torch.Tensor
    grad: torch.Tensor
    master: torch.Tensor | None
    """uint16 beside bf16, fp32 beside fp16, None for an fp32 parameter."""
    states: Sequence[torch.Tensor]
    checksums: torch.Tensor | None
    """Checksums of the parameter as the last update left it, int64 per tile; None for an fp32 parameter."""
    scalars: StepScalars


def update_in_torch(rule: UpdateRule, run: RunTensors, pool: KernelPool) -> int:
    """Update one run by the rule's own `update`, which sees fp32 tensors of at most `TILE_NUMEL` elements.

    As in the native kernels, a tile whose parameter no longer matches its checksum gets its master from the parameter
    as found.

    Returns:
        The number of such tiles.
    """
    changed = 0
    for number in range(num_tiles(run.param.numel())):
        part = slice(number * TILE_NUMEL, (number + 1) * TILE_NUMEL)
        param, lower = run.param[part], None if run.master is None else run.master[part]
        known = None if run.checksums is None else run.checksums[number : number + 1]
        is_changed = known is not None and not torch.equal(pool.tile_checksums(param), known)
        changed += is_changed
        master = _master_of(param, lower, is_changed=is_changed, pool=pool)
        states = [state[part].float() for state in run.states]
        grad = run.grad[part].float() * run.scalars.grad_scale
        rule.update(master, grad, states, run.scalars.of_rule)
        for state, updated in zip(run.states, states, strict=True):
            state[part].copy_(updated)  # where it is fp32, it is the same memory
        pool.divide(master, param, lower)
        if known is not None:
            pool.tile_checksums(param, out=known)
    return changed


def update_whole(
    rule: UpdateRule, run: RunTensors, like: torch.Tensor, pool: KernelPool, through_whole: ThroughWhole
) -> int:
    """Update one parameter, or this rank's shard of it, by a rule that does not go element by element.

    Args:
        rule: its `update_whole` sees fp32 tensors in the shape of `like`.
        run: all of the parameter.
        like: has its shape and strides.
        pool: kernels.
        through_whole: see `UpdateRule.update_whole`.

    Returns:
        The number of tiles whose parameter somebody else had changed.
    """
    changed: list[int] = []
    if run.checksums is not None:
        changed = pool.tile_checksums(run.param).ne(run.checksums).nonzero().flatten().tolist()
    master = _master_of(run.param, run.master, is_changed=False, pool=pool)
    for number in changed:
        part = slice(number * TILE_NUMEL, (number + 1) * TILE_NUMEL)
        master[part] = run.param[part].float()
    states = [state.float() for state in run.states]
    grad = run.grad.float() * run.scalars.grad_scale
    shaped = [unflatten(each, like) for each in (master, grad, *states)]
    rule.update_whole(shaped[0], shaped[1], shaped[2:], run.scalars.of_rule, through_whole)
    for state, updated in zip(run.states, states, strict=True):
        state.copy_(updated)
    pool.divide(master, run.param, run.master)
    if run.checksums is not None:
        pool.tile_checksums(run.param, out=run.checksums)
    return len(changed)


def _master_of(param: torch.Tensor, lower: torch.Tensor | None, *, is_changed: bool, pool: KernelPool) -> torch.Tensor:
    """The master weights of a tile, fp32, to be updated in place."""
    if lower is None:
        return param
    if is_changed:
        return param.float()
    return pool.join(param, lower) if lower.dtype is torch.uint16 else lower
