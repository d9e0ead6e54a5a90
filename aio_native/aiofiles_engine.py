"""The aiofiles engine: positional reads and writes in a thread pool, awaited by one event loop."""

import asyncio
import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import aiofiles.os

from .engine import EngineOptions, EngineUnavailable, Op
from .injection import Completion
from .python_engine import OwnerThread, PythonEngine
from .requests import Request

_TRANSFERS = {Op.READ: aiofiles.os.wrap(os.preadv), Op.WRITE: aiofiles.os.wrap(os.pwritev)}


class AiofilesThread(OwnerThread):
    """An event loop that hands every request to a thread of a pool, as one ``preadv`` or ``pwritev``."""

    max_depth = 32
    """A request in flight occupies a thread; more of them would wait for the interpreter, not the drive."""

    def __init__(self, name: str, options: EngineOptions) -> None:
        self._completed: list[Completion] = []
        self._transfers: set[asyncio.Task[None]] = set()
        self._bell = asyncio.Event()
        super().__init__(name, options)

    def _open(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(self.depth, f"{self.name}-engine", initializer=self._adopt_thread)
        try:
            self._start_threads()
        except BaseException:
            self._shut()
            raise

    def _start_threads(self) -> None:
        """Start all of them, at once.

        A pool that is refused a thread later keeps the request that it was for, and another of its threads would run it
        after we had said that it failed, on memory that may be somebody else's by then.
        """
        everyone = threading.Barrier(self.depth)
        try:
            for _ in range(self.depth):
                self._pool.submit(everyone.wait)
        except RuntimeError as error:
            everyone.abort()
            raise EngineUnavailable(
                f"the {self.name} engine needs {self.depth} threads, and the system refused one ({error}): lower "
                f"queue_depth, or raise the limit on processes (ulimit -u, or pids.max of the container)"
            ) from error

    def _start(self, request: Request) -> None:
        task = self._loop.create_task(self._transfer(request))
        self._transfers.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._transfers.discard)

    async def _transfer(self, request: Request) -> None:
        # A view of the caller's memory: nothing is copied, and a bad address is EFAULT from the kernel.
        memory = (ctypes.c_char * request.asked_bytes).from_address(request.address)
        try:
            result = await _TRANSFERS[request.op](request.fd, [memory], request.offset, executor=self._pool)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        except RuntimeError:
            result = -errno.ECANCELED  # the interpreter is shutting down and its thread pools take no more work
        self._completed.append((request, result))
        self._bell.set()

    def _reap(self, timeout: float | None) -> Iterable[Completion]:
        self._loop.run_until_complete(self._await_bell(timeout))
        completed, self._completed = self._completed, []
        return completed

    async def _await_bell(self, timeout: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._bell.wait()
        self._bell.clear()

    def _ring_bell(self) -> None:
        self._loop.call_soon_threadsafe(self._bell.set)

    def _shut(self) -> bool:
        self._pool.shutdown()  # waits for the transfers under way
        self._loop.close()
        return True


class AiofilesEngine(PythonEngine):
    """Requests in threads, awaited through aiofiles."""

    name = "aiofiles"
    owner_type = AiofilesThread
