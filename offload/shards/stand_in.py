"""Tensors that say what they are and hold no memory: the data is elsewhere, and nobody gets an address of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from .._torch_private import foreach_of, make_wrapper
from ..devices.device import HOST
from ..errors import StateError


class MemorylessTensor(torch.Tensor):
    """The base of tensors that declare what they are, and whose data is elsewhere.

    ``data_ptr()`` is 0: savers and scans for tied weights take that for "not in memory". Whoever would read or write
    there gets an error, also from C++ (`make_wrapper` sees to that).
    """

    def data_ptr(self) -> int:
        """Return 0: there is no memory."""
        return 0

    def is_pinned(self, device: Any = None) -> bool:
        """Return False without reading anything: there is no memory."""
        return False

    def share_memory_(self) -> NoReturn:
        """Refuse: there is no memory to share."""
        raise self.refusal("share_memory_()")

    def __dlpack__(self, **unused: Any) -> Any:
        raise self.refusal("DLPack")

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        """Say that there is none, as every tensor does that is not in the memory of a GPU. Raises AttributeError."""
        raise AttributeError(str(self.refusal("__cuda_array_interface__")))

    def refusal(self, what: str) -> StateError:
        """Make the error for who needs the data in memory."""
        name, remedy = self._whose()
        return StateError(name, f"an access that does not need its data in memory; {remedy}", what)

    def _whose(self) -> tuple[str, str]:
        """Say for an error whose data it is, and what to use in place of an address."""
        raise NotImplementedError


class StandIn(MemorylessTensor):
    """Declares dtype, shape, strides and device. Operators raise, in words, but for those it was given handlers for.

    A tensor without data that answered operators would be a trap: what is written to it would be lost.
    """

    _name: str
    _remedy: str
    _handlers: Mapping[Any, Callable[..., None]]

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        dtype: torch.dtype,
        *,
        name: str,
        remedy: str,
        device: torch.device = HOST,
        handlers: Mapping[Any, Callable[..., None]] | None = None,
    ) -> StandIn:
        """Stand in for a tensor of `dtype` with the shape and strides of `like`, which needs no data.

        `handlers` are called for in-place operators, with their arguments after the tensor itself; by operator or by
        overload packet. A gradient has to be on its parameter's `device`. `name` and `remedy` are for the error.
        """
        tensor: StandIn = make_wrapper(cls, like, device, dtype)
        tensor._stand_for(name, remedy, handlers or {})
        return tensor

    def _stand_for(self, name: str, remedy: str, handlers: Mapping[Any, Callable[..., None]]) -> None:
        self._name = name
        self._remedy = remedy
        self._handlers = handlers

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"StandIn(shape={tuple(self.shape)}, dtype={self.dtype}: {self._name} is on a tier)"

    def _whose(self) -> tuple[str, str]:
        return self._name, self._remedy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the handler of an operator, or raise StateError, which names what to use instead."""
        first = args[0] if args else None
        if isinstance(first, StandIn) and (handler := first._handlers.get(func.overloadpacket)):
            handler(*args[1:], **(kwargs or {}))
            return first
        if (single := foreach_of(func)) and all(isinstance(item, StandIn) for item in args[0]):
            for item in args[0]:
                cls.__torch_dispatch__(single, types, (item, *args[1:]), kwargs)
            return None
        given = _flat([*args, *(kwargs or {}).values()])
        raise next(leaf for leaf in given if isinstance(leaf, StandIn)).refusal(f"{func} on a stand-in")


def _flat(values: Sequence[Any]) -> list[Any]:
    return [leaf for value in values for leaf in (_flat(value) if isinstance(value, list | tuple) else [value])]
