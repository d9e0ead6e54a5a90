"""Values that are the same on every machine, and whether bits are as they should be."""

from collections.abc import Mapping, Sequence

import torch

Bits = Mapping[str, torch.Tensor]
"""Values by name, which must be the same everywhere."""
NORM = "norm"
"""The name of a norm in bits: where it is computed may change its last digits."""
NEAR = 1e-12  # share by which two norms may differ then


class WrongError(Exception):
    """Something was found that is not what is promised; the message says both."""


class LeftOutError(Exception):
    """Something that a check needs is not here; the message says what."""


def values_of(shape: Sequence[int], seed: int, scale: float) -> torch.Tensor:
    """Random numbers that are the same on every machine, fp32 on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu") * scale


def differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """Number of elements whose bits differ; of another shape or dtype are all."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return max(one.numel(), other.numel(), 1)
    own, others = (each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return int((own != others).view(one.numel(), -1).any(1).sum())


def must_equal(found: Bits, expected: Bits, what: str, norm_within: float = 0.0) -> None:
    """Raise WrongError, with `what`, where any bit differs, or the norm by more than a share of it."""
    if found.keys() != expected.keys():
        raise WrongError(f"{what}: {', '.join(sorted(found.keys() ^ expected.keys()))} are on one side alone")
    if NORM in found:
        must_be_near(float(found[NORM]), float(expected[NORM]), f"{what}: norm", norm_within)
    if number := sum(differing(found[name], expected[name]) for name in found.keys() - {NORM}):
        raise WrongError(f"{what}: {number:,} elements have other bits")


def must_be_near(one: float, other: float, what: str, within: float = NEAR) -> None:
    """Raise WrongError where two numbers are further apart than a share of the second."""
    if not abs(one - other) <= within * abs(other):
        raise WrongError(f"{what}: {one!r} in place of {other!r}")
