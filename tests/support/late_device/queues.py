"""Streams and events of the stand-in, and the memory that what is queued there still needs."""

from __future__ import annotations

import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch

POISON = 0xA5
LOCK = threading.RLock()
LANDING_SECONDS = 0.5


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses from the first byte of a tensor to behind its last."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor on the CPU with bytes that are no plausible numbers."""
    pattern = bytearray([POISON] * tensor.element_size())
    with torch.no_grad():
        tensor.copy_(torch.frombuffer(pattern, dtype=tensor.dtype)[0])


@contextmanager
def _saying() -> Iterator[None]:
    """Say at once what goes wrong in a thread of autograd's: torch ends the process there.

    It leaves its guard of the current stream while the error is pending, and the guard of a device of Python's asks
    Python for the kind of device, in a function that must not raise (``PythonDeviceGuard::exchangeStream``).
    """
    try:
        yield
    except BaseException:
        if isinstance(threading.current_thread(), threading._DummyThread):
            traceback.print_exc()
        raise


@dataclass(eq=False)
class Work:
    """Something queued on a stream."""

    run: Callable[[], object]
    touches: Sequence[torch.Tensor] = ()  # memory that it reads or writes, on the host's side of the curtain
    at_once: bool = False
    """Whether it happens as soon as what is before it in its stream has, though nobody waits for it."""
    stream: Stream | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.extents = [*map(extent_of, self.touches)]


def is_ours() -> bool:
    """Whether this thread works behind the scenes: updates behind a step, gradients that land."""
    return threading.current_thread().name.startswith("nvme_offload: ")


