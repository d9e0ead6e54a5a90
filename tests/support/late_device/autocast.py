"""Autocast on the stand-in: the operators that models of the tests have are cast as they are on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten
_LOWERED = (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.scaled_dot_product_attention)
"""Those that compute in autocast's dtype, whatever comes in; ``AT_FORALL_LOWER_PRECISION_FP`` of torch has them all."""
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def _lowered(packet: Any) -> Callable[..., Any]:
    def cast(leaf: Any) -> Any:
        is_cast = isinstance(leaf, torch.Tensor) and leaf.device.type == "late" and leaf.is_floating_point()
        return leaf.to(torch.get_autocast_dtype("late")) if is_cast and leaf.dtype is not torch.float64 else leaf

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return packet(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


def libraries() -> list[torch.library.Library]:
    """What tells torch so, for as long as it is kept. All other operators are as without autocast."""
    others = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    others.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for packet in _LOWERED:
        library.impl(packet.__name__, _lowered(packet))
    return [others, library]
