"""Bytes on their way: a handle that can be waited for or awaited, and that keeps its buffers alive."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Generator
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from nvme_offload.aio_native.bell import Bell
from nvme_offload.aio_native.engine import Failure, Operation

T = TypeVar("T")


class Transfer(Generic[T]):
    """A group of requests under way.

    ``wait(timeout=None)`` blocks, ``done()`` asks, ``await`` suspends the task; all of them may be used, several
    times and from several threads or tasks. A transfer that failed raises the same OSError every time. Cancelling a
    task that awaits a transfer does not cancel the transfer: its buffers stay held until the last request came back.

    Args:
        operation: what the engine is doing.
        to_error: makes the exception for a failure.
        result: what ``wait`` returns; it also keeps the memory alive that the operation uses.
        again: begins a failed operation once more; None if that is of no use. ``wait`` calls it.
    """

    def __init__(
        self,
        operation: Operation,
        to_error: Callable[[Failure], OSError],
        result: T,
        again: Callable[[Operation], Operation | None] = lambda operation: None,
    ) -> None:
        self.operation = operation
        """The engine's operation; another one after `again`."""
        self._to_error = to_error
        self._result = result
        self._again = again

    def _refuse(self, other: object) -> NoReturn:
        raise TypeError("a Transfer is no tensor: call wait() on it, or await it, and compute with what that returns")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __getitem__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = _refuse

    def done(self) -> bool:
        """Whether all of the transfer has completed, well or not.

        It is done, too, if its engine or drive failed; ``wait`` then waits until another one has repeated it.
        """
        return self.operation.done()

    def wait(self, timeout: float | None = None) -> T:
        """Block until done and return the result.

        Raises:
            TimeoutError: not done within `timeout` seconds; it goes on.
            SwapIOError: a request failed; names path, offset, size and errno.
        """
        operation = self.operation
        while True:
            if not operation.wait(timeout):
                raise TimeoutError(f"transfer of {operation.size_bytes} bytes not done after {timeout} s")
            if (renewed := self._begun_again(operation)) is None:
                return self._outcome(operation.failure)
            operation = renewed

    def __await__(self) -> Generator[Any, None, T]:
        operation = self.operation
        while True:
            if not operation.done():
                yield from _LoopWaker.of_running_loop().wait_for(operation).__await__()
            if (renewed := self._begun_again(operation)) is None:
                return self._outcome(operation.failure)
            operation = renewed

    def _begun_again(self, ended: Operation) -> Operation | None:
        renewed = self._again(ended) if ended.failure else None
        if renewed is not None:
            self.operation = renewed
        return renewed

    def _outcome(self, failure: Failure | None) -> T:
        if failure is not None:
            raise self._to_error(failure)
        return self._result


class _LoopWaker:
    """Wakes tasks of one event loop: one bell that any number of operations ring when they are done.

    Engine threads never run Python for this, so a busy interpreter cannot slow the I/O down.
    """

    _wakers: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopWaker]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._bell = Bell()
        self._waiting: dict[asyncio.Future[None], Operation] = {}

    @classmethod
    def of_running_loop(cls) -> _LoopWaker:
        loop = asyncio.get_running_loop()
        waker = cls._wakers.get(loop)
        if waker is None:
            # What waited in loops that were closed midway refers to their wakers and keeps them.
            for closed in [known for known in list(cls._wakers) if known.is_closed()]:
                cls._wakers.pop(closed)._bell.close()
            waker = cls()
            loop.add_reader(waker._bell.fileno(), waker._wake)
            cls._wakers[loop] = waker  # only what the loop took: epoll may have no room, and some loops no readers
        return waker

    async def wait_for(self, operation: Operation) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = operation
        try:
            if self._bell.hang_on(operation):
                await future
            else:  # no descriptor is left
                await asyncio.to_thread(operation.wait)
        finally:
            self._waiting.pop(future, None)

    def _wake(self) -> None:
        self._bell.wait(0)
        for future, operation in list(self._waiting.items()):
            if operation.done() and not future.done():
                future.set_result(None)
