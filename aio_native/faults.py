"""Seeded failures, injected where completions come from, below the code that retries."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """Probabilities per request, each in 0..1, drawn from one generator so that a seed names a run.

    The same specification means the same kinds of faults in every engine; which request is hit depends on the order
    in which requests complete.
    """

    seed: int
    short: float = 0.0
    """The request moves fewer bytes than asked."""
    eintr: float = 0.0
    """The request completes with EINTR."""
    eagain: float = 0.0
    """The request completes with EAGAIN."""
    eio: float = 0.0
    """The request completes with EIO: the drive lost a sector."""
    enospc: float = 0.0
    """A write completes with ENOSPC: the file system is full. Reads are spared."""
    delay: float = 0.0
    """The completion is seen up to `max_delay_us` late."""
    reorder: float = 0.0
    """The completion is seen after a later one."""
    max_delay_us: int = 2000
    """Longest delay, in microseconds."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name not in ("seed", "max_delay_us") and not 0.0 <= value <= 1.0:
                raise ValueError(f"FaultSpec.{item.name}={value!r}: a probability lies between 0 and 1")