class Late:
    """What the whole device knows."""

    def __init__(self) -> None:
        self.pending: dict[Work, None] = {}
        self.waits: Counter[str] = Counter()
        """How often threads of the host waited, by what they called; threads of ours apart."""
        self.num_copies = 0  # copies that were queued between host and device
        self.pinned: dict[int, int] = {}  # bytes that are page-locked, by address
        self.pinned_by_torch: set[int] = set()
        """Addresses of those that torch keeps by itself until copies are done."""
        self.pinned_on: list[int] = []  # number of the device that was current when memory was page-locked
        self.refusals = 0  # how many of the next requests to page-lock are refused
        self.latest_error = 0
        self.unlocked_early = 0  # how often page-locked memory was unlocked before copies from it or to it were done
        self.requests_left = 0
        """The request for memory of this number is refused, once; 0: none is."""
        self.warns = False  # whether torch warns of waits: see ``torch.cuda.set_sync_debug_mode``
        self.freed_early = 0  # how often memory was given away before what another stream does with it was done
        self.copies_of: Counter[bool] = Counter()
        """Copies between host and device that were queued on a stream that computes (True), or on another one."""
        self.hasty = False  # whether a stream that somebody waits for runs on to its end, as it may
        self.prompt = False  # whether the streams that compute run at once, as they may, and only others are late
        self.size_bytes = 1 << 40  # its memory
        self.live_bytes = 0  # memory of the device that somebody has
        self.waiting_bytes = 0
        """Memory that was freed while a stream that was recorded for it had not come so far: nobody gets it yet."""
        self.peak_bytes = 0  # the most of both at once, since it was set to zero
        self.num_landing = 0  # how many threads wait for gradients to land
        self.contexts: set[int] = set()  # numbers of the devices on which some thread has opened a context
        self.available = False
        self.is_capturing = False  # whether a graph is captured, in every thread

    @property
    def current(self) -> int:
        """Number of the device that this thread uses: at first the first one, in every thread."""
        return getattr(_local, "device", 0)

    @current.setter
    def current(self, number: int) -> None:
        _local.device = number

    def count(self, live_bytes: int, waiting_bytes: int = 0) -> None:
        """Note that memory is had, or waits, that did not before; or no more, where it is less than nothing."""
        self.live_bytes += live_bytes
        self.waiting_bytes += waiting_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + self.waiting_bytes)

    def ask_for_memory(self) -> None:
        """Refuse an allocation, or a copy between host and device, if a test says so.

        Not in a thread of autograd's: what is raised there ends the process (`_saying`).
        """
        if not self.requests_left or isinstance(threading.current_thread(), threading._DummyThread):
            return
        self.requests_left -= 1
        if not self.requests_left:
            raise torch.OutOfMemoryError("late: no memory is left, says the test")

    def note_wait(self, why: str) -> None:
        self.contexts.add(self.current)
        self.waits[f"{why} behind the scenes" if is_ours() else why] += 1
        if self.warns and not is_ours():
            warnings.warn(f"called a synchronizing operation: {why}", stacklevel=2)

    @property
    def num_waits(self) -> int:
        """How often whoever trains waited."""
        return sum(count for why, count in self.waits.items() if not why.endswith("behind the scenes"))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        start, stop = extent_of(tensor)
        return tensor.numel() > 0 and any(at <= start and stop <= at + size for at, size in self.pinned.items())

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether somebody keeps host memory until copies are done: torch, of what it has pinned itself."""
        return not self.is_pinned(tensor) or tensor.data_ptr() in self.pinned_by_torch

    def overlaps_pending(self, tensor: torch.Tensor) -> bool:
        return bool(self.users_of(*extent_of(tensor)))

    def users_of(self, start: int, stop: int) -> list[Work]:
        """Return the queued work that reads or writes memory between two addresses."""
        return [
            work
            for work in [*self.pending]  # at once: a finalizer may queue more
            if any(start < last and first < stop for first, last in work.extents)
        ]


LATE = Late()
_local = threading.local()


def number_of(device: Any) -> int:
    """The number of a device, which may be said in any way; without one, of the device that this thread uses."""
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return LATE.current if index is None else index


def set_device(device: Any) -> None:
    """See ``torch.cuda.set_device``: this opens a context."""
    LATE.current = number_of(device)
    LATE.contexts.add(LATE.current)


class Stream:
    """A queue that runs as far as somebody waits for it. See ``torch.cuda.Stream``."""

    stream_id, device_type = 0, 20  # FSDP2 of torch 2.15 hands them to an operator that does nothing

    def __init__(self, device: Any = None, priority: int = 0, **unused: Any) -> None:
        self.device_index = number_of(device)
        self.device = torch.device("late", self.device_index)
        self.queue: list[Work] = []
        self.done = 0
        self.freed: list[Work] = []  # what the next owners of memory that was freed do with it: for the next allocation
        self._is_running = False

    def __enter__(self) -> Self:
        self._entered = on_stream(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)

    def push(self, work: Work) -> None:
        with LOCK:
            work.stream = self
            LATE.pending[work] = None
            self.queue.append(work)
            self.run_to(len(self.queue) if LATE.prompt and computes(self) else self.done)

    def run_to(self, number: int) -> None:
        with LOCK:
            if self._is_running:  # it waits for a stream that waits for what it has done before
                assert self.done >= number, "two streams wait for each other"
                return
            self._is_running = True
            try:
                while self.done < number or (self.done < len(self.queue) and self.queue[self.done].at_once):
                    self._run_next()
            finally:
                self._is_running = False

    def _run_next(self) -> None:
        work = self.queue[self.done]
        self.done += 1
        try:
            with torch.inference_mode(), _saying():  # a mode in which its own tensors can be written, and others, too
                work.run()
        finally:
            del LATE.pending[work]
            work.run, work.touches, work.extents = lambda: None, (), []

    def synchronize(self) -> None:
        LATE.note_wait("Stream.synchronize")
        self.run_to(len(self.queue))

    def query(self) -> bool:
        return self.done == len(self.queue)

    def wait_event(self, event: Event) -> None:
        stream, number = event.stream, event.number
        if stream is not None and stream is not self:
            self.push(Work(lambda: stream.run_to(number)))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """See ``torch.cuda.Event``. Asked often enough whether it is done, it is: else whoever asks would ask for ever."""

    def __init__(self, *unused: Any, **options: Any) -> None:
        self.stream: Stream | None = None
        self.number = 0
        self._asked = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.stream, self.number = stream, len(stream.queue)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        if self.stream is None or self.stream.done >= self.number:
            return True
        self._asked += 1
        if self._asked > 3:
            self.stream.run_to(self.number)
        return self.stream.done >= self.number

    def _wait_for_others(self, stream: Stream) -> None:
        """Let the device be late also where a thread of ours waits for each copy: until somebody waits for that one."""
        latest = time.monotonic() + LANDING_SECONDS
        while stream.done < self.number and not LATE.num_landing and time.monotonic() < latest:
            time.sleep(0.001)

    def synchronize(self) -> None:
        LATE.note_wait("Event.synchronize")
        if self.stream is not None:
            if threading.current_thread().name == "nvme_offload: gradients":
                self._wait_for_others(self.stream)
            self.stream.run_to(len(self.stream.queue) if LATE.hasty else self.number)


_defaults: dict[int, Stream] = {}


def current_stream(device: Any = None) -> Stream:
    found: Stream | None = getattr(_local, "streams", {}).get(number_of(device))
    return found or default_stream(device)


def default_stream(device: Any = None) -> Stream:
    number = number_of(device)
    return _defaults.setdefault(number, Stream(number))


def computes(stream: Stream) -> bool:
    """Whether this is a stream that computes: the one that threads have from their beginning."""
    return stream in _defaults.values()


def _set_stream(stream: Stream) -> None:
    set_device(stream.device)
    _local.streams = {**getattr(_local, "streams", {}), LATE.current: stream}


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """See ``torch.cuda.stream``: what leaves it goes back to the device that the thread used before."""
    if stream is None:
        yield
        return
    there, here = current_stream(stream.device), current_stream()
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(there)
        _set_stream(here)


def run_all() -> None:
    """Let everything happen, as at the end of the world."""
    with LOCK:
        while LATE.pending:
            stream = next(iter(LATE.pending)).stream
            stream.run_to(len(stream.queue))


def reset() -> None:
    """Let everything happen, and forget what was counted."""
    run_all()
    LATE.waits.clear()
    LATE.pinned_on.clear()
    LATE.contexts.clear()
    LATE.copies_of.clear()
    LATE.num_copies = LATE.refusals = LATE.latest_error = LATE.current = LATE.unlocked_early = LATE.freed_early = 0
    LATE.requests_left = 0
