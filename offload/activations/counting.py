"""Counts what a forward saves, and leaves it where it is."""

from collections.abc import Hashable, Iterable

import torch

from nvme_offload.offload._torch_private import storage_identity
from nvme_offload.offload.activations.kept import ActivationStats


class CountingStore:
    """Stands in for an `ActivationStore` until it is known what is kept: it knows how much would be."""

    tier = None

    def __init__(self) -> None:
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

    def begin(self) -> None:
        """Begin a forward."""

    def announce(self, handles: Iterable[object]) -> None:
        """Nothing is read."""

    def park(self) -> None:
        """Nothing is held."""

    def stats(self) -> ActivationStats:
        """Nothing was kept."""
        return ActivationStats(host_budget=0)

    def close(self) -> None:
        """Nothing is left behind."""
