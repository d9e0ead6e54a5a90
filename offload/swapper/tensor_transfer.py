"""The transfer of a whole tensor, completed by the threads that copy it."""

from __future__ import annotations

import errno
from typing import TypeVar, cast

from nvme_offload.aio_native import Failure, Op, Segment
from nvme_offload.aio_native.operation import PythonOperation
from nvme_offload.offload.storage.transfer import Transfer

T = TypeVar("T")


class TensorTransfer(Transfer[T]):
    """A transfer whose result and failure are known at its end, and whose failure may be more than an errno.

    Args:
        op: direction, seen from memory.
        size_bytes: bytes of the tensor.
    """

    def __init__(self, op: Op, size_bytes: int) -> None:
        self._error: Exception | None = None
        # Done when the last piece is; where the pieces are, they alone know.
        self._operation = PythonOperation(op, [Segment(-1, 0, 0, size_bytes)])
        super().__init__(self._operation, lambda failure: OSError(failure.errno, ""), cast(T, None))

    def finish(self, result: T) -> None:
        """Make the transfer done, with this result. For the swapper only."""
        self._result = result
        self._operation.complete(None)

    def fail(self, error: Exception) -> None:
        """Make it done, raising `error` wherever it is waited for. For the swapper only."""
        self._error = error
        code = getattr(error, "errno", None) or errno.EIO
        self._operation.complete(Failure(code, -1, 0, self._operation.size_bytes))

    def _outcome(self, failure: Failure | None) -> T:
        if self._error is not None:
            raise self._error
        return self._result
