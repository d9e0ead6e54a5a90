"""An engine whose writes are noted: begun when they are handed in, there for sure when somebody saw them done."""

import ctypes
from collections.abc import Sequence
from typing import Any

from nvme_offload.aio_native import Engine, EngineStats, Failure, Op, Operation, Registration, Segment
from tests.support.power_loss.events import Completed, Wrote


class RecordedEngine(Engine):
    """Hands everything on to `engine`, of any kind, and notes its writes in `recording`.

    An fsync covers what is done, and a program knows that of an operation only by asking it: as long as nobody asked,
    the write is under way. One that failed is so for ever.
    """

    def __init__(self, engine: Engine, recording: Any) -> None:
        self.name, self.options = engine.name, engine.options
        self._engine = engine
        self._recording = recording

    @property
    def breakdown(self) -> Any:
        return self._engine.breakdown

    def submit(self, op: Op, segments: Sequence[Segment]) -> Operation | None:
        with self._recording.lock:
            operation = self._engine.submit(op, segments)
            if operation is None or op is Op.READ:
                return operation
            token = self._recording.next_token()
            for fd, offset, address, size_bytes in segments:
                if (inode := self._recording.inode(fd)) is not None:
                    data = ctypes.string_at(address, size_bytes)
                    self._recording.note(Wrote, inode, offset, data, False, token)
            return _RecordedOperation(operation, self._recording, token)

    def register(self, buffers: Sequence[tuple[int, int]], fds: Sequence[int]) -> Registration:
        return self._engine.register(buffers, fds)

    def drain(self) -> None:
        self._engine.drain()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        self._engine.close()


class _RecordedOperation:
    def __init__(self, operation: Operation, recording: Any, token: int) -> None:
        self._operation = operation
        self._recording = recording
        self._token: int | None = token

    @property
    def size_bytes(self) -> int:
        return self._operation.size_bytes

    @property
    def failure(self) -> Failure | None:
        return self._operation.failure

    @property
    def submitted_ns(self) -> int:
        return self._operation.submitted_ns

    @property
    def completed_ns(self) -> int:
        return self._operation.completed_ns

    def done(self) -> bool:
        return self._seen(self._operation.done())

    def wait(self, timeout: float | None = None) -> bool:
        return self._seen(self._operation.wait(timeout))

    def add_waker(self, eventfd: int) -> None:
        self._operation.add_waker(eventfd)

    def _seen(self, done: bool) -> bool:
        with self._recording.lock:
            if done and self._token is not None:
                token, self._token = self._token, None
                if self._operation.failure is None:
                    self._recording.note(Completed, token)
        return done
