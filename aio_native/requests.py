"""The Python engines split operations into requests, check completions and finish transfers here.

Everything here is used by one thread, the owner thread of an engine, and needs no lock.

An operation becomes requests of at most ``block_size`` bytes, made one at a time as the queue depth allows. A
completion is judged here and nowhere else:

| completion             | what happens                                                                   |
|------------------------|--------------------------------------------------------------------------------|
| all bytes              | the request is finished                                                        |
| fewer bytes            | the rest is asked for again, from a multiple of ``alignment`` on (O_DIRECT)    |
| EINTR, EAGAIN          | the request is repeated: reads and writes at an offset are idempotent          |
| no progress, 64 times  | the operation fails with that errno (ENODATA, EIO for reads, writes cut short) |
| 0 bytes                | the file ended: ENODATA; for a write EIO                                       |
| any other errno        | the operation fails with it                                                    |

A failed operation issues no further requests and is done when those in flight have come back.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import chain
from operator import itemgetter

from .engine import EngineOptions, EngineStats, Failure, Op, Segment
from .operation import PythonOperation


def check_segments(segments: Sequence[Segment], alignment: int) -> None:
    """Raise ValueError for empty work, and for what the kernel would refuse with a bare EINVAL on an O_DIRECT file."""
    if not segments:
        raise ValueError("an operation needs at least one segment")
    direct_fds: dict[int, bool] = {}
    for fd, offset, address, size_bytes in segments:
        if size_bytes <= 0:
            raise ValueError(f"segment of {size_bytes} bytes at offset {offset}: the size must be positive")
        if offset < 0:
            # io_uring takes -1 for the file's current position, and would move the right bytes to the wrong place.
            raise ValueError(f"segment at offset {offset}: offsets are counted from the start of the file")
        if (offset | address | size_bytes) % alignment == 0:
            continue
        if fd not in direct_fds:
            direct_fds[fd] = _is_direct(fd)
        if direct_fds[fd]:
            raise ValueError(
                f"offset {offset}, address {address:#x} and size {size_bytes} must all be multiples of {alignment} "
                "for a file opened with O_DIRECT"
            )


def _is_direct(fd: int) -> bool:
    """Whether the file was opened with O_DIRECT; a descriptor that is none is left for the request to fail on."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    except (OSError, ValueError):
        return False


MAX_ATTEMPTS = 64

MAX_STRIPES = 16
"""Segments of one operation that are issued side by side; more go one after the other."""


def lost(operation: PythonOperation, error: int) -> Failure:
    """Return what becomes of an operation whose engine broke."""
    fd, offset, _, _ = operation.segments[0]
    return Failure(error, fd, offset, operation.size_bytes, engine_lost=True)


class Request:
    """One contiguous transfer of at most ``block_size`` bytes; shrinks from the front as bytes arrive."""

    __slots__ = ("address", "asked_bytes", "attempts", "course", "fd", "offset", "size_bytes")

    def __init__(self, course: Course, fd: int, offset: int, address: int, size_bytes: int) -> None:
        self.course = course
        self.fd = fd
        self.offset = offset
        self.address = address
        self.size_bytes = size_bytes
        self.asked_bytes = size_bytes
        """The bytes that the kernel is asked for; less than `size_bytes` only where a fault is injected."""
        self.attempts = 0
        """Attempts since the last byte of progress."""

    @property
    def op(self) -> Op:
        """Direction of the transfer."""
        return self.course.operation.op

    def advance(self, num_bytes: int) -> None:
        """Take `num_bytes` off the front: they have been moved."""
        self.offset += num_bytes
        self.address += num_bytes
        self.size_bytes -= num_bytes


