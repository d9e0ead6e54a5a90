"""Keep in host memory what has left a device for a while, so that somebody else can have the device."""

from collections.abc import Hashable, Iterable

import torch

from .._torch_private import storage_identity
from ..devices.device import is_host, wait_for_all


class Away:
    """Bytes of tensors that have left their device, and come back to the same tensors. For one thread at a time.

    Meanwhile the storage has no bytes, as one that FSDP2 has freed: tensors, and views of them, stay the objects that
    they are. A copy is made before the bytes go, and kept until all bytes are back. So after an exception either method
    may be called.
    """

    def __init__(self) -> None:
        self._copies: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}
        """A tensor and the bytes of its storage, uint8 [bytes] in host memory, by the identity of the storage."""

    @torch.no_grad()
    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the storages of tensors from their devices to host memory; tensors in host memory stay as they are."""
        there = [tensor for tensor in tensors if not is_host(tensor.device)]
        _wait_for_devices(there)  # on other streams may be work with what is freed here
        for tensor in there:
            storage = tensor.untyped_storage()
            key = storage_identity(storage)
            if key not in self._copies and storage.nbytes():
                self._copies[key] = tensor, _bytes_of(tensor).cpu()
            storage.resize_(0)

    def come_back(self) -> None:
        """Give all of them their bytes again. OutOfMemoryError: a device has no room; call it again when it has."""
        if not self._copies:
            return
        with torch.inference_mode(False), torch.no_grad():
            for tensor, copy in self._copies.values():
                if not (storage := tensor.untyped_storage()).nbytes():
                    storage.resize_(copy.numel())
                _bytes_of(tensor).copy_(copy)
            _wait_for_devices(tensor for tensor, _ in self._copies.values())  # other streams use it next
        self._copies.clear()


def _wait_for_devices(tensors: Iterable[torch.Tensor]) -> None:
    for device in {tensor.device for tensor in tensors}:
        wait_for_all(device)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View all of a tensor's storage, uint8 [bytes], under another version: for autograd the tensor does not change."""
    first = tensor.data.as_strided((1,), (1,), 0).view(torch.uint8)
    return first.as_strided((tensor.untyped_storage().nbytes(),), (1,), 0)
