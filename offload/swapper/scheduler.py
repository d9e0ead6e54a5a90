"""Runs the tasks of every record in order, those of different records side by side, over one tier and one pool.

A caller does one thing: it appends a task to its record, or takes a record from those with a name. Whatever is read
from that or follows from it (what is busy, how much is promised, what runs next) is derived, or done by the threads,
where no signal handler runs. So a caller that is interrupted anywhere leaves a task that is there, and then runs, or
one that is not.
"""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from nvme_offload.aio_native.engine import Op
from nvme_offload.aio_native.faults import FaultSpec
from ..config.section import OffloadConfig
from ..errors import OutOfSpaceError
from ..host.buffer_pool import BufferPool
from ..staging.mover import Mover
from ..storage.nvme_tier import NvmeTier
from .copy_worker import CopyWorker
from .pieces import Piece, checksum_of, piece_starts
from .records import Prefetch, SwapIn, Task, TensorRecord
from .tensor_transfer import TensorTransfer

KIND = "tensor"
"""The tier counts these bytes under this name, see `Tier.bytes_of_kind`."""


class TaskScheduler:
    """Owns the tier, the staging buffers and the two threads that copy.

    Everything about records happens under `lock`: callers hold it when they enqueue, and the threads take it to begin a
    task and when it is over. I/O and copies happen outside it.
    """

    def __init__(self, config: OffloadConfig, faults: FaultSpec | None) -> None:
        offload = config.zero_optimization.offload_optimizer
        self.lock = threading.RLock()  # re-entrant: a signal handler may call what it interrupted
        self.records: dict[str, TensorRecord] = {}
        """By name. A record that is not here any more is given up when its tasks are done."""
        self.num_prefetch_hits = 0
        self._busy: set[TensorRecord] = set()
        """Every record with a task, and perhaps others for a moment."""
        self._prefetching: set[TensorRecord] = set()
        """Every record with a prefetched copy or a task for one, and perhaps others."""
        self._waiting: list[threading.Lock] = []
        self._workers: dict[Op, CopyWorker] = {}
        self._is_parked = False
        self.tier = NvmeTier(config, faults=faults)
        try:
            alignment = self.tier.alignment
            buffer_bytes = max(1, offload.staging_budget // offload.buffer_count // alignment) * alignment
            self.pool = BufferPool(offload.buffer_count, buffer_bytes)
        except BaseException:
            self.tier.close()
            raise
        try:
            self.tier.register([self.pool])
            self._start_workers(checksums=config.aio.checksums)
        except BaseException:
            self.close()
            raise

    def enqueue(self, task: Task) -> TensorTransfer[Any]:
        """Run a task after those of its record that are waiting already. The lock must be held."""
        self._wake()
        self.look_after(task.record, task.op)
        if isinstance(task, Prefetch):
            self._prefetching.add(task.record)
        task.record.append(task)
        return task.transfer

    def park(self) -> None:
        """Wait for all tasks, and give the memory of the staging buffers back until the next one."""
        self.wait_all()
        with self.lock:
            self._is_parked = True
            self.tier.register([])
            self.pool.discard()

    def _wake(self) -> None:
        if self._is_parked:
            self.tier.register([self.pool])
            self._is_parked = False

    def look_after(self, record: TensorRecord, op: Op = Op.READ) -> None:
        """Have a thread do what follows from a change that is about to be made. The lock must be held till then."""
        # The thread is woken first and waits for the lock. Where the change is not made, it finds nothing to do.
        self._workers[op].call(partial(self._resume, record))
        self._busy.add(record)

    @property
    def prefetched_bytes(self) -> int:
        """Bytes of host memory promised to prefetched copies."""
        return sum(record.prefetch_bytes for record in self._prefetching)

    def hand_over(self, record: TensorRecord, prefetch: Prefetch) -> TensorTransfer[torch.Tensor]:
        """Give a copy that is there to the caller, whose it is from now on. The lock must be held."""
        self.num_prefetch_hits += 1
        record.forget_copy()  # last: cut short before, the copy is still there
        return prefetch.transfer

    def cut(self, name: str, size_bytes: int) -> list[Piece]:
        """Cut a tensor into pieces, each in an extent of its own. On OutOfSpaceError nothing is kept."""
        # An extent for each piece, not one for all: striped one by one, every piece keeps every drive busy, and
        # holes that smaller tensors left are used.
        starts = piece_starts(size_bytes, self.pool.num_buffers, self.pool.buffer_bytes, self.tier.alignment)
        stops = [min(start + starts.step, size_bytes) for start in starts]
        try:
            extents = self.tier.reserve([stop - start for start, stop in zip(starts, stops, strict=True)])
        except OutOfSpaceError as error:
            error.add_note(f"tensor {name!r} needs {size_bytes} bytes in all")
            raise
        return [
            Piece(index, f"tensor {name!r}, bytes {start}..{stop}", extent.size_bytes, extent, start=start, stop=stop)
            for index, (start, stop, extent) in enumerate(zip(starts, stops, extents, strict=True))
        ]

    def wait_all(self) -> None:
        """Wait until no task is waiting or under way. The lock must not be held."""
        while True:
            done = threading.Lock()
            with self.lock:
                if not self._busy:
                    return
                done.acquire()
                self._waiting.append(done)
            done.acquire()

    def close(self) -> None:
        """End the threads, delete the files, free the memory. All tasks must be done, the lock not held."""
        for worker in self._workers.values():
            worker.stop()
        self.tier.close()
        for worker in self._workers.values():
            worker.free()  # after the engine's threads, which ring
        self.pool.close()
        for record in self.records.values():
            record.forget_copy()
        self.records.clear()

    def _start_workers(self, *, checksums: bool) -> None:
        # Both machines lease from one pool. So neither may `recover`, which looks at all leases; and need not, as no
        # signal handler runs in the threads.
        for op, name in ((Op.WRITE, "swap-out"), (Op.READ, "swap-in")):
            staging: Mover[Piece] = Mover(KIND, self.tier, self.pool, checksum_of if checksums else None)
            self._workers[op] = CopyWorker(name, staging, self.pool, self._end)
        self._workers[Op.WRITE].start(self._workers[Op.READ])
        self._workers[Op.READ].start(self._workers[Op.WRITE])

    def _resume(self, record: TensorRecord) -> None:
        with self.lock:
            self._advance(record)

    def _end(self, task: Task) -> None:
        with self.lock:
            self.num_prefetch_hits += isinstance(task, SwapIn) and task.copy is not None
            pieces, ended = task.record.end_first()
            self._free(pieces)
            for each in ended:
                each.tell()
            self._advance(task.record)
        for each in ended:  # without the lock, for which others may wait who hold what a callback needs
            each.transfer.call_back()

    def _advance(self, record: TensorRecord) -> None:
        task = record.begin_next()
        if task is not None:
            self._workers[task.op].submit(task)
        elif not record.tasks:
            if self.records.get(record.name) is not record:
                self._free(record.give_up())
            self._busy.discard(record)
        if not record.prefetch_bytes:
            self._prefetching.discard(record)
        if not self._busy:
            waiting, self._waiting = self._waiting, []
            for done in waiting:
                done.release()

    def _free(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            assert piece.extent is not None
            self.tier.free(piece.extent)
