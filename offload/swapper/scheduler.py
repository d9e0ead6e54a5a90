"""Runs the tasks of every record in order, those of different records side by side, over one tier and one pool.

A caller does one thing: it appends a task to its record. Whatever is read from that or follows from it (what is busy,
how much is promised, what runs next) is derived, or done by the threads, where no signal handler runs. So a caller that
is interrupted anywhere leaves a task that is there, and then runs, or one that is not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nvme_offload.aio_native import FaultSpec, Op
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.swapper.copy_worker import CopyWorker
from nvme_offload.offload.swapper.records import Piece, StoredValue, Task, TensorRecord, TensorResidency, Verb
from nvme_offload.offload.swapper.staged_copy import HostCopy, StagedCopy, SwapInCopy, SwapOutCopy, piece_starts
from nvme_offload.offload.swapper.tensor_transfer import TensorTransfer

logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 0.1  # somebody else may close the swapper meanwhile


class SlotScheduler:
    """Owns the tier, the staging buffers and the two threads that copy.

    Everything about records happens under `lock`: callers hold it when they enqueue, and the threads take it to begin
    a task and when a copy is done. I/O and copies happen outside it.

    Args:
        config: the whole section; `offload_optimizer.device` is `nvme`.
        faults: failures to inject, for tests.
    """

    def __init__(self, config: OffloadConfig, faults: FaultSpec | None) -> None:
        offload = config.zero_optimization.offload_optimizer
        self.lock = threading.RLock()  # re-entrant: a signal handler may call what it interrupted
        self.num_prefetch_hits = 0
        self._busy: set[TensorRecord] = set()
        """Every record with a task, and perhaps others for a moment."""
        self._prefetching: set[TensorRecord] = set()
        """Has every record with a prefetched copy or a task for one, and perhaps others for a moment."""
        self._waiting: list[threading.Lock] = []
        self._checksums = config.aio.checksums
        self._begin: dict[Verb, Callable[[TensorRecord, Task], None]] = {
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
            self.pool = BufferPool(offload.buffer_count, buffer_bytes)
        except BaseException:
            self.tier.close()
            raise
        try:
            self.tier.register([self.pool])
            self._start_workers()
        except BaseException:
            self.close()
            raise

    def enqueue(self, record: TensorRecord, task: Task) -> TensorTransfer[Any]:
        """Run a task after those of its record that are waiting already. The lock must be held."""
        # The thread is woken first and waits for the lock. Cut short before the last line, it finds nothing to do.
        worker = self._writer if task.verb is Verb.SWAP_OUT else self._reader
        worker.call(partial(self._resume, record))
        self._busy.add(record)
        if task.verb is Verb.PREFETCH:
            self._prefetching.add(record)
        record.tasks.append(task)
        return task.transfer

    @property
    def prefetched_bytes(self) -> int:
        """Bytes of host memory promised to prefetched copies."""
        return sum(record.prefetch_bytes for record in self._prefetching)

    def hand_over(self, record: TensorRecord, prefetched: torch.Tensor) -> TensorTransfer[torch.Tensor]:
        """A transfer, done already, of a prefetched copy, which is the caller's from now on. The lock must be held."""
        transfer = TensorTransfer[torch.Tensor](Op.READ, prefetched.nbytes)
        transfer.finish(prefetched)
        self.num_prefetch_hits += 1
        record.drop_prefetched()  # last: cut short before, the copy is still there
        return transfer

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

    def catch_up(self) -> None:
        """Wait until the threads have begun what they were called for. The lock must not be held."""
        for worker in self._workers:
            begun = threading.Lock()
            begun.acquire()
            worker.call(begun.release)
            while worker.alive and not begun.acquire(timeout=_LOOK_AGAIN_SECONDS):
                pass

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

    def _resume(self, record: TensorRecord) -> None:
        with self.lock:
            self._advance(record)

    def _advance(self, record: TensorRecord) -> None:
        while record.tasks and not record.under_way:
            record.under_way = True
            task = record.tasks[0]
            self._begin[task.verb](record, task)
        if not record.prefetch_bytes:
            self._prefetching.discard(record)
        if not record.tasks:
            self._busy.discard(record)
        if not self._busy:
            waiting, self._waiting = self._waiting, []
            for done in waiting:
                done.release()

    def _end(self, record: TensorRecord, task: Task, error: Exception | None = None) -> None:
        record.tasks.popleft()
        record.under_way = False
        self._settle(task, error)

    def _settle(self, task: Task, error: Exception | None) -> None:
        if error is None:
            task.transfer.finish(task.result)
        else:
            task.transfer.fail(error)

    # swap_out

    def _begin_swap_out(self, record: TensorRecord, task: Task) -> None:
        record.drop_prefetched()
        record.become(TensorResidency.WRITING)
        alignment = self.tier.alignment
        starts = piece_starts(task.spec.size_bytes, self.pool.num_buffers, self.pool.buffer_bytes, alignment)
        on_done = partial(self._end_swap_out, record, task)
        self._writer.submit(
            SwapOutCopy(self.tier, record.name, task, on_done, starts=starts, checksums=self._checksums)
        )

    def _end_swap_out(self, record: TensorRecord, task: Task, copy: StagedCopy) -> None:
        with self.lock:
            record.failure = str(copy.error or "")
            if copy.error is None:
                replaced = record.stored.pieces if record.stored else ()
                record.stored = StoredValue(task.spec, copy.pieces)
                self._free(replaced)
                record.become(TensorResidency.STORED)
            else:
                logger.error("swap_out of tensor %r failed: %s", record.name, copy.error)
                self._free(copy.pieces)
                record.become(TensorResidency.STORED if record.stored else TensorResidency.ABSENT)
                self._fail_readers(record, copy.error)
            self._end(record, task, copy.error)
            self._advance(record)

    def _fail_readers(self, record: TensorRecord, error: Exception) -> None:
        """Fail the reads called behind a swap_out that failed: they were promised bytes that do not exist."""
        readers = []
        for task in list(record.tasks)[1:]:
            if task.verb is Verb.SWAP_OUT:
                break
            if task.verb in (Verb.SWAP_IN, Verb.PREFETCH):
                readers.append(task)
        for task in readers:
            record.tasks.remove(task)
            self._settle(task, error)

    # swap_in and prefetch

    def _begin_swap_in(self, record: TensorRecord, task: Task) -> None:
        on_done = partial(self._end_swap_in, record, task)
        prefetched = record.prefetched
        if prefetched is None:
            record.become(TensorResidency.READING)
            self._read(record, task, on_done)
            return
        self.num_prefetch_hits += 1
        record.drop_prefetched()
        if task.replaceable:
            task.result = prefetched
            self._end(record, task)
        else:
            self._reader.submit(HostCopy(self.tier, record.name, task, on_done, source=prefetched))

    def _end_swap_in(self, record: TensorRecord, task: Task, copy: StagedCopy) -> None:
        with self.lock:
            if record.residency is TensorResidency.READING:
                record.become(TensorResidency.STORED)
            self._end(record, task, copy.error)
            self._advance(record)

    def _begin_prefetch(self, record: TensorRecord, task: Task) -> None:
        record.become(TensorResidency.READING)
        self._read(record, task, partial(self._end_prefetch, record, task))

    def _end_prefetch(self, record: TensorRecord, task: Task, copy: StagedCopy) -> None:
        with self.lock:
            if copy.error is None:
                record.prefetched = task.tensor
                record.become(TensorResidency.PREFETCHED)
            else:
                logger.warning("prefetch of tensor %r failed, swap_in reads it again: %s", record.name, copy.error)
                record.become(TensorResidency.STORED)
            self._end(record, task, copy.error)
            self._advance(record)

    def _read(self, record: TensorRecord, task: Task, on_done: Callable[[StagedCopy], None]) -> None:
        assert record.stored is not None
        self._reader.submit(SwapInCopy(self.tier, record.name, task, on_done, pieces=record.stored.pieces))

    # evict and delete

    def _evict(self, record: TensorRecord, task: Task) -> None:
        record.drop_prefetched()
        self._end(record, task)

    def _delete(self, record: TensorRecord, task: Task) -> None:
        record.drop_prefetched()
        if record.stored is not None:
            self._free(record.stored.pieces)
            record.stored = None
            record.become(TensorResidency.ABSENT)
        record.deleted = True
        self._end(record, task)

    def _free(self, pieces: list[Piece] | tuple[()]) -> None:
        for piece in pieces:
            self.tier.free(piece.extent)
