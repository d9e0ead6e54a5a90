"""Saved storages within a budget of memory, and beyond it on NVMe.

The oldest leave first and the newest stay, since backward wants them in about the reverse order. So what is written is
what was saved less the budget. Four rules hold:

1. A storage is kept as long as somebody has a handle of it. The store has weak references: where a graph dies, with or
   without a backward, its memory is free at once, and its space on the drive with the next call.
2. No memory is let go before its bytes are in staging buffers, and none of a write that failed before.
3. One lock guards all of it. Nobody waits while holding it; threads of the swapper take it when they hold no other.
4. A finalizer, which may run anywhere, takes no lock: it leaves word.
5. An exception may come between any two instructions of a caller. Intent is written down first, and what was cut short
   is made good by the next call (`_tidy`). So a list may have too much, which whoever goes through it passes over.
"""

import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .._torch_private import storage_identity, version_of
from ..devices.device import is_device, is_host
from ..errors import ClosedError, StateError
from ..host.page_locks import PageLocks
from ..storage.nvme_tier import NvmeTier
from ..swapper.tensor_swapper import TensorSwapper
from ..swapper.tensor_transfer import TensorTransfer
from ..units import MiB, format_bytes
from .device_copies import DeviceCopies
from .kept import ActivationResidency, ActivationStats, Holder, KeptTensor, SavedRecord, bytes_of
from .targets import TargetPool

_EARLY_SHARE, _MAX_EARLY_BYTES = 1 / 64, 16 * MiB
"""Writes begin this share of the budget early, or so many bytes: nobody waits for a copy then."""
_MAX_IDLE_BYTES = 64 * MiB
_ANNOUNCED = float("inf")
_LOOK_AGAIN_SECONDS = 0.1  # an exception may come between a change and the word of it


