"""Comparing bit by bit: of numbers that are equal zeros may differ, and of NaNs none is equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nvme_offload.perf.verify.outcome import WrongError

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(one: object, other: object) -> int:
    """Number of elements whose bits differ in two containers of tensors and numbers; of another shape are all."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return max(one.numel(), other.numel(), 1)
        return int((_bits(one) != _bits(other)).sum())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        missing = len(one.keys() ^ other.keys())
        return missing + sum(differing(one[key], other[key]) for key in one.keys() & other.keys())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return abs(len(one) - len(other)) + sum(differing(mine, theirs) for mine, theirs in pairs)
    return int(one != other)


def must_equal(one: object, other: object, what: str) -> None:
    """Raise WrongError, with `what` and the number of elements, where any bit differs."""
    if number := differing(one, other):
        raise WrongError(f"{what}: {number:,} elements have other bits")


def must_be_near(one: float, other: float, what: str, *, within: float = 1e-12) -> None:
    """Raise WrongError where two numbers are further apart than this share of the second."""
    if not abs(one - other) <= within * abs(other):
        raise WrongError(f"{what}: {one!r} in place of {other!r}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(_INT_OF_SIZE[flat.element_size()])
