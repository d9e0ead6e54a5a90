"""Let whoever reads a parameter of a plain module wait while its update is done behind a step.

The class of a parameter says whether its readers wait, and nothing else: one that is of the waiting class, and has no
update before it, is read at once. So the class may stay too long, and nothing has to be undone, whatever comes between
two instructions. It must not go too early:

1. It comes before the update can begin: before the worker gets the job, or the gradient.
2. It goes when the update is done, and only whoever owns the state takes it: in a shift of the worker, or with that
   kept away. A reader never puts it back: another step may have begun between its look and that.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from nvme_offload.offload._torch_private import not_compiled, tree_flatten, without_torch_function
from ..state.body import bodies_of, known_bodies
from ..state.table import ParamRecord
from ..state.worker import Worker

_TENSOR: Any = torch.Tensor
_PROPERTIES = (
    *(_TENSOR.shape, _TENSOR.dtype, _TENSOR.device, _TENSOR.layout, _TENSOR.ndim, _TENSOR.itemsize, _TENSOR.nbytes),
    *(_TENSOR.grad, _TENSOR.grad_fn, _TENSOR.requires_grad, _TENSOR.is_leaf),
    *(_TENSOR.is_meta, _TENSOR.is_sparse),
)
_SAYS_NOTHING_OF_VALUES = {
    *(access for found in _PROPERTIES for access in (found.__get__, found.__set__)),
    *(_TENSOR.grad.__delete__, _TENSOR.requires_grad_, _TENSOR.register_post_accumulate_grad_hook),
    *(_TENSOR.stride, _TENSOR.numel, _TENSOR.nelement, torch.numel, _TENSOR.element_size, _TENSOR.is_contiguous),
}
"""These are answered at once: `zero_grad` asks for some of them in every step. Not so ``size`` and ``dim``, by which
alone ``torch.vmap`` can be told before it takes the memory."""


class WaitingParameter(nn.Parameter):
    """An exact `nn.Parameter` is one of these until its update is done."""

    @classmethod
    @not_compiled
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do `func` once its arguments are as the latest step leaves them; see `StateBody.wait_for_updates_of`."""
        kwargs = kwargs or {}
        read = [] if func in _SAYS_NOTHING_OF_VALUES else tree_flatten((args, kwargs))[0]
        waiting = [value for value in read if isinstance(value, WaitingParameter)]
        for param in waiting:
            _wait_for(param, overwrites=func is _TENSOR.copy_ and len(waiting) == 1 and param is args[0])
        # As a rule they are ordinary parameters again, and nobody else's `__torch_function__` is passed over.
        is_ordinary = bool(waiting) and not any(isinstance(param, WaitingParameter) for param in waiting)
        with nullcontext() if is_ordinary else without_torch_function():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a copy that waits for nothing: it is nobody's parameter."""
        _wait_for(self)
        copied: nn.Parameter = nn.Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
        _set_class(copied, nn.Parameter)
        return copied


class WaitingGradient(torch.Tensor):
    """The gradient of a `WaitingParameter` is one of these while an update behind a step may need it."""

    @classmethod
    @not_compiled
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do `func`, which may change the gradient, once no update needs it."""
        if func not in _SAYS_NOTHING_OF_VALUES:
            _end_updates()
            for value in tree_flatten((args, kwargs))[0]:
                if type(value) is WaitingGradient:
                    _set_class(value, torch.Tensor)
        with without_torch_function():
            return func(*args, **(kwargs or {}))


def _set_class(tensor: Any, kind: type[torch.Tensor]) -> None:
    tensor.__class__ = kind


def _wait_for(param: torch.Tensor, *, overwrites: bool = False) -> None:
    for body in bodies_of(param):
        body.wait_for_updates_of((body.table.of(param).index,), overwrites=overwrites)


def can_wait(param: torch.Tensor) -> bool:
    """Return whether a parameter's readers can be made to wait: those of an exact `nn.Parameter`."""
    return type(param) in (nn.Parameter, WaitingParameter)


def let_wait(records: Iterable[ParamRecord], *, is_behind: bool = False) -> None:
    """Make readers wait for those of these parameters that `overlap_with` was told; `is_behind`: for gradients, too."""
    for record in records:
        if record.is_awaited:
            _set_class(record.leaf, WaitingParameter)
            if is_behind and type(grad := record.leaf.grad) is torch.Tensor:
                _set_class(grad, WaitingGradient)


def let_read(records: Iterable[ParamRecord]) -> None:
    """Make nobody wait for these parameters any more. Call it in a shift of the worker, or with that kept away."""
    for record in records:
        if type(record.leaf) is WaitingParameter:  # isinstance would ask the class of all parameters
            _set_class(record.leaf, nn.Parameter)


def _end_updates() -> None:
    """Wait for what must end before a fork: a child has nobody who does it, and its parameters are those of now."""
    for body in known_bodies():
        must_end = body.is_own_process and not _has_nothing_left(body.worker)
        if must_end and any(isinstance(leaf, WaitingParameter) for leaf in body.table.leaves):
            body.worker.wait_until(partial(_has_nothing_left, body.worker))


def _has_nothing_left(worker: Worker) -> bool:
    return (job := worker.job) is None or not job.must_end  # read once: it may go meanwhile


os.register_at_fork(before=_end_updates)
