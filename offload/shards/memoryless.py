"""A tensor that holds no memory of its own, and lets nobody take an address of it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from nvme_offload.offload.errors import StateError


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
        """Refuse: there is no memory to share. Raises StateError."""
        raise self.refusal("share_memory_()")

    def __dlpack__(self, **unused: Any) -> Any:
        """Refuse: there is no memory to hand over. Raises StateError."""
        raise self.refusal("DLPack")

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        """Say that there is none, as every tensor does that is not in the memory of a GPU. Raises AttributeError."""
        raise AttributeError(str(self.refusal("__cuda_array_interface__")))

    def refusal(self, what: str) -> StateError:
        """The error for who needs the data in memory."""
        name, remedy = self._whose()
        return StateError(name, f"an access that does not need its data in memory; {remedy}", what)

    def _whose(self) -> tuple[str, str]:
        """Say for an error whose data it is, and what to use in place of an address."""
        raise NotImplementedError
