"""A check is made at a site, comes to an outcome, and compares bits."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

Status = Literal["ok", "wrong", "failed", "left out"]
"""Wrong: something else than what is promised was found. Failed: the check did not come to an end."""
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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

    @contextmanager
    def drive(self) -> Iterator[Path]:
        """A folder on the drive for one run."""
        with TemporaryDirectory(dir=self.folder, prefix="verify-") as folder:
            yield Path(folder)


@dataclass(frozen=True)
class Found:
    """A check found this where all is as it should be."""

    text: str
    values: Mapping[str, Any] = field(default_factory=dict)  # the same for programs: bytes, seconds, bytes per second


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A check came to this."""

    name: str
    text: str
    status: Status
    found: str
    seconds: float
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """Something to find out."""

    name: str
    text: str  # the promise, in a few words
    run: Callable[[Site], Found]
    limit: float  # seconds after which it counts as failed

    def outcome(self, status: Status, found: str, began: float, values: Mapping[str, Any] = {}) -> Outcome:
        """Make the outcome of the check that began at this moment of `time.monotonic` and ends now."""
        seconds = time.monotonic() - began
        return Outcome(name=self.name, text=self.text, status=status, found=found, seconds=seconds, values=values)


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """Exit status of the command: 0 where nothing was wrong and nothing failed, otherwise 1."""
    return int(any(outcome.status in ("wrong", "failed") for outcome in outcomes))


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
