"""Update in torch operators: rules without a native kernel, whole matrices, and state on a device.

Masters, states and checks are those of the native kernels. On a device rules that have a kernel give its bits, too,
and nothing waits for the device: what the host wants to know is a tensor there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from nvme_offload.optim.kernels import CHUNK_NUMEL, KernelPool, OnAccelerator
from nvme_offload.optim.layout.dither import store_rounded, words
from nvme_offload.optim.layout.flat import unflatten
from nvme_offload.optim.layout.master import TILE_NUMEL, num_tiles
from nvme_offload.optim.updates.updater import Updater
from nvme_offload.optim.updates.work import RunTensors, SubgroupStep


class InTorch(Updater):
    """The rule's own `update` sees fp32 tensors of at most `TILE_NUMEL` elements."""

    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """See `Updater.prepare`."""
        here, update = self.means.kernels, self.subgroup.rule.update
        return lambda: sum(int(update_run(update, run, here, TILE_NUMEL)) for run in work.runs.values())


class WholeMatrix(Updater):
    """The rule's own `update_whole` sees a parameter, or this rank's shard of it, in its shape."""

    inside = "updates whole parameters"

    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """See `Updater.prepare`."""
        rule, here = self.subgroup.rule, self.means.kernels

        def update_one(index: int, run: RunTensors) -> int:
            like = self.means.param_of(index)

            def update(
                master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor], scalars: tuple[float, ...]
            ) -> None:
                shaped = [unflatten(each, like) for each in (master, grad, *states)]
                rule.update_whole(shaped[0], shaped[1], shaped[2:], scalars, partial(work.whole.through, index))

            return int(update_run(update, run, here, run.param.numel()))

        return lambda: sum(update_one(index, run) for index, run in work.runs.items())


class OnDevice(Updater):
    """The rule's own `update` works where state and parameters are. Nobody has to wait for it."""

    inside = "updates state on the device"

    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """See `Updater.prepare`. What is returned leaves out tiles found changed: see `Means.found_changed`."""
        there, update = OnAccelerator(), self.subgroup.rule.update

        def update_all() -> int:
            for run in work.runs.values():
                self.means.found_changed.append(update_run(update, run, there, CHUNK_NUMEL))
            return 0

        return update_all


def update_run(
    update: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], tuple[float, ...]], None],
    run: RunTensors,
    here: KernelPool | OnAccelerator,
    chunk_numel: int,
) -> torch.Tensor:
    """Update one run. A tile whose parameter no longer matches its checksum gets its master from it as found.

    Args:
        update: changes masters and states in place; takes master, gradient, states and scalars, fp32 [chunk_numel].
        run: in one memory, but for the gradient, which may be in host memory.
        here: works in that memory, and takes the checksums.
        chunk_numel: elements to work on at a time, a multiple of `TILE_NUMEL` or all.

    Returns:
        The number of such tiles: int64, 0D, in that memory.
    """
    on_host = isinstance(here, KernelPool)
    differ = None if run.checksums is None else here.tile_checksums(run.param) != run.checksums
    for start in range(0, run.param.numel(), chunk_numel):
        part, first = slice(start, start + chunk_numel), start // TILE_NUMEL
        param, lower = run.param[part], None if run.master is None else run.master[part]
        master = param if lower is None else here.join(param, lower) if lower.dtype is torch.uint16 else lower
        if differ is not None and not (on_host and not differ.any()):  # a device is not asked: that would wait for it
            by_tile = differ[first : first + num_tiles(param.numel())]
            by_element = by_tile.repeat_interleave(TILE_NUMEL)[: param.numel()]
            master.copy_(torch.where(by_element, param.float(), master))
        states = [state[part].float() for state in run.states]
        grad = run.grad[part].to(param.device).float() * run.scalars.grad_scale
        update(master, grad, states, run.scalars.of_rule)
        for values in () if on_host else (master, *states):
            values.masked_fill_(values.isnan(), math.nan)  # devices have NaNs of their own
        chance = _chance_of(run, part)
        for number, (state, updated) in enumerate(zip(run.states, states, strict=True)):
            if chance is not None and state.dtype is torch.bfloat16:
                store_rounded(state[part], updated, chance, number)
            else:
                state[part].copy_(updated)  # where it is fp32, it is the same memory
        here.divide(master, param, lower)
    if run.checksums is None or differ is None:
        return torch.zeros((), dtype=torch.int64, device=run.param.device)
    run.checksums.copy_(here.tile_checksums(run.param))
    return differ.sum()


def _chance_of(run: RunTensors, part: slice) -> torch.Tensor | None:
    """Return by what the states of these elements are dithered; None where they are not."""
    if run.origin is None:
        return None
    first, last = run.start + part.start, run.start + min(part.stop, run.param.numel())
    return words(run.origin, first, last, run.scalars.dither[0], run.param.device)