class Course:
    """A course tells how far an operation has come."""

    __slots__ = ("failure", "in_flight", "operation", "requests", "unissued")

    def __init__(self, operation: PythonOperation, block_size: int) -> None:
        self.operation = operation
        self.unissued = sum(-(-segment.size_bytes // block_size) for segment in operation.segments)
        self.in_flight = 0
        """Requests issued and not finished, those about to be repeated included."""
        self.failure: Failure | None = None
        self.requests = self._split(block_size)

    def _split(self, block_size: int) -> Iterator[Request]:
        """Requests of at most a block. Stripes (a few segments) advance in step, so that every drive has work."""
        segments = self.operation.segments
        pieces = [self._split_segment(segment, block_size) for segment in segments]
        in_turn = chain.from_iterable(pieces) if len(segments) > MAX_STRIPES else merge(*pieces, key=itemgetter(0))
        yield from (request for _, request in in_turn)

    def _split_segment(self, segment: Segment, block_size: int) -> Iterator[tuple[float, Request]]:
        """Requests of one segment, each with the part of the segment that comes before it."""
        fd, offset, address, size_bytes = segment
        for start in range(0, size_bytes, block_size):
            size = min(block_size, size_bytes - start)
            yield start / size_bytes, Request(self, fd, offset + start, address + start, size)


class DepthMeter:
    """Integrates the number of requests in flight over time, for its mean."""

    __slots__ = ("_changed_ns", "busy_ns", "depth", "depth_ns")

    def __init__(self) -> None:
        self.depth = 0
        self.depth_ns = 0
        self.busy_ns = 0
        self._changed_ns = 0

    def change(self, by: int) -> None:
        """Count `by` more requests in flight from now on."""
        now = time.monotonic_ns()
        if self.depth:
            self.depth_ns += self.depth * (now - self._changed_ns)
            self.busy_ns += now - self._changed_ns
        self._changed_ns = now
        self.depth += by


class RequestQueue:
    """The requests of all operations under way: which one is issued next, and what each completion means."""

    def __init__(self, options: EngineOptions, depth: int) -> None:
        self.meter = DepthMeter()
        self._options = options
        self._depth = depth
        self._waiting: dict[Op, deque[Course]] = {Op.READ: deque(), Op.WRITE: deque()}
        self._in_flight = {Op.READ: 0, Op.WRITE: 0}
        self._moved_bytes = {Op.READ: 0, Op.WRITE: 0}
        self._repeats: deque[Request] = deque()
        self._last = Op.WRITE
        self._under_way: set[Course] = set()
        self._finished: list[Course] = []
        self._requests = 0
        self._retries = 0

    @property
    def idle(self) -> bool:
        """Whether no operation is under way."""
        return not self._under_way

    def add(self, operation: PythonOperation) -> None:
        """Queue an operation behind those of its direction."""
        course = Course(operation, self._options.block_size)
        self._under_way.add(course)
        self._waiting[operation.op].append(course)

    def next(self) -> Request | None:
        """Return the request to issue now, or None while the queue depth is used up or nothing waits."""
        if self.meter.depth >= self._depth:
            return None
        if self._repeats:
            request = self._repeats.popleft()
            self._retries += 1
        else:
            fresh = self._fresh()
            if fresh is None:
                return None
            request = fresh
        self.meter.change(+1)
        self._in_flight[request.op] += 1
        request.asked_bytes = request.size_bytes
        return request

    def _fresh(self) -> Request | None:
        direction = self._direction()
        waiting = self._waiting[direction]
        if not waiting:
            return None
        self._last = direction
        course = waiting[0]
        course.unissued -= 1
        course.in_flight += 1
        if not course.unissued:
            waiting.popleft()
        return next(course.requests)

    def _direction(self) -> Op:
        """Reads and writes share the depth: the one with fewer requests in flight, in turn when equal."""
        if not self._waiting[Op.WRITE]:
            return Op.READ
        if not self._waiting[Op.READ]:
            return Op.WRITE
        ahead = self._in_flight[Op.READ] - self._in_flight[Op.WRITE]
        if ahead:
            return Op.WRITE if ahead > 0 else Op.READ
        return Op(1 - self._last)

    def complete(self, request: Request, result: int) -> None:
        """Take in a completion: `result` is the number of bytes moved, or a negative errno."""
        self.meter.change(-1)
        self._in_flight[request.op] -= 1
        self._requests += 1
        course = request.course
        error = self._judge(request, result)
        if error:
            self._fail(request, error)
        elif request.size_bytes and course.failure is None:
            self._repeats.append(request)
            return
        course.in_flight -= 1
        if not course.in_flight and not course.unissued:
            self._under_way.remove(course)
            self._finished.append(course)

    def _judge(self, request: Request, result: int) -> int:
        """Account for what was moved; 0, or the errno with which the request is given up."""
        if result < 0:
            error = -result
            if error not in (errno.EINTR, errno.EAGAIN):
                return error
            moved = 0
        else:
            # A file that ended and a device that takes nothing: asking again would give the same answer.
            error = errno.ENODATA if request.op is Op.READ else errno.EIO
            if result == 0:
                return error
            whole = result >= request.size_bytes
            moved = request.size_bytes if whole else result - result % self._options.alignment
        self._moved_bytes[request.op] += moved
        request.advance(moved)
        request.attempts = 0 if moved else request.attempts + 1
        return error if request.attempts >= MAX_ATTEMPTS else 0

    def _fail(self, request: Request, error: int) -> None:
        course = request.course
        if course.failure is not None:
            return
        course.failure = Failure(error, request.fd, request.offset, request.size_bytes)
        if course.unissued:
            course.unissued = 0
            self._waiting[request.op].remove(course)
        kept = deque(other for other in self._repeats if other.course is not course)
        course.in_flight -= len(self._repeats) - len(kept)
        self._repeats = kept

    def take_finished(self) -> list[tuple[PythonOperation, Failure | None]]:
        """Return the operations finished since the last call, each with its failure."""
        finished, self._finished = self._finished, []
        return [(course.operation, course.failure) for course in finished]

    def abandon(self, error: int) -> None:
        """Fail everything under way: the engine itself broke."""
        for course in self._under_way:
            course.failure = course.failure or lost(course.operation, error)
        self._finished.extend(self._under_way)
        self._under_way.clear()

    def stats(self, cpu_ns: int) -> EngineStats:
        """Counters since the queue was made."""
        return EngineStats(
            requests=self._requests,
            retries=self._retries,
            bytes_read=self._moved_bytes[Op.READ],
            bytes_written=self._moved_bytes[Op.WRITE],
            depth_ns=self.meter.depth_ns,
            busy_ns=self.meter.busy_ns,
            cpu_ns=cpu_ns,
        )
