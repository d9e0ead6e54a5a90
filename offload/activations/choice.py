"""Which saved tensors are moved: a pure function of facts."""

from typing import NamedTuple

import torch


class SavedFacts(NamedTuple):
    """Facts of a tensor that autograd saves."""

    is_plain: bool
    """It is a dense tensor of torch's own class, without a flag that its bytes do not have."""
    is_weight: bool
    """Its memory is a parameter's or a buffer's, gathered or cast for this forward perhaps."""
    size_bytes: int
    storage_bytes: int


def is_moved(facts: SavedFacts, min_bytes: int) -> bool:
    """Whether a saved tensor is moved. One that is small, and a small part of its storage, frees little by leaving."""
    large = facts.storage_bytes >= min_bytes and facts.size_bytes * _LEAST_PART >= min_bytes
    return facts.is_plain and large and not facts.is_weight


_LEAST_PART = 16
PLAIN_CLASSES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
"""Tensors of these classes are nothing but their bytes; a subclass may be more."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor's storage, with shape and strides, are all there is of it."""
    return (
        type(tensor) in PLAIN_CLASSES
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
