"""Update in torch operators: rules without a native kernel, whole matrices, and state on a device.

Masters, states and checks are those of the native kernels. On a device rules that have a kernel give its bits, too,
and nothing waits for the device: what the host wants to know is a tensor there.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..kernels import CHUNK_NUMEL, KernelPool, OnAccelerator
from ..layout.codes import block_of, loaded, store
from ..layout.dither import words
from ..layout.flat import unflatten
from ..layout.master import TILE_NUMEL
from ..rules.rule import UpdateRule
from .whole_params import WholeParams
from .work import RunTensors, SubgroupStep, Updater


class InTorch(Updater):
    """The rule's own `update` sees fp32 tensors of at most `TILE_NUMEL` elements."""

    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """See `Updater.prepare`."""
        here, update = self.means.kernels, self.subgroup.rule.update
        return lambda: sum(
            int(update_run(update, piece, here)) for run in work.runs.values() for piece in run.pieces(TILE_NUMEL)
        )


class WholeMatrix(Updater):
    """The rule's own `update_whole` sees a parameter, or this rank's shard of it, in its shape."""

    inside = "updates whole parameters"

    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """See `Updater.prepare`. It updates copies, for the device that multiplies matrices may refuse memory."""
        updated = [self._update_copies(index, run, work.whole) for index, run in work.runs.items()]
        return lambda: sum(int(put_in_place()) for put_in_place in updated)

    def _update_copies(self, index: int, run: RunTensors, whole: WholeParams) -> Callable[[], torch.Tensor]:
        rule, like = self.subgroup.rule, self.means.param_of(index)

        def update(
            master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor], scalars: tuple[float, ...]
        ) -> None:
            shaped = [unflatten(each, like) for each in (master, grad, *states)]
            rule.update_whole(shaped[0], shaped[1], shaped[2:], scalars, partial(whole.through, index))

        with self.means.computing(self.subgroup.index):
            return update_copies(update, run, self.means.kernels)


class OnDevice(Updater):
    """The rule's own `update` works where state and parameters are. Nobody has to wait for it.

    Where kernels of Triton's run, and the rule has a native one, it is one of them; else it is operators.
    """

    inside = "updates state on the device"

    def prepare(self, work: SubgroupStep) -> Callable[[], int]:
        """See `Updater.prepare`. What is returned leaves out tiles found changed: see `Means.found_changed`."""
        rest = deque(piece for run in work.runs.values() for piece in run.pieces(CHUNK_NUMEL))

        def update_rest() -> int:
            while rest:
                self.means.found_changed.append(self._updated(rest[0]))
                rest.popleft()
            return 0

        return update_rest

    def _updated(self, run: RunTensors) -> torch.Tensor:
        rule = self.subgroup.rule
        if rule.kernel and (kernels := self.means.fused(run.param.device)) is not None:
            return update_run_fused(kernels, rule, run)
        return update_copies(rule.update, run, OnAccelerator())()


def update_run_fused(kernels: Any, rule: UpdateRule, run: RunTensors) -> torch.Tensor:
    """Update one run on its device as `update_run` does, by a kernel of `optim.fused.kernels`."""
    updated: torch.Tensor = kernels.update_run(
        rule,
        run.param,
        run.grad.to(run.param.device),
        run.master,
        run.states,
        run.checksums,
        run.scalars.of_rule,
        run.scalars.grad_scale,
        origin=run.origin,
        start=run.start,
        dither=run.scalars.dither,
        marks=run.marks,
    )
    return updated


Update = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], tuple[float, ...]], None]


def update_copies(update: Update, run: RunTensors, here: KernelPool | OnAccelerator) -> Callable[[], torch.Tensor]:
    """Do `update_run` to copies. Return what puts them in place, which takes no memory, and gives the number."""
    copies = run._replace(
        param=run.param.clone(),
        master=None if run.master is None else run.master.clone(),
        states=[state.clone() for state in run.states],
        checksums=None if run.checksums is None else run.checksums.clone(),
    )
    changed = update_run(update, copies, here)

    def put_in_place() -> torch.Tensor:
        kept, made = ((its.param, its.master, its.checksums, *its.states) for its in (run, copies))
        for tensor, copy in zip(kept, made, strict=True):
            if tensor is not None and copy is not None:
                tensor.copy_(copy)
        return changed

    return put_in_place


def update_run(update: Update, run: RunTensors, here: KernelPool | OnAccelerator) -> torch.Tensor:
    """Update one run. A tile whose parameter no longer matches its checksum gets its master from it as found.

    Args:
        update: changes masters and states in place; takes master, gradient, states and scalars, fp32 [numel].
        run: in one memory, but for the gradient, which may be in host memory.
        here: works in that memory, and takes the checksums.

    Returns:
        The number of such tiles: int64, 0D, in that memory.
    """
    on_host, param, lower = isinstance(here, KernelPool), run.param, run.master
    master = param if lower is None else here.join(param, lower) if lower.dtype is torch.uint16 else lower
    differ = None if run.checksums is None else here.tile_checksums(param) != run.checksums
    if differ is not None and not (on_host and not differ.any()):  # a device is not asked: that would wait for it
        by_element = differ.repeat_interleave(TILE_NUMEL)[: param.numel()]
        master.copy_(torch.where(by_element, param.float(), master))
    before = None if run.marks is None else param.clone()
    states = loaded(run.states)
    update(master, run.grad.to(param.device).float() * run.scalars.grad_scale, states, run.scalars.of_rule)
    for values in () if on_host else (master, *states):
        values.masked_fill_(values.isnan(), math.nan)  # devices have NaNs of their own
    chance = None
    if run.origin is not None:
        stop, block = run.start + param.numel(), block_of(run.states, param.numel())
        chance = words(run.origin, run.start, stop, run.scalars.dither[0], param.device, block)
    store(run.states, states, chance)
    here.divide(master, param, lower)
    if before is not None and run.marks is not None:
        if differ is not None:  # of a tile that was found changed all is marked
            of_changed = differ.repeat_interleave(TILE_NUMEL)[: param.numel()]
            bits = before.view(torch.int16)
            bits.copy_(torch.where(of_changed, ~param.view(torch.int16), bits))
        here.mark_changed(before, param, run.marks)
    if run.checksums is None or differ is None:
        return torch.zeros((), dtype=torch.int64, device=param.device)
    run.checksums.copy_(here.tile_checksums(param))
    return differ.sum()
