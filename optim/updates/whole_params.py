"""Gather whole parameters for rules that need them: over ranks, one by one, in one order on all of them."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from nvme_offload.offload._torch_private import is_dtensor, local_tensor, shard_offsets, sharded_like


class WholeParams:
    """The gathers of one step. A rank whose shard of a parameter is empty has no state of it, and joins all the same.

    Args:
        order: indices of the parameters that are needed whole, as every rank comes to them.
        dtype: of what is gathered.
    """

    def __init__(self, leaves: Sequence[torch.Tensor], order: Iterable[int], dtype: torch.dtype) -> None:
        self._leaves = leaves
        self._pending = deque(order)
        self._dtype = dtype

    def through(self, index: int, part: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Apply `function` to a copy of the whole tensor of which `part` is a shard; return this rank's shard of it.

        What was cut short is asked for once more, also behind the end of the gather.
        """
        if index in self._pending:
            self._join_until(index)
        leaf = self._leaves[index]
        if is_dtensor(leaf):
            result = function(self._gathered(leaf, part))
            for dim, (start, length) in enumerate(zip(shard_offsets(leaf), part.shape, strict=True)):
                result = result.narrow(dim, start, length)
            result = result.to(part.device)
        else:
            result = function(part.to(self._dtype, copy=True))
        if self._pending and self._pending[0] == index:
            self._pending.popleft()  # last: what a device refuses memory for is done once more
        return result

    def finish(self) -> None:
        """Join in the gathers that are left: of parameters of which this rank has nothing."""
        self._join_until(None)

    def _join_until(self, index: int | None) -> None:
        while self._pending and self._pending[0] != index:
            leaf = self._leaves[self._pending.popleft()]
            if is_dtensor(leaf):
                self._gathered(leaf, torch.empty(local_tensor(leaf).shape, device="cpu"))

    def _gathered(self, leaf: Any, part: torch.Tensor) -> torch.Tensor:
        on_mesh = part.to(leaf.device_mesh.device_type, self._dtype, copy=True).contiguous()
        whole: torch.Tensor = sharded_like(on_mesh, leaf).full_tensor()
        return whole
