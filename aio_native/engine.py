"""The engine interface: bytes between memory and files, and nothing else.

An engine is one way to do I/O (fio's *ioengine*). It takes operations, each a list of segments, splits them into
requests of at most ``block_size`` bytes, keeps at most ``queue_depth`` requests in flight, finishes short transfers,
repeats interrupted requests and checks every completion. It knows neither tensors nor what the bytes mean.

Layering: the engine finishes short transfers; `offload.storage.transfer` owns buffers and turns failures into
exceptions; `offload.swapper.tensor_swapper` owns tensors.
"""

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .faults import FaultSpec

DRAIN_POLL_SECONDS = 0.001

MAX_BLOCK_SIZE = 1 << 30
"""Largest request of any engine, in bytes; the kernel cuts a single read or write short of 2 GiB."""


def check_timeout(timeout: float | None) -> None:
    """Raise ValueError for a timeout that is no number. Infinity is as None, and what is negative has passed."""
    if timeout is not None and math.isnan(timeout):
        raise ValueError("timeout nan: must be a number of seconds, or None to wait without end")


class Op(enum.IntEnum):
    """Direction of an operation, seen from memory."""

    READ = 0
    """The operation moves bytes from a file to memory."""
    WRITE = 1
    """The operation moves bytes from memory to a file."""


class Segment(NamedTuple):
    """One contiguous run of bytes in a file and in memory.

    With a file opened O_DIRECT, offset, address and size must be multiples of the file's alignment.
    """

    fd: int
    offset: int
    """Position in the file, in bytes."""
    address: int
    """Address of the first byte in memory."""
    size_bytes: int


class Failure(NamedTuple):
    """The first thing that went wrong in an operation."""

    errno: int
    """Positive errno. ENODATA means that the file ended before the segment did."""
    fd: int
    offset: int
    """Position in the file of the request that failed, in bytes."""
    size_bytes: int
    """Bytes of the request that failed."""
    engine_lost: bool = False
    """Whether the engine itself broke (`Engine.breakdown`): the drive did not answer."""


class Breakdown(NamedTuple):
    """The engine broke, for good: every operation fails, those to come too."""

    errno: int
    """The system answered this, for example EPERM where a seccomp filter forbids what was allowed."""
    ended: bool
    """Whether nothing it had is under way any more. False: nobody knows when the kernel will stop using the memory."""


class Operation(Protocol):
    """A submitted group of requests. The memory it names must stay alive until ``done()``."""

    @property
    def size_bytes(self) -> int:
        """Bytes that the operation moves: the sum over its segments."""

    @property
    def failure(self) -> Failure | None:
        """Return what went wrong with the operation, or None. Final once ``done()`` is true."""

    @property
    def submitted_ns(self) -> int:
        """When the operation was handed in, on the clock of ``time.monotonic_ns``."""

    @property
    def completed_ns(self) -> int:
        """When the operation's last request completed, on the clock of ``time.monotonic_ns``; 0 before."""

    def done(self) -> bool:
        """Whether every request has completed (or was never issued because an earlier one failed)."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for ``done()``; False when `timeout` seconds passed first. Signals are handled while waiting."""

    def add_waker(self, eventfd: int) -> None:
        """Write 1 to `eventfd` when the operation is done; at once if it already is."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """An engine is built with these. Every value comes from the caller: engines have no defaults of their own."""

    queue_depth: int
    """Requests in flight per ring. Range 1..4096."""
    block_size: int
    """Largest request, in bytes; a multiple of `alignment`."""
    rings: int
    """Independent submission queues, each with an owner thread. Range 1..64."""
    alignment: int
    """Granularity of direct I/O, in bytes: a short transfer is continued at a multiple of it."""
    max_operations: int
    """Operations accepted and not yet done; ``submit`` answers None beyond it."""
    faults: FaultSpec | None = None
    """Failures to inject at the completion source, for tests."""

    def __post_init__(self) -> None:
        """Raise ValueError for a value outside its range."""
        bounds = {
            "queue_depth": (self.queue_depth, 1, 4096),
            "rings": (self.rings, 1, 64),
            "alignment": (self.alignment, 1, MAX_BLOCK_SIZE),
            "block_size": (self.block_size, self.alignment, MAX_BLOCK_SIZE),
            "max_operations": (self.max_operations, 1, 2**31),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise ValueError(f"EngineOptions.{name}={value}: must lie between {low} and {high}")
        if self.block_size % self.alignment:
            what = f"must be a multiple of alignment={self.alignment}"
            raise ValueError(f"EngineOptions.block_size={self.block_size}: {what}")


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine was opened."""

    requests: int = 0
    """Requests completed, repeats included."""
    retries: int = 0
    """Requests issued again after a short transfer, EINTR or EAGAIN."""
    bytes_read: int = 0
    bytes_written: int = 0
    depth_ns: int = 0
    """Integral of requests in flight over time, in request-nanoseconds."""
    busy_ns: int = 0
    """Nanoseconds with at least one request in flight, summed over rings."""
    cpu_ns: int = 0
    """Processor time of the engine's own threads."""

    @property
    def achieved_depth(self) -> float:
        """Mean number of requests in flight while any was."""
        return self.depth_ns / self.busy_ns if self.busy_ns else 0.0


@dataclass(frozen=True)
class Registration:
    """Which optional kernel features an engine obtained, and why not where it did not."""

    buffers: bool = False
    """Memory is registered: no page pinning per request."""
    files: bool = False
    """File descriptors are registered: no reference counting per request."""
    refusals: tuple[str, ...] = field(default=())
    """One sentence per feature that was refused: cause, consequence, remedy."""


class EngineUnavailable(RuntimeError):  # noqa: N818 - it names a state, not a mistake of the caller
    """The engine cannot run here. The message says why and what would change it."""


class Engine(ABC):
    """One way to do I/O. Thread-safe. In a forked child every method but ``close`` raises RuntimeError."""

    name: str
    options: EngineOptions

    @property
    def breakdown(self) -> Breakdown | None:
        """Return how the engine broke; None while it works.

        Set before the first failure that comes of it can be seen.
        """
        return None

    @abstractmethod
    def submit(self, op: Op, segments: Sequence[Segment]) -> Operation | None:
        """Hand in an operation and return at once.

        Returns:
            The operation, or None if `max_operations` are under way already (busy: wait for one, then try again).

        Raises:
            ValueError: a segment is empty or not aligned as its O_DIRECT file requires.
            RuntimeError: the engine is closed, or was made in another process.
        """

    @abstractmethod
    def register(self, buffers: Sequence[tuple[int, int]], fds: Sequence[int]) -> Registration:
        """Register memory given as (address, size in bytes) and open files, for cheaper requests.

        What was registered is forgotten: with nothing this is needed before registered memory is unmapped. Refusal is
        normal (RLIMIT_MEMLOCK, old kernels) and never an error: the requests stay plain.
        """

    @abstractmethod
    def drain(self) -> None:
        """Wait until nothing is under way, also operations that an exception kept `submit` from returning.

        For the rare caller who does not know what is. Signals are handled while waiting.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """Counters since the engine was opened."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way, stop the threads, free the rings. Idempotent; does nothing in a forked child."""
