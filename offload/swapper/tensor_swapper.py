"""Named tensors on NVMe: swap_out, swap_in, prefetch, evict. A library of its own, needs no optimizer and no model."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from nvme_offload.aio_native import EngineStats, FaultSpec, Op
from nvme_offload.offload.config.honoured import BY_SWAPPER, unread_text
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.devices.device import (
    HOST,
    default_device_type,
    is_device,
    is_host,
    new_host_tensor,
    queued,
)
from nvme_offload.offload.errors import ClosedError, ConfigError, ConfigWarning, ForkError
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.storage.transfer import Transfer
from nvme_offload.offload.swapper.records import NO_TENSOR, Task, TensorRecord, TensorResidency, TensorSpec, Verb
from nvme_offload.offload.swapper.scheduler import SlotScheduler
from nvme_offload.offload.swapper.staged_copy import KIND
from nvme_offload.offload.swapper.tensor_transfer import TensorTransfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SwapperStats:
    """What a swapper holds and has done."""

    num_tensors: int
    """Names with a value, complete or on its way."""
    stored_bytes: int
    """Bytes of the extents that hold complete values."""
    prefetched_bytes: int
    """Host memory promised to prefetched copies; at most `prefetch_budget`."""
    prefetch_budget: int
    num_prefetch_hits: int
    """Calls of swap_in that found a prefetched copy."""
    num_buffers: int
    num_free: int
    """Staging buffers nobody holds; equal to `num_buffers` when nothing is under way."""
    bytes_read: int
    """Bytes read, as handed to the engine, alignment included."""
    bytes_written: int
    """Bytes written, as handed to the engine, alignment included."""
    engine: str
    """Name of the engine that does the I/O."""
    engine_stats: EngineStats


class TensorSwapper:
    """Keeps tensors on NVMe under names. Thread-safe; its transfers can be waited for and awaited.

    Swap out what is not needed now::

        with TensorSwapper(section) as swapper:
            swapper.swap_out("keys", keys)
            keys = swapper.swap_in("keys").wait()  # ordered behind the swap_out

    Calls for one name take effect in the order in which they were made, without any waiting in between; calls for
    different names run side by side. No call blocks on I/O or on copying except ``synchronize`` and ``close``.

    Host memory is bounded: `staging_budget` for the staging buffers, and as much again for prefetched copies.

    Args:
        config: an `OffloadConfig`, a dict or a file; `offload_optimizer.device` must be `nvme`.
        faults: failures to inject, for tests.

    Raises:
        ConfigError: the configuration is wrong, or its device is not `nvme`.
        SwapIOError: a path cannot be used.
        EngineUnavailable: the engine that was asked for cannot run here.
    """

    def __init__(
        self, config: OffloadConfig | Mapping[str, Any] | str | Path, *, faults: FaultSpec | None = None
    ) -> None:
        self.config = _read_config(config)
        offload = self.config.zero_optimization.offload_optimizer
        self.prefetch_budget = offload.staging_budget
        """Bytes of host memory that prefetched copies may take."""
        self._owner_pid = os.getpid()
        self._closed = False
        self._closing = threading.RLock()
        self._pin_wanted = offload.pin_memory is not False
        self._records: dict[str, TensorRecord] = {}
        self._scheduler = SlotScheduler(self.config, faults)
        self._lock = self._scheduler.lock
        _live.add(self)

    @property
    def tier(self) -> NvmeTier:
        """The swap space and its engine."""
        return self._scheduler.tier

    @property
    def pool(self) -> BufferPool:
        """The staging buffers through which tensors pass."""
        return self._scheduler.pool

    def swap_out(self, name: str, tensor: torch.Tensor) -> Transfer[None]:
        """Store a tensor under `name` and return at once. It must not be changed before the transfer is done.

        An older value of that name is kept until the new one is complete, and stays if the transfer fails.

        Args:
            name: any string.
            tensor: any shape, strides and dtype, on any device.

        Returns:
            A transfer that raises SwapIOError (OutOfSpaceError if the disk is full) if the tensor was not stored:
            then the one in the caller's hands is still the truth. The failure is logged, too.

        Raises:
            TypeError: the tensor is not dense, or has no data of its own.
        """
        _check_dense(name, tensor)
        source = tensor.detach()
        self._check_usable()
        with self._lock:
            self._check_open()
            task = self._task(Verb.SWAP_OUT, TensorSpec.of(source), source)
            record = self._records.get(name)
            if record is None or record.forgotten:
                self._records.pop(name, None)  # a new value has a new place in the order of names
                record = self._records[name] = TensorRecord(name)
            self._scheduler.enqueue(record, task)
        return task.transfer

    def swap_in(self, name: str, out: torch.Tensor | None = None) -> Transfer[torch.Tensor]:
        """Read the tensor `name` and return at once; the transfer's result is the tensor.

        Args:
            name: as given to swap_out.
            out: tensor to read into, of the same shape and dtype, with any strides, on any device; not to be
                used before the transfer is done. By default a new, contiguous tensor on the original device.

        Raises:
            KeyError: no tensor has this name.
            StateError: nothing is stored under it because its swap_out failed.
            ValueError: `out` has another shape or dtype, or elements that share memory.
        """
        self._check_usable()
        with self._lock:
            self._check_open()
            record = self._record(name)
            spec = record.require_value()
            if out is None and is_host(spec.device) and not record.tasks and record.prefetched is not None:
                transfer = self._scheduler.hand_over(record, record.prefetched)
            else:
                transfer = self._scheduler.enqueue(record, self._swap_in_task(name, spec, out))
        return transfer

    def prefetch(self, name: str) -> bool:
        """Start reading `name` into host memory, so that the next swap_in finds it there; that one takes the copy.

        Returns:
            Whether the copy is there or on its way. False if it does not fit into what is left of
            `prefetch_budget`: nothing was started, and swap_in will read the file. A prefetch that fails is logged,
            and swap_in reads again.

        Raises:
            KeyError: no tensor has this name.
            StateError: nothing is stored under it because its swap_out failed.
        """
        self._check_usable()
        with self._lock:
            self._check_open()
            record = self._record(name)
            spec = record.require_value()
            if record.prefetch_due:
                return True
            if self._scheduler.prefetched_bytes + spec.size_bytes > self.prefetch_budget:
                return False
            pinned_for = None if is_host(spec.device) or not self.pool.pinned else spec.device
            target = new_host_tensor(spec.shape, spec.dtype, pinned_for)
            task = self._task(Verb.PREFETCH, spec, target)
            self._scheduler.enqueue(record, task)
            return True

    def evict(self, name: str) -> None:
        """Drop the prefetched copy of `name`, if there is one; the value stays on the file."""
        self._check_usable()
        with self._lock:
            self._check_open()
            self._scheduler.enqueue(self._record(name), self._task(Verb.EVICT))

    def delete(self, name: str) -> None:
        """Forget `name` at once. Its space is given back when the calls made for it before are done."""
        self._check_usable()
        with self._lock:
            self._check_open()
            self._scheduler.enqueue(self._record(name), self._task(Verb.DELETE))
            del self._records[name]

    def names(self) -> list[str]:
        """Names with a value, complete or on its way, in the order in which they were first used."""
        self._check_usable()
        with self._lock:
            self._check_open()
            return [name for name, record in self._records.items() if record.newest]

    def __contains__(self, name: object) -> bool:
        self._check_usable()
        with self._lock:
            self._check_open()
            record = self._records.get(name) if isinstance(name, str) else None
            return record is not None and record.newest is not None

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor `name`, without alignment. Raises as swap_in does."""
        self._check_usable()
        with self._lock:
            self._check_open()
            return self._record(name).require_value().size_bytes

    def residency(self, name: str) -> TensorResidency:
        """Which copies of `name` exist at this moment."""
        self._check_usable()
        with self._lock:
            self._check_open()
            record = self._record(name)
        self._scheduler.catch_up()
        return record.residency

    def stats(self) -> SwapperStats:
        """What is held and what has been done."""
        self._check_usable()
        self._scheduler.catch_up()
        with self._lock:
            self._check_open()
            stored = [record.stored for record in self._records.values() if record.stored]
            return SwapperStats(
                num_tensors=len(self.names()),
                stored_bytes=sum(piece.extent.size_bytes for value in stored for piece in value.pieces),
                prefetched_bytes=self._scheduler.prefetched_bytes,
                prefetch_budget=self.prefetch_budget,
                num_prefetch_hits=self._scheduler.num_prefetch_hits,
                num_buffers=self.pool.num_buffers,
                num_free=self.pool.num_free,
                bytes_read=self.tier.bytes_of_kind(Op.READ, KIND),
                bytes_written=self.tier.bytes_of_kind(Op.WRITE, KIND),
                engine=self.tier.name,
                engine_stats=self.tier.stats(),
            )

    def synchronize(self) -> None:
        """Wait until nothing is under way. Failures are raised by the transfers they belong to, and logged."""
        self._check_usable()
        self._scheduler.wait_all()

    def close(self) -> None:
        """Wait for what is under way, free the memory, delete the files. Idempotent; no-op in a forked child."""
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            self._closed = True
        self._scheduler.wait_all()
        with self._closing:  # each part once more does no harm: an interrupted close can be repeated
            self._scheduler.close()
            self._records.clear()

    def __enter__(self) -> TensorSwapper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        """Say why the swapper cannot be used."""
        # First the process: in a forked child the lock may be held by a thread that exists in the parent only.
        if (pid := os.getpid()) != self._owner_pid:
            raise ForkError("TensorSwapper", self._owner_pid, pid)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("TensorSwapper")

    def _record(self, name: str) -> TensorRecord:
        record = self._records.get(name)
        if record is None or record.forgotten:
            near = get_close_matches(str(name), self._records, n=3)
            known = f"the nearest names are {', '.join(map(repr, near))}" if near else "no name is similar"
            raise KeyError(f"no tensor is named {name!r}; {known}")
        return record

    def _task(self, verb: Verb, spec: TensorSpec = NO_TENSOR, tensor: torch.Tensor | None = None) -> Task:
        ready = None
        if tensor is not None and is_device(tensor.device):
            self._pin_for(tensor.device)
            ready = queued(tensor.device)
        op = Op.WRITE if verb is Verb.SWAP_OUT else Op.READ
        transfer = TensorTransfer[Any](op, spec.size_bytes)
        return Task(verb=verb, transfer=transfer, spec=spec, tensor=tensor, ready=ready)

    def _swap_in_task(self, name: str, spec: TensorSpec, out: torch.Tensor | None) -> Task:
        if out is None:
            result = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
        else:
            _check_target(name, out, spec)
            result = out
        task = self._task(Verb.SWAP_IN, spec, result.detach())
        task.result = result
        task.replaceable = out is None and is_host(spec.device)
        return task

    def _pin_for(self, device: torch.device) -> None:
        """Pin the buffers for the first tensor on a device. Where the section does not ask for it, that may fail."""
        if not self._pin_wanted:
            return
        try:
            self.pool.pin(device)
        except RuntimeError as refusal:
            if self.config.zero_optimization.offload_optimizer.pin_memory:
                raise
            logger.warning("copies to and from %s are slower: staging buffers could not be pinned: %s", device, refusal)
        self._pin_wanted = False


