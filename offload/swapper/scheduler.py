"""Runs the tasks of every record in order, those of different records side by side, over one tier and one pool."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from nvme_offload.aio_native import FaultSpec
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.swapper.copy_worker import CopyWorker
from nvme_offload.offload.swapper.records import Piece, Residency, SlotRecord, StoredTensor, Task, Verb
from nvme_offload.offload.swapper.staged_copy import HostCopy, StagedCopy, SwapInCopy, SwapOutCopy, piece_starts
from nvme_offload.offload.swapper.tensor_transfer import TensorTransfer

logger = logging.getLogger(__name__)


class SlotScheduler:
    """Owns the tier, the staging buffers and the two threads that copy.

    Everything about records happens under `lock`: callers hold it when they call, and the threads take it when a
    copy is done. I/O and copies happen outside it.

    Args:
        config: the whole section; `offload_optimizer.device` is `nvme`.
        faults: failures to inject, for tests.
    """

    def __init__(self, config: OffloadConfig, faults: FaultSpec | None) -> None:
        offload = config.zero_optimization.offload_optimizer
        self.lock = threading.RLock()  # re-entrant: a signal handler may call what it interrupted
        self.prefetched_bytes = 0
        self.num_prefetch_hits = 0
        self._all_done = threading.Condition(self.lock)
        self._num_tasks = 0
        self._checksums = config.aio.checksums
        self._begin: dict[Verb, Callable[[SlotRecord, Task], None]] = {
            Verb.SWAP_OUT: self._begin_swap_out,
            Verb.SWAP_IN: self._begin_swap_in,
            Verb.PREFETCH: self._begin_prefetch,
            Verb.EVICT: self._evict,
            Verb.DELETE: self._delete,
        }
        self._workers: list[CopyWorker] = []
        self.tier = NvmeTier(config, faults=faults)
        try:
            alignment = self.tier.alignment
            buffer_bytes = max(1, offload.staging_budget // offload.buffer_count // alignment) * alignment
            self.pool = BufferPool(offload.buffer_count, buffer_bytes, pinned=bool(offload.pin_memory))
        except BaseException:
            self.tier.close()
            raise
        try:
            self.tier.register([self.pool])
            self._start_workers()
        except BaseException:
            self.close()
            raise

    def enqueue(self, record: SlotRecord, task: Task) -> TensorTransfer[Any]:
        """Run a task after those of its record that are waiting already."""
        self._num_tasks += 1
        record.tasks.append(task)
        self._advance(record)
        return task.transfer

    def wait_all(self) -> None:
        """Wait until no task is waiting or under way."""
        self._all_done.wait_for(lambda: self._num_tasks == 0)

    def close(self) -> None:
        """End the threads, delete the files, free the memory. All tasks must be done, the lock not held."""
        for worker in self._workers:
            worker.stop()
        self.tier.close()
        for worker in self._workers:
            worker.free()  # after the engine's threads, which ring the bells
        self.pool.close()

    def _start_workers(self) -> None:
        for name in ("swap-out", "swap-in"):
            self._workers.append(CopyWorker(name, self.pool))
        self._writer, self._reader = self._workers
        self._writer.start(self._reader)
        self._reader.start(self._writer)

    def _advance(self, record: SlotRecord) -> None:
        while record.tasks and not record.under_way:
            record.under_way = True
            task = record.tasks[0]
            self._begin[task.verb](record, task)

    def _end(self, record: SlotRecord, task: Task, error: Exception | None = None) -> None:
        record.tasks.popleft()
        record.under_way = False
        self._settle(task, error)

    def _settle(self, task: Task, error: Exception | None) -> None:
        if error is None:
            task.transfer.finish(task.result)
        else:
            task.transfer.fail(error)
        self._num_tasks -= 1
        if self._num_tasks == 0:
            self._all_done.notify_all()

    # swap_out

    def _begin_swap_out(self, record: SlotRecord, task: Task) -> None:
        self._drop_prefetched(record)
        record.become(Residency.WRITING)
        alignment = self.tier.alignment
        starts = piece_starts(task.spec.size_bytes, self.pool.num_buffers, self.pool.buffer_bytes, alignment)
        on_done = partial(self._end_swap_out, record, task)
        self._writer.submit(
            SwapOutCopy(self.tier, record.name, task, on_done, starts=starts, checksums=self._checksums)
        )

    def _end_swap_out(self, record: SlotRecord, task: Task, copy: StagedCopy) -> None:
        with self.lock:
            record.failure = str(copy.error or "")
            if copy.error is None:
                replaced = record.stored.pieces if record.stored else ()
                record.stored = StoredTensor(task.spec, copy.pieces)
                self._free(replaced)
                record.become(Residency.STORED)
            else:
                logger.error("swap_out of tensor %r failed: %s", record.name, copy.error)
                self._free(copy.pieces)
                record.become(Residency.STORED if record.stored else Residency.ABSENT)
                self._fail_readers(record, copy.error)
            self._end(record, task, copy.error)
            self._advance(record)

    def _fail_readers(self, record: SlotRecord, error: Exception) -> None:
        """Fail the reads called behind a swap_out that failed: they were promised bytes that do not exist."""
        readers = []
        for task in list(record.tasks)[1:]:
            if task.verb is Verb.SWAP_OUT:
                break
            if task.verb in (Verb.SWAP_IN, Verb.PREFETCH):
                readers.append(task)
        for task in readers:
            record.tasks.remove(task)
            if task.verb is Verb.PREFETCH:
                self.prefetched_bytes -= task.spec.size_bytes
            self._settle(task, error)

    # swap_in and prefetch

    def _begin_swap_in(self, record: SlotRecord, task: Task) -> None:
        on_done = partial(self._end_swap_in, record, task)
        prefetched = record.prefetched
        if prefetched is None:
            record.become(Residency.READING)
            self._read(record, task, on_done)
            return
        self.num_prefetch_hits += 1
        self._drop_prefetched(record)
        if task.replaceable:
            task.result = prefetched
            self._end(record, task)
        else:
            self._reader.submit(HostCopy(self.tier, record.name, task, on_done, source=prefetched))

    def _end_swap_in(self, record: SlotRecord, task: Task, copy: StagedCopy) -> None:
        with self.lock:
            if record.residency is Residency.READING:
                record.become(Residency.STORED)
            self._end(record, task, copy.error)
            self._advance(record)

    def _begin_prefetch(self, record: SlotRecord, task: Task) -> None:
        record.become(Residency.READING)
        self._read(record, task, partial(self._end_prefetch, record, task))

    def _end_prefetch(self, record: SlotRecord, task: Task, copy: StagedCopy) -> None:
        with self.lock:
            if copy.error is None:
                record.prefetched = task.tensor
                record.become(Residency.PREFETCHED)
            else:
                logger.warning("prefetch of tensor %r failed, swap_in reads it again: %s", record.name, copy.error)
                self.prefetched_bytes -= task.spec.size_bytes
                record.become(Residency.STORED)
            self._end(record, task, copy.error)
            self._advance(record)

    def _read(self, record: SlotRecord, task: Task, on_done: Callable[[StagedCopy], None]) -> None:
        assert record.stored is not None
        self._reader.submit(SwapInCopy(self.tier, record.name, task, on_done, pieces=record.stored.pieces))

    # evict and delete

    def _evict(self, record: SlotRecord, task: Task) -> None:
        self._drop_prefetched(record)
        self._end(record, task)

    def _delete(self, record: SlotRecord, task: Task) -> None:
        self._drop_prefetched(record)
        if record.stored is not None:
            self._free(record.stored.pieces)
            record.stored = None
            record.become(Residency.ABSENT)
        self._end(record, task)

    def _drop_prefetched(self, record: SlotRecord) -> None:
        if record.prefetched is not None:
            self.prefetched_bytes -= record.prefetched.nbytes
            record.prefetched = None
            record.become(Residency.STORED)

    def _free(self, pieces: list[Piece] | tuple[()]) -> None:
        for piece in pieces:
            self.tier.free(piece.extent)
