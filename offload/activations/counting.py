"""Counts what a forward saves, and leaves it where it is."""

import logging
from collections.abc import Hashable

import torch

from .._torch_private import storage_identity
from ..host.page_locks import PageLocks
from .store import ActivationStore


class CountingStore(ActivationStore):
    """A store without room, until it is known what is kept: it knows how much would be."""

    def __init__(self) -> None:
        super().__init__(None, 0, PageLocks(False, logging.getLogger(__name__).warning))
        self._sizes: dict[Hashable, int] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all storages that were given, each once."""
        return sum(self._sizes.values())

    def keep(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, which stays."""
        storage = tensor.untyped_storage()
        self._sizes[storage_identity(storage)] = storage.nbytes()

    def moves_from(self, device: torch.device) -> bool:
        """Whether tensors of a device are counted: all are."""
        return True
