"""What a check is, where it is made, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

Status = Literal["ok", "wrong", "failed", "left out"]
"""Wrong: something else than what is promised was found. Failed: the check did not come to an end."""


class WrongError(Exception):
    """What was found is not what is promised; the message says both."""


class LeftOutError(Exception):
    """What a check needs is not here; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where checks are made."""

    device: str
    """Type of the device that trains: that of a GPU, or "cpu"."""
    folder: Path
    """On the drive."""
    params: int
    """Parameters of the model whose steps are timed."""
    size: int
    """Bytes of the region in which the drive is measured."""
    runtime: float
    """Seconds of measuring the drive, in each direction."""
    large: bool
    """Whether tensors are as large as it takes to keep a GPU busy."""

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
    """What a check found where all is as it should be."""

    text: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs: bytes, seconds, bytes per second."""


@dataclass(frozen=True)
class Check:
    """Something to find out."""

    name: str
    text: str
    """What is promised, or measured, in a few words."""
    run: Callable[[Site], Found]
    limit: float
    """Seconds after which it counts as failed."""
    measures: bool = False
    """Whether it measures, in place of comparing."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a check came to."""

    name: str
    text: str
    status: Status
    found: str
    seconds: float
    values: Mapping[str, Any] = field(default_factory=dict)


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """Exit status of the command: 0 where nothing was wrong and nothing failed, otherwise 1."""
    return int(any(outcome.status in ("wrong", "failed") for outcome in outcomes))
