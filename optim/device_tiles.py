"""Updates where the state is on a device: the masters, states and parameters that the kernel would give, bit for bit.

Nothing here waits for the device: what the host wants to know is a tensor there.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from nvme_offload.optim.layout.master import TILE_NUMEL, num_tiles
from nvme_offload.optim.rules.rule import UpdateRule
from nvme_offload.optim.tiles import RunTensors

CHUNK_NUMEL = 256 * TILE_NUMEL
"""Elements that are worked on at a time: seven fp32 tensors of them are needed besides."""

_INF_BITS, _QUIET_BIT, _UPPER, _MAGNITUDE = 0x7F800000, 0x00400000, -0x10000, 0x7FFFFFFF


def tile_sums(param: torch.Tensor) -> torch.Tensor:
    """Checksums of a 16-bit parameter where it is: int64 per tile of 65536 elements, others than the kernel's.

    Each element counts with an odd weight of its own, modulo 2^64: that a single one changed always shows, of other
    changes about one in 2^64 does not.
    """
    weights = _weights(param.device)
    sums = []
    for start in range(0, param.numel(), CHUNK_NUMEL):
        bits = param[start : start + CHUNK_NUMEL].view(torch.int16).to(torch.int64)
        whole = bits.numel() // TILE_NUMEL * TILE_NUMEL
        sums.append((bits[:whole].view(-1, TILE_NUMEL) * weights).sum(1))
        if whole < bits.numel():
            sums.append((bits[whole:] * weights[: bits.numel() - whole]).sum(0, keepdim=True))
    return torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64, device=param.device)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern, int64 [TILE_NUMEL]: of splitmix64, but for the sign in its shifts."""
    mixed = torch.arange(1, TILE_NUMEL + 1, dtype=torch.int64, device="cpu") * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31) | 1).to(device)


def update_on_device(rule: UpdateRule, run: RunTensors) -> torch.Tensor:
    """Update one run by the rule's own `update`; whoever changed the parameter since the last one is respected.

    Args:
        rule: that goes element by element.
        run: on one device, but for the gradient, which may be in host memory; with `tile_sums` for checksums.

    Returns:
        The number of tiles whose parameter somebody else had changed; int64 on the device.
    """
    changed = torch.zeros((), dtype=torch.int64, device=run.param.device)
    if run.checksums is not None:
        differ = tile_sums(run.param) != run.checksums
        changed += differ.sum()
    for start in range(0, run.param.numel(), CHUNK_NUMEL):
        part = slice(start, start + CHUNK_NUMEL)
        param, lower = run.param[part], None if run.master is None else run.master[part]
        master = _master_of(param, lower)
        if run.checksums is not None and lower is not None:
            first = start // TILE_NUMEL
            by_element = differ[first : first + num_tiles(param.numel())].repeat_interleave(TILE_NUMEL)[: param.numel()]
            master.copy_(torch.where(by_element, param.float(), master))
        states = [state[part].float() for state in run.states]
        grad = run.grad[part].to(param.device).float() * run.scalars.grad_scale
        rule.update(master, grad, states, run.scalars.of_rule)
        for values in (master, *states):
            values.masked_fill_(values.isnan(), math.nan)  # one NaN for all
        for state, updated in zip(run.states, states, strict=True):
            state[part].copy_(updated)  # where it is fp32, it is the same memory
        _divide(master, param, lower)
    if run.checksums is not None:
        run.checksums.copy_(tile_sums(run.param))
    return changed


def _master_of(param: torch.Tensor, lower: torch.Tensor | None) -> torch.Tensor:
    """The master weights, fp32, to be updated in place."""
    if lower is None:
        return param
    return join(param, lower) if lower.dtype is torch.uint16 else lower


def join(hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    """Undo `split`: bf16 and uint16 [numel] to fp32."""
    upper = hi.view(torch.int16).to(torch.int32)
    lower = lo.view(torch.int16).to(torch.int32) & 0xFFFF
    return ((upper - (lower >> 15)) << 16 | lower).view(torch.float32)


def split(values: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
    """Divide fp32 [numel] into the nearest bf16, ties away from zero, and the lower halves, uint16."""
    bits = values.view(torch.int32)
    is_nan = (bits & _MAGNITUDE) > _INF_BITS
    upper = torch.where(is_nan, (bits | _QUIET_BIT) & _UPPER, bits + 0x8000) >> 16
    hi.view(torch.int16).copy_(upper)
    lo.view(torch.int16).copy_(bits.masked_fill(is_nan, 0))  # conversion keeps the lower half


def _divide(master: torch.Tensor, param: torch.Tensor, lower: torch.Tensor | None) -> None:
    """Round masters to the parameter; what leads back is in `lower` then."""
    if lower is None:
        return
    if lower.dtype is torch.uint16:
        split(master, param, lower)
        return
    param.copy_(master)
    param.masked_fill_(master.isnan(), math.nan)  # devices have NaNs of their own
