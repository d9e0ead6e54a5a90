"""The transfer of a whole tensor, completed by the threads that copy it."""

import errno
import logging
from collections import deque
from collections.abc import Callable
from typing import TypeVar, cast

from nvme_offload.aio_native.engine import Failure, Op, Segment
from nvme_offload.aio_native.operation import PythonOperation
from ..storage.transfer import Transfer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TensorTransfer(Transfer[T]):
    """A transfer whose result and failure are known at its end, and whose failure may be more than an errno."""

    def __init__(self, op: Op, size_bytes: int) -> None:
        self._error: Exception | None = None
        self._callbacks: deque[Callable[[], object]] = deque()
        # Done when the last piece is; where the pieces are, they alone know.
        self._operation = PythonOperation(op, [Segment(-1, 0, 0, size_bytes)])
        super().__init__(self._operation, lambda failure: OSError(failure.errno, ""), cast(T, None))

    def on_done(self, callback: Callable[[], object]) -> None:
        """Have a function called once when the transfer is done, well or not; at once, and here, if it is.

        Args:
            callback: without arguments; `wait` in it returns or raises at once. A thread of the swapper calls it, which
                moves nothing meanwhile: it must be short, and must not wait for other transfers. What it raises is
                logged.
        """
        self._callbacks.append(callback)
        if self.done():
            self.call_back()

    def call_back(self) -> None:
        """Call what waits for the end. For the swapper only, which holds no lock then."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                callback()
            except Exception:
                logger.exception("what was to be called at the end of a transfer failed")

    def finish(self, result: T) -> None:
        """Make the transfer done, with this result. For the swapper only, which then has `call_back` done."""
        self._result = result
        self._operation.complete(None)

    def fail(self, error: Exception) -> None:
        """Make it done, raising `error` wherever it is waited for. As `finish`."""
        self._error = error
        code = getattr(error, "errno", None) or errno.EIO
        self._operation.complete(Failure(code, -1, 0, self._operation.size_bytes))

    def _outcome(self, failure: Failure | None) -> T:
        if self._error is not None:
            raise self._error
        return self._result
