"""A check is made at a site, comes to an outcome, and compares bits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

Bits = Mapping[str, torch.Tensor]
"""Values by name, which must be the same everywhere."""


class WrongError(Exception):
    """Something was found that is not what is promised; the message says both."""


class LeftOutError(Exception):
    """Something that a check needs is not here; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Checks are made at a site."""

    device: str  # type of the device that trains: that of a GPU, or "cpu"
    folder: Path  # on the drive
    large: bool  # whether tensors are as large as it takes to keep a GPU busy

    @property
    def has_device(self) -> bool:
        """Whether anything but the CPU trains."""
        return self.device != "cpu"

    def drive(self) -> "TemporaryDirectory[str]":
        """Return a folder on the drive for one run."""
        return TemporaryDirectory(dir=self.folder, prefix="verify-")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A check came to this."""

    name: str
    status: Literal["ok", "wrong", "failed", "left out"]
    """Wrong: something else than what is promised was found. Failed: the check did not come to an end."""
    found: str
    seconds: float
    log: tuple[str, ...] = ()  # what a check that failed said last


def exit_status(outcomes: Iterable[Outcome]) -> int:
    """Exit status of the command: 0 where nothing was wrong and nothing failed, otherwise 1."""
    return int(any(outcome.status in ("wrong", "failed") for outcome in outcomes))


def differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """Number of elements whose bits differ; of another shape or dtype are all."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return max(one.numel(), other.numel(), 1)
    own, others = (each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return int((own != others).view(one.numel(), -1).any(1).sum())


def must_equal(found: Bits, expected: Bits, what: str) -> None:
    """Raise WrongError, with `what` and the number of elements, where any bit differs."""
    if found.keys() != expected.keys():
        raise WrongError(f"{what}: {', '.join(sorted(found.keys() ^ expected.keys()))} are on one side alone")
    if number := sum(differing(found[name], expected[name]) for name in found):
        raise WrongError(f"{what}: {number:,} elements have other bits")


def must_be_near(one: float, other: float, what: str) -> None:
    """Raise WrongError where two numbers are further apart than 1e-12 of the second."""
    if not abs(one - other) <= 1e-12 * abs(other):
        raise WrongError(f"{what}: {one!r} in place of {other!r}")
