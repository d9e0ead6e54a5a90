"""Plain modules: their forwards wait for updates behind a step, as the gathers of FSDP2 do."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.hooks import RemovableHandle

from nvme_offload.offload._torch_private import fsdp_params, is_compiled, not_compiled
from ..layout.blocks import find_units, match_blocks, params_outside
from ..state.body import StateBody
from .waiting_parameter import can_wait, let_read


class WaitForUpdates:
    """A module hook that waits for updates of parameters. It keeps no state alive, and a copy waits for nothing."""

    def __init__(self, body: StateBody | None = None, indices: Sequence[int] = ()) -> None:
        self._body = weakref.ref(body) if body is not None else lambda: None
        self._indices = indices

    @not_compiled
    def __call__(self, *_: Any) -> None:
        """Wait, as a hook of any kind; see `StateBody.wait_for_updates_of`."""
        body = self._body()
        if body is not None:
            body.wait_for_updates_of(self._indices)

    def __reduce__(self) -> tuple[Any, ...]:
        return WaitForUpdates, ()


class PlainModules:
    """The modules that wait for the updates of one optimizer."""

    def __init__(self, body: StateBody) -> None:
        self._body = body
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module, blocks: Iterable[str] | None) -> None:
        """Let the modules in `model` wait, and no others; see `OffloadOptimizer.overlap_with`. Call it `at_rest`."""
        table = self._body.table
        chosen = set(find_units(model) if blocks is None else match_blocks(model, blocks))
        if not any(param in table for param in model.parameters()):
            raise ValueError(
                f"overlap_with: none of the parameters of this {type(model).__name__} is one that the optimizer was "
                "made with"
            )
        for name, module in model.named_modules():
            if is_compiled(module):
                raise ValueError(
                    f"overlap_with: {name or 'the model'} is compiled: call optimizer.overlap_with(model) first, and "
                    "torch.compile after it"
                )
        self._forget()
        gathered = _gathered_params(model)
        awaited = set()
        for module in model.modules():
            params = dict.fromkeys(param for param in params_outside(module, chosen) if param not in gathered)
            records = [record for record in map(table.find, params) if record is not None and can_wait(record.leaf)]
            if indices := [record.index for record in records]:
                # Before other hooks, which may read parameters, as those of ``torch.nn.utils.weight_norm`` do.
                wait = WaitForUpdates(self._body, indices)
                self._handles.append(module.register_forward_pre_hook(wait, prepend=True))
                awaited.update(indices)
        for index in awaited:  # last: before, whoever interrupts this finds updates inside the step
            table[index].let_wait(True)

    def _forget(self) -> None:
        let_read(self._body.table)
        for record in self._body.table:
            record.let_wait(False)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _gathered_params(model: nn.Module) -> set[torch.Tensor]:
    gathered: set[torch.Tensor] = set()
    for module in model.modules():
        gathered.update(record.sharded_param for record in fsdp_params(module))
        if isinstance(module, FullyShardedDataParallel):
            gathered.update(module.parameters())
    return gathered
