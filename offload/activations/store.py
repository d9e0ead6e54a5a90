"""Saved storages within a budget of memory, and beyond it on NVMe.

The oldest leave first and the newest stay, since backward wants them in about the reverse order. So what is written is
what was saved less the budget. Four rules hold:

1. A storage is kept as long as somebody has a handle of it. The store has weak references: where a graph dies, with or
   without a backward, its memory is free at once, and its space on the drive with the next call.
2. No memory is let go before its bytes are in staging buffers, and none of a write that failed before.
3. One lock guards all of it. Nobody waits for a transfer while holding it; threads of the swapper take it when they
   hold no other.
4. A finalizer, which may run anywhere, takes no lock: it leaves word.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from nvme_offload.offload._torch_private import storage_identity, version_of
from nvme_offload.offload.activations.device_copies import DeviceCopies
from nvme_offload.offload.activations.kept import ActivationResidency, Holder, KeptTensor, SavedRecord, bytes_of
from nvme_offload.offload.activations.targets import TargetPool
from nvme_offload.offload.devices.device import is_device, is_host
from nvme_offload.offload.errors import ClosedError, StateError
from nvme_offload.offload.host.page_locks import PageLocks
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.swapper.tensor_swapper import TensorSwapper
from nvme_offload.offload.swapper.tensor_transfer import TensorTransfer
from nvme_offload.offload.units import MiB, format_bytes

_EARLY_SHARE, _MAX_EARLY_BYTES = 1 / 64, 16 * MiB
"""Writes begin this share of the budget early, or so many bytes: nobody waits for a copy then."""
_MAX_IDLE_BYTES = 64 * MiB
_ANNOUNCED = float("inf")
_LOOK_AGAIN_SECONDS = 0.1  # an exception may come between a change and the word of it


@dataclass(kw_only=True)
class ActivationStats:
    """Figures of what was saved for backward, and where it went; bytes of whole storages, each counted once."""

    host_budget: int
    """Bytes of memory that saved tensors may take."""
    num_kept: int = 0
    """Storages that somebody has a handle of."""
    held_bytes: int = 0
    """Their bytes in memory, on their way out of it or into it."""
    peak_held_bytes: int = 0
    """The most that `held_bytes` was."""
    num_saved: int = 0
    saved_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    num_reads: int = 0
    num_reads_foreseen: int = 0
    """Reads that had begun before somebody asked for the tensor."""
    seconds_waiting_write: float = 0.0
    """Time for which a forward waited until memory was copied to staging buffers."""
    seconds_waiting_read: float = 0.0
    """Time for which a backward waited for reads."""

    @property
    def seconds_waiting(self) -> float:
        """Time for which forwards and backwards waited."""
        return self.seconds_waiting_write + self.seconds_waiting_read

    def add(self, **amounts: float) -> None:
        """Add to figures, by name. For the store only."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)


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

    def follow(self, number: int, known: Iterable[int]) -> None:
        """Take note of the one that is taken now, of all that are `known`, in the order in which they were kept."""
        if self._latest == _ANNOUNCED:
            return
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
        if not self._numbers and self._latest == _ANNOUNCED:
            self._latest = -1


