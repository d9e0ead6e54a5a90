"""Kernels of Triton's on the stand-in: its interpreter runs them when their stream comes to them."""

from typing import Any

import torch

from tests.support.late_device.queues import Work, current_stream
from tests.support.late_device.tensor import LateTensor


class Queued:
    """It stands in for `optim.fused.kernels`, of which `kernels` is the real one."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.num_launches = 0

    def tile_sq_sums(self, grad: torch.Tensor) -> torch.Tensor:
        """See there."""
        return self._launched(self.kernels.tile_sq_sums, torch.float64, (-(-grad.numel() // 65536),), grad)

    def update_run(self, rule: Any, *given: Any, **more: Any) -> torch.Tensor:
        """See there."""
        return self._launched(lambda *own: self.kernels.update_run(rule, *own, **more), torch.int64, (), *given)

    def _launched(self, kernel: Any, dtype: torch.dtype, shape: tuple[int, ...], *given: Any) -> torch.Tensor:
        self.num_launches += 1
        result = torch.empty(shape, dtype=dtype, device="late")
        stores = [_stores(each) for each in given]
        touches = [each for store in stores for each in (store if isinstance(store, list) else [store])]
        touches = [each for each in (*touches, result.store) if isinstance(each, torch.Tensor)]
        current_stream().push(Work(lambda: result.store.copy_(kernel(*stores)), touches))
        return result


def _stores(given: Any) -> Any:
    if isinstance(given, list):
        return [each.store for each in given]
    return given.store if isinstance(given, LateTensor) else given