_live: weakref.WeakSet[TensorSwapper] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # The copying threads must not outlive the interpreter.
    for swapper in list(_live):
        swapper.close()


def _read_config(config: OffloadConfig | Mapping[str, Any] | str | Path) -> OffloadConfig:
    config = OffloadConfig.of(config)
    device = config.zero_optimization.offload_optimizer.device
    if device != "nvme":
        key = "zero_optimization.offload_optimizer.device"
        raise ConfigError([f'{key} = "{device}": a TensorSwapper needs "nvme" and an nvme_path beside it'])
    if config.zero_optimization.offload_optimizer.pin_memory and default_device_type() == HOST.type:
        key = "zero_optimization.offload_optimizer.pin_memory"
        raise ConfigError([f"{key} = true: torch sees no device that memory could be pinned for; leave it out"])
    if unread := unread_text(config, "TensorSwapper", BY_SWAPPER):
        warnings.warn(unread, ConfigWarning, stacklevel=3)
    return config


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor is a string, not {name!r}")
    if hasattr(tensor, "__tensor_flatten__"):
        kind = type(tensor).__name__
        raise TypeError(f"tensor {name!r} is a {kind}, a wrapper without data of its own: swap the tensors inside it")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        what = f"{tensor.layout}, quantized {tensor.is_quantized}, device {tensor.device}"
        raise TypeError(f"tensor {name!r} must be dense, with data, not quantized; it is {what}")


def _check_target(name: str, out: torch.Tensor, spec: TensorSpec) -> None:
    _check_dense(name, out)
    actual = TensorSpec.of(out)
    if (actual.shape, actual.dtype) != (spec.shape, spec.dtype):
        raise ValueError(f"tensor {name!r} is stored as {spec}, but `out` is {actual}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"`out` for tensor {name!r} has elements that share memory (it was expanded): give a clone")