class DeviceSide:
    """The device whose tensors leave, from the first one on, and host memory that is copied and read into."""

    def __init__(self, host_budget: int, locks: PageLocks) -> None:
        self._host_budget = host_budget
        self._locks = locks
        self.memory = TargetPool(min(_MAX_IDLE_BYTES, host_budget))
        self.copies: DeviceCopies | None = None
        self.order = ReadOrder()

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
        self._changed = threading.Condition(threading.RLock())
        self._records: dict[int, SavedRecord] = {}
        self._by_storage: dict[Hashable, int] = {}
        self._queue: OrderedDict[int, None] = OrderedDict()
        """Numbers of those whose memory may be let go, the next one first."""
        self._leaving: dict[int, int] = {}
        """Bytes of each one that is being copied to staging buffers."""
        self._refusal: Exception | None = None
        """The failure of the latest write; None if it did not fail."""
        self._gone: deque[int] = deque()
        """Numbers of those that nobody has any more."""
        self._order = ReadOrder()
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
        with self._changed:
            self._bury()
            record = self._records.get(self._by_storage.get(storage_identity(tensor.untyped_storage()), -1))
            holder = record.holder if record is not None and record.is_of(version, self._since) else None
            if holder is None:
                size_bytes = tensor.untyped_storage().nbytes()
                if self._swapper is None and self._stats.held_bytes + size_bytes > self._stats.host_budget:
                    return None
                holder = self._add(tensor, version)
            handle = KeptTensor(holder, self.fetch, tensor)
            self._make_room()
        return handle

    def begin(self) -> None:
        """Begin a forward: what was saved before and is in memory no more may have been filled again since.

        NumPy, ``.data`` and loaders with buffers of their own change memory, and no version tells of it.
        """
        with self._changed:
            self._bury()
            self._since = self._stats.num_saved

    def moves_from(self, device: torch.device) -> bool:
        """Whether tensors leave a device: the one that the process uses does, and of host memory what has a drive."""
        if is_host(device):
            return self._swapper is not None
        copies = self._device.copies
        return is_device(device) and (copies is None or copies.device == device)

    def _add(self, tensor: torch.Tensor, version: int) -> Holder:
        number, gone = self._stats.num_saved, self._gone
        record = SavedRecord(number, tensor.untyped_storage(), version, lambda _: gone.append(number))
        memory = bytes_of(tensor)
        if is_host(tensor.device):
            holder = record.hold(memory)
        else:
            copies = self._device.of(tensor.device)
            holder = copies.leave(record, memory, self._device.memory.take(record.size_bytes))
        self._records[number] = record
        self._by_storage[record.key] = number
        self._queue[number] = None
        self._stats.add(num_saved=1, saved_bytes=record.size_bytes, held_bytes=record.size_bytes)
        return holder

    def announce(self, handles: Iterable[object]) -> None:
        """Say in which order tensors will be taken next, and begin to read. Without it that is newest first."""
        with self._changed:
            self._bury()
            numbers = [handle.number for handle in handles if isinstance(handle, KeptTensor)]
            self._order.announce(numbers)
            self._device.order.announce(numbers)
            self._read_ahead()

    def fetch(self, holder: Holder) -> torch.Tensor:
        """Return the bytes of a storage, 1D uint8, where they were saved; those that are wanted next set out."""
        if holder.record.landed is None:
            return self._fetch(holder)
        with self._changed:
            self._bury()
            if (copies := self._device.copies) is None:
                raise ClosedError("ActivationSwapper")
            if copies.has(holder):
                self._order.follow(holder.record.number, self._records)
                self._read_ahead()
                return self._take_there(copies, holder, None)
            last = copies.to_wait_for()
        if last is not None:
            last.synchronize()
        memory = self._fetch(holder)
        with self._changed:
            return self._take_there(copies, holder, memory)

    def _take_there(self, copies: DeviceCopies, holder: Holder, memory: torch.Tensor | None) -> torch.Tensor:
        there = copies.take(holder, memory)
        self._device.order.follow(holder.record.number, self._records)
        self._bring_ahead(copies)
        return there

    def _fetch(self, holder: Holder) -> torch.Tensor:
        """Return the bytes of a storage in host memory."""
        record = holder.record
        with self._changed:
            self._bury()
            if record.residency is ActivationResidency.TIER:
                self._send_off(record.size_bytes)  # and wait for nothing: this comes first
                self._read_now(record)
            elif record.residency is ActivationResidency.COMING:
                self._stats.add(num_reads_foreseen=1)
            self._order.follow(record.number, self._records)
            self._read_ahead()
            if holder.memory is not None:
                return holder.memory
            transfer = record.transfer
        assert transfer is not None
        start = time.perf_counter()
        memory, failure = _outcome(transfer)
        if failure is not None:
            with self._changed:
                if record.transfer is transfer and record.residency is ActivationResidency.COMING:
                    self._let_go(record)
            try:
                raise failure
            finally:
                del failure  # it would keep this frame, and this frame it
        assert memory is not None
        with self._changed:
            self._stats.add(seconds_waiting_read=time.perf_counter() - start)
            self._arrive(record, memory)
        return memory

    def _arrive(self, record: SavedRecord, memory: torch.Tensor) -> None:
        if record.residency is ActivationResidency.COMING:
            record.become(ActivationResidency.BOTH, memory)
            self._queue[record.number] = None

    def stats(self) -> ActivationStats:
        """Return what was kept and moved so far."""
        with self._changed:
            self._bury()
            return replace(self._stats, num_kept=len(self._records))

    def close(self) -> None:
        """Delete the files and free the memory; what has left it, or a device, cannot be taken any more. Idempotent."""
        self._device.close()
        if self._swapper is not None:
            self._swapper.close()

    def _bury(self) -> None:
        """Forget those that nobody has any more, and give their space back."""
        for number in [self._gone.popleft() for _ in range(len(self._gone))]:
            if (copies := self._device.copies) is not None:
                copies.forget([number])
                if copies.copies(number):
                    self._gone.append(number)  # its memory is taken until the copy has ended
                    continue
            record = self._records.pop(number)
            self._queue.pop(number, None)
            if self._by_storage.get(record.key) == number:
                del self._by_storage[record.key]
            if record.residency is not ActivationResidency.TIER:
                self._stats.add(held_bytes=-record.size_bytes)
            if record.transfer is not None and self._swapper is not None:
                with suppress(ClosedError):
                    self._swapper.delete(record.name)

    def _let_go(self, record: SavedRecord) -> None:
        record.become(ActivationResidency.TIER, None)
        self._stats.add(held_bytes=-record.size_bytes)

    # Out of memory

    def _make_room(self) -> None:
        """Wait until what is held is within the budget; raise what kept the rest from being written.

        What failed before is no reason: until a write fails now, the next one is tried when a copy has ended.
        """
        before = self._refusal
        self._send_off()
        start = time.perf_counter()
        while self._stats.held_bytes > self._stats.host_budget and self._leaving:
            self._changed.wait(_LOOK_AGAIN_SECONDS)
            if self._refusal is None or self._refusal is before:
                self._send_off()
        self._stats.add(seconds_waiting_write=time.perf_counter() - start)
        refusal = self._refusal if self._refusal is not before else None
        if refusal is not None and self._stats.held_bytes > self._stats.host_budget:
            raise self._no_room(refusal)

    def _no_room(self, refusal: Exception) -> Exception:
        said = _anew(refusal)
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
        while self._queue and self._stats.held_bytes + wanted - sum(self._leaving.values()) > budget - early:
            if self._refusal is not None and self._leaving:
                return
            number, _ = self._queue.popitem(last=False)
            record = self._records[number]
            if record.residency is ActivationResidency.BOTH:
                self._let_go(record)
            elif (holder := record.holder) is not None and holder.memory is not None:
                self._write(record, holder.memory)

    def _write(self, record: SavedRecord, memory: torch.Tensor) -> None:
        assert self._swapper is not None
        number, on_copied = record.number, partial(self._end_copy, record.number)
        transfer = self._swapper.swap_out(record.name, memory, after=record.landed, on_copied=on_copied)
        record.become(ActivationResidency.LEAVING, memory, transfer)
        self._leaving[number] = record.size_bytes
        transfer.on_done(partial(self._end_write, number, transfer))
        self._stats.add(written_bytes=record.size_bytes)

    def _end_copy(self, number: int) -> None:
        with self._changed:
            self._bury()
            if self._leaving.pop(number, None) is not None and number in self._records:
                self._let_go(self._records[number])
                if self._order.was_skipped(number):
                    with suppress(StateError):
                        self._read(self._records[number])
            self._changed.notify_all()

    def _end_write(self, number: int, transfer: TensorTransfer[None]) -> None:
        _, refusal = _outcome(transfer)  # the swapper has logged it
        with self._changed:
            self._bury()
            record = self._records.get(number)
            if refusal is None or record is not None:  # what nobody wants any more may fail
                self._refusal = refusal
            if self._leaving.pop(number, None) is not None and record is not None and record.holder is not None:
                record.become(ActivationResidency.MEMORY, record.holder.memory)
                self._queue[number] = None
                self._queue.move_to_end(number, last=False)
            self._changed.notify_all()

    # Into memory

    def _read_ahead(self) -> None:
        """Begin to read what is wanted next, as far as the budget has room."""
        while (number := self._order.next) is not None:
            record = self._records.get(number)
            if record is not None and record.residency is ActivationResidency.LEAVING:
                self._order.skip_next()  # it has not left yet, and is read when it has
                continue
            if record is not None and record.residency is ActivationResidency.TIER:
                if self._stats.held_bytes + record.size_bytes > self._stats.host_budget:
                    return
                with suppress(StateError):  # its write has failed: whoever takes it is told
                    self._read(record)
            self._order.drop_next()

    def _read_now(self, record: SavedRecord) -> None:
        written = record.transfer
        with suppress(StateError):  # nothing is stored, because the write has failed
            self._read(record)
            return
        assert written is not None
        raise _outcome(written)[1] or AssertionError

    def _read(self, record: SavedRecord) -> None:
        assert self._swapper is not None
        transfer = self._swapper.swap_in(record.name, self._device.memory.take(record.size_bytes))
        record.become(ActivationResidency.COMING, None, transfer)
        self._stats.add(held_bytes=record.size_bytes, num_reads=1, read_bytes=record.size_bytes)

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
                    return
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
