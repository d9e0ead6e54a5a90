"""The Python engines share a handle to a thread, which ends with it."""

import os
import time
from collections.abc import Sequence
from typing import ClassVar

from nvme_offload.aio_native.engine import (
    DRAIN_POLL_SECONDS,
    Breakdown,
    Engine,
    EngineOptions,
    EngineStats,
    Op,
    Registration,
    Segment,
)
from nvme_offload.aio_native.finalizing import finalize
from nvme_offload.aio_native.operation import PythonOperation
from nvme_offload.aio_native.owner_thread import OwnerThread
from nvme_offload.aio_native.requests import check_segments


class PythonEngine(Engine):
    """An engine whose owner thread is written in Python, and ends when nobody has the engine any more.

    So it may be lost to an exception anywhere between its construction and its owner.
    """

    owner_type: ClassVar[type[OwnerThread]]

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._owner = self.owner_type(self.name, options)
        # Before it begins, so that there is no moment at which nobody would end it. Not when the interpreter ends: it
        # is a daemon, and whoever has memory under way then waits for that.
        finalize(self, self._owner.end).atexit = False
        self._owner.begin()

    @property
    def depth(self) -> int:
        """Requests in flight at most."""
        return self._owner.depth

    @property
    def breakdown(self) -> Breakdown | None:
        """Return how the owner thread broke; None while it works."""
        return self._owner.breakdown

    def submit(self, op: Op, segments: Sequence[Segment]) -> PythonOperation | None:
        """Hand in an operation and return at once; None if `max_operations` are under way."""
        self._check_process()
        check_segments(segments, self.options.alignment)
        return self._owner.hand_in(op, segments)

    def drain(self) -> None:
        """Wait until nothing is under way."""
        self._check_process()
        while self._owner.look():
            time.sleep(DRAIN_POLL_SECONDS)

    def register(self, buffers: Sequence[tuple[int, int]], fds: Sequence[int]) -> Registration:
        """Register nothing: the requests of this engine have no registered form."""
        self._check_process()
        return Registration()

    def stats(self) -> EngineStats:
        """Return the counters since the engine was opened; they can be read after ``close`` too."""
        self._check_process()
        return self._owner.stats()

    def close(self) -> None:
        """Finish what is under way and stop the owner thread. Idempotent; does nothing in a forked child."""
        self._owner.end()

    def _check_process(self) -> None:
        if os.getpid() != self._owner.pid:
            raise RuntimeError(
                f"this {self.name} engine was made in process {self._owner.pid} and its owner thread stayed there: "
                f"make an engine of its own in process {os.getpid()}"
            )
