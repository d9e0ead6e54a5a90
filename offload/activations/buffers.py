"""The buffers of modules as they were, for what is computed twice: they change once, and are the same both times."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .._torch_private import local_tensor, version_of


class Buffers:
    """The buffers that these modules have now, each by itself; not those of a layout or a class of their own."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._kept = [
            (module, name, f"{path}.{name}".lstrip("."), buffer, version_of(buffer), buffer.detach().clone())
            for path, module in modules
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if type(local_tensor(buffer)) is torch.Tensor and buffer.layout is torch.strided
        ]

    def changed(self, *, compares: bool = True) -> str:
        """Return the name of one that is another tensor, was written or, if it `compares`, has other bits; or ""."""
        for module, name, path, buffer, version, value in self._kept:
            now = module.get_buffer(name)
            if now is not buffer or version_of(now) != version or (compares and not _has_same_bits(now, value)):
                return path
        return ""

    def put_back(self) -> None:
        """Give modules the same tensors, with the same values."""
        for module, name, _, buffer, _, value in self._kept:
            if not _has_same_bits(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)
            if module.get_buffer(name) is not buffer:
                setattr(module, name, buffer)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Within, modules have copies of them as they were; what they have now is neither read nor written."""
        now = [(module, name, module.get_buffer(name)) for module, name, *_ in self._kept]
        copies = {id(buffer): value.clone() for *_, buffer, _, value in self._kept}
        try:
            for module, name, _, buffer, *_ in self._kept:
                setattr(module, name, copies[id(buffer)])
            yield
        finally:
            for module, name, buffer in now:
                setattr(module, name, buffer)


def _has_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    one, other = (local_tensor(tensor).detach().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(one, other)
