"""The pyuring engine: io_uring through the binding from PyPI; no compiler needed."""

import ctypes
import errno
import os
import select
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from .engine import EngineOptions, EngineUnavailable, Op
from .injection import Completion
from .python_engine import OwnerThread, PythonEngine
from .requests import Request
from .uring_refusal import explain_refusal, probe_errno

_BELL = 0
"""Tag of the read that is always pending on the eventfd while the owner thread waits."""

LAST_REQUESTS_SECONDS = 40
"""A ring that broke may take so long to end its last requests: drives answer, or are reset, within half a minute."""

_TRANSIENT = (errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOMEM)
"""Answers of io_uring_enter(2) with which it has taken nothing and may be called again."""


class PyuringThread(OwnerThread):
    """Submits to a ring and reaps from it; a read pending on an eventfd wakes it up.

    The binding has no asynchronous operations on registered buffers or files, and submits each request with a
    system call of its own.
    """

    max_depth = 2**15 - 1
    """The kernel's limit for a ring (IORING_MAX_ENTRIES), less the read on the eventfd."""

    def __init__(self, name: str, options: EngineOptions) -> None:
        self._binding: Any = _load_binding()
        self._in_flight: dict[int, Request] = {}
        self._last_tag = _BELL
        self._unsubmitted = False
        """Entries lie in the submission queue that the kernel did not take when they were put there."""
        self._bell_awaited = False
        self._bell_count = ctypes.c_uint64()
        super().__init__(name, options)

    def _open(self) -> None:
        # Made here because the ring serves only the thread that made it (IORING_SETUP_SINGLE_ISSUER).
        self._ring = _make_ring(self._binding, self.depth + 1)
        self._poll = select.poll()
        self._poll.register(self._ring.ring_fd, select.POLLIN)
        self._eventfd = os.eventfd(0)
        self._watched = self._register_witness()

    def _register_witness(self) -> int | None:
        """The end of a pipe that hangs up when the kernel has let go of the ring, the last of its requests included.

        The ring has the only other end: it holds registered files until every request has come back.
        """
        watched, given = os.pipe2(os.O_CLOEXEC)
        try:
            self._ring.register_files([given])
        except OSError:  # refused: nobody will know
            os.close(watched)
            return None
        finally:
            os.close(given)
        return watched

    def _start(self, request: Request) -> None:
        self._last_tag += 1
        self._in_flight[self._last_tag] = request
        begin = self._ring.read_async_ptr if request.op is Op.READ else self._ring.write_async_ptr
        self._put(begin, request.fd, request.address, request.asked_bytes, request.offset, self._last_tag)

    def _put(self, begin: Callable[..., int], *arguments: int) -> None:
        try:
            begin(*arguments)
        except self._binding.UringError:
            # The ring has an entry for every request, so it was queued and only the system call was refused:
            # the request is on its way, and the next submission, ours or `_submit_again`, takes it along.
            self._unsubmitted = True

    def _submit_again(self) -> None:
        try:
            self._ring.submit()
            self._unsubmitted = False
        except self._binding.UringError as error:
            if error.errno not in _TRANSIENT:
                raise

    def _reap(self, timeout: float | None) -> Iterable[Completion]:
        if not self._bell_awaited:
            self._bell_awaited = True
            self._put(self._ring.read_async_ptr, self._eventfd, ctypes.addressof(self._bell_count), 8, 0, _BELL)
        if self._unsubmitted:
            self._submit_again()
            timeout = 0.001 if timeout is None else timeout
        return self._collect(self._first(timeout))

    def _first(self, timeout: float | None) -> tuple[int, int] | None:
        """The first completion as (tag, result); None when there is none within `timeout` seconds."""
        first: tuple[int, int] | None = None
        if timeout is None:
            try:
                first = self._ring.wait_completion()
            except self._binding.UringError as error:
                if error.errno not in _TRANSIENT:
                    raise
        else:
            self._poll.poll(timeout * 1000)  # the binding cannot wait with a limit
            first = self._ring.peek_completion()
        return first

    def _collect(self, completion: tuple[int, int] | None) -> list[Completion]:
        """Take in the given completion and all others that are there."""
        completions: list[Completion] = []
        while completion is not None:
            tag, result = completion
            if tag == _BELL:
                self._bell_awaited = False
            else:
                completions.append((self._in_flight.pop(tag), result))
            completion = self._ring.peek_completion()
        return completions

    def _ring_bell(self) -> None:
        os.eventfd_write(self._eventfd, 1)

    def _shut(self) -> bool:
        self._ring.close()
        os.close(self._eventfd)
        ended = not self._in_flight
        if self._watched is not None:
            if self._in_flight:
                released = select.poll()
                released.register(self._watched, 0)
                ended = bool(released.poll(1000 * LAST_REQUESTS_SECONDS))
            os.close(self._watched)
        return ended


class PyuringEngine(PythonEngine):
    """io_uring through the binding."""

    name = "pyuring"
    owner_type = PyuringThread


def _load_binding() -> ModuleType:
    try:
        import pyuring as binding  # the package from PyPI; imports are absolute
    except (ImportError, OSError) as error:
        raise EngineUnavailable(
            f"the pyuring engine needs the package pyuring, which cannot be imported ({error}): "
            "`pip install pyuring==0.3.0` (Linux, x86_64, glibc, CPython up to 3.13), or choose the engine aiofiles"
        ) from error
    return binding


def _make_ring(binding: Any, entries: int) -> Any:
    """A ring with the flags that save interrupts, or on kernels before 6.1 one without them."""
    # The binding loses the errno of a refusal, and does not find out that entering is forbidden.
    if code := probe_errno(entries):
        raise EngineUnavailable(explain_refusal(code))
    thrifty = (
        binding.IORING_SETUP_SINGLE_ISSUER
        | binding.IORING_SETUP_DEFER_TASKRUN
        | binding.IORING_SETUP_COOP_TASKRUN
        | binding.IORING_SETUP_TASKRUN_FLAG
    )
    for flags in (thrifty, 0):
        try:
            return binding.UringCtx(entries=entries, setup_flags=flags)
        except (binding.UringError, OSError) as error:
            refusal = error
    raise EngineUnavailable(explain_refusal(errno.EOPNOTSUPP)) from refusal
