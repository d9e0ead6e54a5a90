"""What travels between the comparison and its child processes: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Order:
    """What one child process is to do."""

    contender: str
    package: str | None
    size: str
    """Layers and width of the model, as `16x1024`."""
    tokens: int
    """Of one iteration."""
    threads: int
    swap: str
    """Folder on the drive."""
    weights: str
    """File for the master weights at the end."""


@dataclass(frozen=True)
class Turn:
    """Iterations in a row, with nothing of them left running at the end."""

    seconds: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Ended:
    """What the child saw of itself, the first iteration left out."""

    iterations: int
    peak_bytes: int | None
    """Most resident memory while it trained."""
    moved: tuple[int, int] | None
    """Bytes read and written, as the kernel counts them."""