class ReadOrder:
    """The order in which records are read next: backwards from the one that was taken last, or as announced."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        """The next one last."""
        self._skipped: set[int] = set()
        self._latest = -1.0

    def announce(self, numbers: Iterable[int]) -> None:
        """Have these come next, in this order."""
        self._numbers = list(numbers)[::-1]
        self._latest = _ANNOUNCED

    def begin(self) -> None:
        """Expect what comes from here on backwards again, whatever was announced."""
        self._latest = -1.0 if self._latest == _ANNOUNCED else self._latest

    def follow(self, number: int, known: Iterable[int]) -> None:
        """Take note of the one that is taken now, of all that are `known`, in the order in which they were kept."""
        if self._latest == _ANNOUNCED:
            return  # who announces keeps more meanwhile, for which what is foreseen beyond that would leave no room
        if number > self._latest:  # another backward
            self._numbers = [other for other in known if other < number]
            self._skipped.clear()
        self._latest = number

    @property
    def next(self) -> int | None:
        """Return the next one; None if nothing is foreseen."""
        return self._numbers[-1] if self._numbers else None

    def skip_next(self) -> None:
        """Go on to the one behind it, which cannot be read yet."""
        self._skipped.add(self._numbers[-1])
        self.drop_next()

    def was_skipped(self, number: int) -> bool:
        """Whether one was skipped that can be read now: asked once."""
        found = number in self._skipped
        self._skipped.discard(number)
        return found

    def drop_next(self) -> None:
        """Go on to the one behind it."""
        self._numbers.pop()


class DeviceSide:
    """The device whose tensors leave, from the first one on, and host memory that is copied and read into.

    What is read from the drive next, and what is brought to the device, is known here, too.
    """

    def __init__(self, host_budget: int, locks: PageLocks) -> None:
        self._host_budget = host_budget
        self._locks = locks
        self.memory = TargetPool(min(_MAX_IDLE_BYTES, host_budget))
        self.copies: DeviceCopies | None = None
        self.reads, self.order = ReadOrder(), ReadOrder()

    def of(self, device: torch.device) -> DeviceCopies:
        """Return the copies of the device that this process uses; from the first on, memory is page-locked."""
        if self.copies is None:
            self.copies = DeviceCopies(device)
            remedy = "lower activations.host_budget"
            self.memory = TargetPool(self._host_budget, lambda region: self._locks.lock(region, device, remedy))
        return self.copies

    def close(self) -> None:
        """Wait for all copies. Idempotent."""
        copies, self.copies = self.copies, None
        if copies is not None:
            copies.close()


class ActivationStore:
    """Keeps storages of saved tensors. Thread-safe.

    What has no room in `host_budget` goes to the swapper, which is the store's from here on. The budget is for tensors
    that stay and those on their way; staging buffers and at most 64 MiB of memory for reads come beside it.
    """

    def __init__(self, swapper: TensorSwapper | None, host_budget: int, locks: PageLocks) -> None:
        self._swapper = swapper
        self._device = DeviceSide(host_budget, locks)
        self._lock = threading.RLock()  # re-entrant: a signal handler may use what it interrupted
        self._ended = threading.Lock()
        """Released when a copy or a write has ended; whoever waits for that takes it."""
        self._records: dict[int, SavedRecord] = {}
        self._by_storage: dict[Hashable, int] = {}
        self._queue: OrderedDict[int, None] = OrderedDict()
        """Numbers of those whose memory may be let go, the next one first, and perhaps others."""
        self._leaving: dict[int, SavedRecord] = {}
        """Records that are being copied to staging buffers, by number, and perhaps others."""
        self._refusal: Exception | None = None
        """The failure of the latest write; None if it did not fail."""
        self._gone: deque[weakref.KeyedRef[int, Holder]] = deque()
        """References of records that nobody has any more. C adds them: no handler comes before that."""
        self._since = 0
        self._stats = ActivationStats(host_budget=host_budget)

    @property
    def tier(self) -> NvmeTier | None:
        """The swap space and its engine, if there is one."""
        return self._swapper.tier if self._swapper is not None else None

    def keep(self, tensor: torch.Tensor) -> KeptTensor | None:
        """Keep the storage of a tensor, which the caller may then let go; views of one storage share it.

        Returns None where the tensor stays: host memory has no room for it, and there is no drive.
        Raises SwapIOError where the drive has none. Nothing is lost.
        """
        version = version_of(tensor)
        with self._lock:
            self._tidy()
            record = self._records.get(self._by_storage.get(storage_identity(tensor.untyped_storage()), -1))
            holder = record.holder if record is not None and record.is_of(version, self._since) else None
            if holder is None:  # another record for changed bytes, or for one that is gone and not yet buried
                size_bytes = tensor.untyped_storage().nbytes()
                if self._swapper is None and self._stats.held_bytes + size_bytes > self._stats.host_budget:
                    return None
                holder = self._add(tensor, version)
            handle, before = KeptTensor(holder, self.fetch, tensor), self._refusal
            self._send_off()
            has_room = self._stats.held_bytes <= self._stats.host_budget
        if not has_room:  # outside of the lock, which those who end copies take
            self._make_room(before)
        return handle

    def begin(self) -> None:
        """Begin a forward: what was saved before and is in memory no more may have been filled again since.

        NumPy, ``.data`` and loaders with buffers of their own change memory, and no version tells of it.
        """
        with self._lock:
            self._tidy()
            self._since = self._stats.num_saved
            self._device.reads.begin()
            self._device.order.begin()

    def moves_from(self, device: torch.device) -> bool:
        """Whether tensors leave a device: the one that the process uses does, and of host memory what has a drive."""
        if is_host(device):
            return self._swapper is not None
        copies = self._device.copies
        return is_device(device) and (copies is None or copies.device == device)

    def _add(self, tensor: torch.Tensor, version: int) -> Holder:
        self._stats.add(num_saved=1, saved_bytes=tensor.untyped_storage().nbytes())
        number = self._stats.num_saved - 1  # counted before: whatever comes now, no two have one name on the drive
        record = SavedRecord(number, tensor.untyped_storage(), version, self._stats, self._gone.append)
        memory = bytes_of(tensor)
        if is_host(tensor.device):
            holder = record.hold(memory)
        else:
            copies = self._device.of(tensor.device)
            holder = copies.leave(record, memory, self._device.memory.take(record.size_bytes))
        self._records[number] = record  # first: burying goes from here to the other lists
        self._by_storage[record.key] = number
        self._queue[number] = None
        record.count(has_memory=True)
        self._stats.add()  # for the peak
        return holder

    def announce(self, handles: Iterable[object]) -> None:
        """Say in which order tensors will be taken next, and begin to read. Without it that is newest first."""
        with self._lock:
            self._tidy()
            numbers = [handle.number for handle in handles if isinstance(handle, KeptTensor)]
            for order in (self._device.reads, self._device.order):
                order.announce(numbers)
            self._read_ahead()

    def fetch(self, holder: Holder) -> torch.Tensor:
        """Return the bytes of a storage, 1D uint8, where they were saved; those that are wanted next set out."""
        if holder.record.landed is None:
            return self._fetch(holder)
        with self._lock:
            self._tidy()
            if (copies := self._device.copies) is None:
                raise ClosedError("ActivationSwapper")
            if copies.has(holder):  # host memory may have left for the drive: nothing is read for this
                self._device.reads.follow(holder.record.number, self._records)
                self._read_ahead()
                return self._take_there(copies, holder, None)
            last = copies.to_wait_for()
        if last is not None:  # outside of the lock, as all waiting
            last.synchronize()
        memory = self._fetch(holder)
        with self._lock:
            return self._take_there(copies, holder, memory)

    def _take_there(self, copies: DeviceCopies, holder: Holder, memory: torch.Tensor | None) -> torch.Tensor:
        there = copies.take(holder, memory)
        self._device.order.follow(holder.record.number, self._records)
        self._bring_ahead(copies)
        return there

    def _fetch(self, holder: Holder) -> torch.Tensor:
        """Return the bytes of a storage in host memory."""
        record = holder.record
        with self._lock:
            self._tidy()
            if record.residency is ActivationResidency.TIER:
                self._send_off(record.size_bytes)  # and wait for nothing: this comes first
                self._read_now(record)
            elif record.residency is ActivationResidency.COMING:
                self._stats.add(num_reads_foreseen=1)
            self._device.reads.follow(record.number, self._records)  # behind its own read, which is wanted first
            self._read_ahead()
            if holder.memory is not None:
                return holder.memory
            transfer = record.transfer
        assert transfer is not None
        start = time.perf_counter()
        memory, failure = _outcome(transfer)
        if failure is not None:
            with self._lock:
                if record.transfer is transfer and record.residency is ActivationResidency.COMING:
                    record.become(ActivationResidency.TIER, None)  # else another thread has, and may read again
            try:
                raise failure
            finally:
                del failure  # it would keep this frame, and this frame it
        assert memory is not None
        with self._lock:
            self._stats.add(seconds_waiting_read=time.perf_counter() - start)
            self._arrive(record, memory)
        return memory

    def _arrive(self, record: SavedRecord, memory: torch.Tensor) -> None:
        if record.residency is ActivationResidency.COMING:  # else another thread has waited for it, too
            self._queue[record.number] = None  # first: see the rules above
            record.become(ActivationResidency.BOTH, memory)

    def stats(self) -> ActivationStats:
        """Return what was kept and moved so far."""
        with self._lock:
            self._tidy()
            return replace(self._stats, num_kept=len(self._records))

    def close(self) -> None:
        """Delete the files and free the memory; what has left it, or a device, cannot be taken any more. Idempotent."""
        self._device.close()
        if self._swapper is not None:
            self._swapper.close()

    def _tidy(self) -> None:
        """Make good what an exception cut short, and forget those that nobody has any more."""
        for record in self._leaving.values():
            if record.residency is ActivationResidency.LEAVING and not record.leaves:  # nobody will hear of its end
                self._delete(record)
                self._come_back(record)
        self._bury()

    def park(self) -> None:
        """Give memory that nobody uses back, and that of staging buffers until they are used."""
        with self._lock:
            self._tidy()
        self._device.memory.clear()
        if self._swapper is not None:
            self._swapper.park()

    def _bury(self) -> None:
        """Forget those that nobody has any more, and give their space back."""
        for _ in range(len(self._gone)):  # not until it is empty: some are put back
            number = self._gone[0].key  # it is taken off when all is done, so that what is cut short is done again
            if (copies := self._device.copies) is not None:
                copies.forget([number])
                if copies.copies(number):
                    self._gone.rotate(-1)  # its memory is taken until the copy has ended
                    continue
            if (record := self._records.get(number)) is not None:
                for listed in (self._queue, self._leaving):
                    listed.pop(number, None)
                if self._by_storage.get(record.key) == number:  # else a later version of that storage
                    del self._by_storage[record.key]
                self._delete(record)
                record.count(has_memory=False)
                del self._records[number]  # last: from here on nothing of it is done again
            self._gone.popleft()

    def _delete(self, record: SavedRecord) -> None:
        if self._swapper is not None and record.was_sent:
            with suppress(ClosedError, KeyError):  # no file is there: closed, deleted, or never written
                self._swapper.delete(record.name)

    def _come_back(self, record: SavedRecord) -> None:
        """Keep one in memory that could not leave; it is the next to leave."""
        if (holder := record.holder) is not None:
            self._queue[record.number] = None  # first: intent, see the rules above
            self._queue.move_to_end(record.number, last=False)  # it is the oldest
            record.become(ActivationResidency.MEMORY, holder.memory)

    # Out of memory

    def _make_room(self, before: Exception | None) -> None:
        """Wait until what is held is within the budget; raise what kept the rest from being written.

        What failed `before` is no reason: until a write fails now, the next one is tried when a copy has ended.
        """
        start = time.perf_counter()
        while not self._has_room(before):
            self._ended.acquire(timeout=_LOOK_AGAIN_SECONDS)
        self._wake()  # others who wait: a release wakes one
        with self._lock:
            self._stats.add(seconds_waiting_write=time.perf_counter() - start)
            refusal = self._refusal if self._refusal is not before else None
            if refusal is not None and self._stats.held_bytes > self._stats.host_budget:
                raise self._no_room(refusal)

    def _has_room(self, before: Exception | None) -> bool:
        """Have what must leave do so; returns whether it has, or cannot."""
        with self._lock:
            if self._refusal is None or self._refusal is before:
                self._send_off()
            return self._stats.held_bytes <= self._stats.host_budget or not self._leaving_bytes()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # nobody has taken it since it was released before
            self._ended.release()

    def _leaving_bytes(self) -> int:
        """Bytes of all that are being copied to staging buffers."""
        leaving = {n: its for n, its in self._leaving.items() if its.residency is ActivationResidency.LEAVING}
        self._leaving = leaving  # at once: an exception leaves the one or the other
        return sum(record.size_bytes for record in leaving.values())

    def _no_room(self, refusal: Exception) -> Exception:
        said = _anew(refusal)  # or whoever raises it next would add the note once more
        said.add_note(
            f"Saved tensors fill activations.host_budget, {format_bytes(self._stats.host_budget)}, and the rest has no "
            "place: free space on activations.nvme_path, name another folder, or allow more host memory"
        )
        return said

    def _send_off(self, wanted: int = 0) -> None:
        """Have the oldest leave until there is room for so many bytes more.

        After a write that failed only what must leave does, and one at a time.
        """
        if self._swapper is None:
            return
        budget = self._stats.host_budget
        early = 0 if wanted or self._refusal is not None else min(budget * _EARLY_SHARE, _MAX_EARLY_BYTES)
        while self._queue and self._stats.held_bytes + wanted - self._leaving_bytes() > budget - early:
            if self._refusal is not None and self._leaving:
                return  # one at a time: it tries whether the drive takes writes again
            number = next(iter(self._queue))
            record = self._records.get(number)
            holder = record.holder if record is not None else None
            if record is not None and holder is not None and holder.memory is not None:  # else the list had too much
                if record.residency is ActivationResidency.BOTH:
                    record.become(ActivationResidency.TIER, None)
                elif record.residency is ActivationResidency.MEMORY:
                    self._write(record, holder.memory)
                    continue  # it may be back already
            self._queue.pop(number, None)

    def _write(self, record: SavedRecord, memory: torch.Tensor) -> None:
        assert self._swapper is not None
        self._leaving[record.number] = record  # first: `_tidy` looks here for what nobody writes
        record.become(ActivationResidency.LEAVING, memory)
        self._queue.pop(record.number, None)
        transfer = self._swapper.swap_out(
            record.name,
            memory,
            after=record.landed,
            on_copied=partial(self._end_copy, record.number),
            on_end=partial(self._end_write, record.number),
        )
        record.note_write(transfer)
        self._stats.add(written_bytes=record.size_bytes)

    def _end_copy(self, number: int) -> None:
        with self._lock:
            self._bury()
            if (record := self._leaving.get(number)) is not None and record.leaves:
                record.become(ActivationResidency.TIER, None)
                if self._device.reads.was_skipped(number):  # reading ahead has gone past it
                    with suppress(StateError):  # as in `_read_ahead`
                        self._read(record)
            self._wake()

    def _end_write(self, number: int, error: Exception | None) -> None:
        refusal = _anew(error) if error is not None else None  # the swapper has logged it
        with self._lock:
            self._bury()
            record = self._records.get(number)
            if refusal is None or record is not None:  # what nobody wants any more may fail
                self._refusal = refusal
            if record is not None and record.leaves:  # else its memory is gone, and who takes it is told
                self._come_back(record)
            self._wake()

    # Into memory

    def _read_ahead(self) -> None:
        """Begin to read what is wanted next, as far as the budget has room."""
        while (number := self._device.reads.next) is not None:
            record = self._records.get(number)
            if record is not None and record.residency is ActivationResidency.LEAVING:
                self._device.reads.skip_next()  # it has not left yet, and is read when it has
                continue
            if record is not None and record.residency is ActivationResidency.TIER:
                if self._stats.held_bytes + record.size_bytes > self._stats.host_budget:
                    return  # no other is read instead: it would take the room that this one waits for
                with suppress(StateError):  # its write has failed: whoever takes it is told
                    self._read(record)
            self._device.reads.drop_next()

    def _read_now(self, record: SavedRecord) -> None:
        written = record.transfer
        with suppress(StateError):  # nothing is stored, because the write has failed
            self._read(record)
            return
        assert written is not None  # else it has not left memory
        raise _outcome(written)[1] or AssertionError

    def _read(self, record: SavedRecord) -> None:
        assert self._swapper is not None
        transfer = self._swapper.swap_in(record.name, self._device.memory.take(record.size_bytes))
        record.become(ActivationResidency.COMING, None, transfer)  # what is cut short before is read again
        self._stats.add(num_reads=1, read_bytes=record.size_bytes)

    # Between memory and a device

    def _bring_ahead(self, copies: DeviceCopies) -> None:
        """Copy to the device what is wanted next, as far as it is in memory."""
        while copies.may_bring and (number := self._device.order.next) is not None:
            record = self._records.get(number)
            holder = record.holder if record is not None and record.landed is not None else None
            if record is not None and holder is not None and not copies.has(holder):
                if record.residency is ActivationResidency.COMING:
                    self._look_for(record)
                if holder.memory is None:
                    return  # the next one would take its place: there are few
                copies.bring_ahead(number, holder.memory)
            self._device.order.drop_next()

    def _look_for(self, record: SavedRecord) -> None:
        """Note that a read is over, if it is and did not fail: whoever takes what failed is told."""
        assert record.transfer is not None
        if record.transfer.done():
            memory, _ = _outcome(record.transfer)
            if memory is not None:
                self._stats.add(num_reads_foreseen=1)
                self._arrive(record, memory)


def _outcome(transfer: TensorTransfer[Any]) -> tuple[torch.Tensor | None, Exception | None]:
    """Wait for a transfer; returns what it brought, or None, and the failure.

    The failure is a copy without a traceback. A transfer keeps what it raises, a traceback keeps its frames, and those
    the graph that has the transfer: all of that would wait for a garbage collection.
    """
    try:
        return transfer.wait(), None
    except Exception as error:
        error.__context__ = None
        return None, _anew(error.with_traceback(None))


def _anew(error: Exception) -> Exception:
    """An equal error that nobody else raises, with notes of its own."""
    renewed = copy(error)
    if hasattr(error, "__notes__"):
        vars(renewed)["__notes__"] = [*error.__notes__]
    return renewed
