"""An engine whose writes are noted: begun when they are handed in, there for sure when somebody saw them done."""

import ctypes
from collections.abc import Sequence
from typing import Any

from nvme_offload.aio_native.engine import Engine, Op, Operation, Segment
from tests.support.power_loss.events import Completed, Wrote


class RecordedEngine:
    """Hands everything on to `engine`, of any kind, and notes its writes in `recording`.

    An fsync covers what is done, and a program knows that of an operation only by asking it: as long as nobody asked,
    the write is under way. One that failed is so for ever.
    """

    def __init__(self, engine: Engine, recording: Any) -> None:
        self._engine = engine
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, op: Op, segments: Sequence[Segment]) -> Any:
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


class _RecordedOperation:
    def __init__(self, operation: Operation, recording: Any, token: int) -> None:
        self._operation = operation
        self._recording = recording
        self._token: int | None = token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)

    def done(self) -> bool:
        return self._seen(self._operation.done())

    def wait(self, timeout: float | None = None) -> bool:
        return self._seen(self._operation.wait(timeout))

    def _seen(self, done: bool) -> bool:
        with self._recording.lock:
            if done and self._token is not None:
                token, self._token = self._token, None
                if self._operation.failure is None:
                    self._recording.note(Completed, token)
        return done
