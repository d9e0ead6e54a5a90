"""Copies that are late and gradients that are freed early: whoever does not wait has other bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nvme_offload.optim.adamw import OffloadAdamW
from nvme_offload.perf.verify.bits import must_equal
from nvme_offload.perf.verify.outcome import Found, Site, WrongError
from nvme_offload.perf.verify.updates import section

ROUNDS = 12
_NUMEL = {True: 8_000_000, False: 300_000}
_BUSY = {True: 4096, False: 64}
_LINKS = 20


def races(site: Site) -> Found:
    """Gradients that come at the end of a long queue, readers right behind the step, and memory that is taken again."""
    late, seen = _train(site, is_late=True)
    calm, expected = _train(site, is_late=False)
    must_equal(late, calm, "parameters after steps with late gradients")
    for number, (first, then) in enumerate(seen):
        if first != then:
            raise WrongError(f"round {number}: what was queued behind the step read other parameters than there are")
    must_equal(seen, expected, "what was queued behind the steps")
    text = "the same bits" if site.has_device else "the same bits; nothing is late on a CPU"
    return Found(text, {"rounds": ROUNDS, "parameters": late.numel()})


def _train(site: Site, *, is_late: bool) -> tuple[torch.Tensor, list[tuple[float, float]]]:
    numel, sums = _NUMEL[site.large], []
    busy = torch.randn(_BUSY[site.large], _BUSY[site.large], device=site.device)
    param = nn.Parameter(torch.ones(numel, dtype=torch.bfloat16, device=site.device))
    ramp = torch.linspace(-1, 1, numel, device=site.device).bfloat16()
    with site.drive() as drive, _stepping(param, section(drive)) as optimizer:
        for number in range(ROUNDS):
            param.grad = torch.full_like(param, float("nan"))
            product = busy
            for _ in range(_LINKS if is_late else 1):
                product = (product @ busy) * 1e-3
            param.grad.copy_(ramp * (number + 1))
            _calm(site, is_late)
            optimizer.step()
            first = param.detach().sum(dtype=torch.float64)
            param.grad = None
            # Takes the memory of the gradient again, which copies may still be reading.
            junk = [torch.full((numel // 4,), 7.0, dtype=torch.bfloat16, device=site.device) for _ in range(4)]
            _calm(site, is_late)
            sums.append((first, param.detach().sum(dtype=torch.float64)))
            del junk, product
        if optimizer.stats().resplit_blocks:
            raise WrongError(f"{optimizer.stats().resplit_blocks} tiles looked as if somebody else had changed them")
        return param.detach().cpu(), [(first.item(), then.item()) for first, then in sums]


@contextmanager
def _stepping(param: nn.Parameter, offload: dict[str, Any]) -> Iterator[OffloadAdamW]:
    with OffloadAdamW([param], lr=1e-2, offload=offload) as optimizer:
        yield optimizer


def _calm(site: Site, is_late: bool) -> None:
    if site.has_device and not is_late:
        torch.get_device_module(site.device).synchronize()
