"""Named tensors on NVMe: swap_out, swap_in, prefetch, evict. A library of its own, needs no optimizer and no model."""

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from nvme_offload.aio_native.engine import EngineStats, Op
from nvme_offload.aio_native.faults import FaultSpec
from ..config.honoured import BY_SWAPPER, unread_text
from ..config.section import OffloadConfig, SectionLike
from ..devices.device import HOST, Event, default_device_type, is_device, is_host, new_host_tensor
from ..errors import ClosedError, ConfigError, ConfigWarning, ForkError
from ..host.buffer_pool import BufferPool
from ..host.page_locks import PageLocks
from ..storage.nvme_tier import NvmeTier
from ..warn import door, warn_user
from .pieces import TensorSpec
from .records import Prefetch, SwapIn, SwapOut, TensorRecord, TensorResidency
from .scheduler import KIND, TaskScheduler
from .tensor_transfer import TensorTransfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SwapperStats:
    """A swapper holds this and has done this."""

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


class TensorSwapper(AbstractContextManager["TensorSwapper"]):
    """Keeps tensors on NVMe under names. Thread-safe; its transfers can be waited for and awaited.

    Swap out what is not needed now::

        with TensorSwapper(section) as swapper:
            swapper.swap_out("keys", keys)
            keys = swapper.swap_in("keys").wait()  # ordered behind the swap_out

    Calls for one name take effect in the order in which they were made, without any waiting in between; calls for
    different names run side by side. No call blocks on I/O or on copying except ``synchronize`` and ``close``.

    Host memory is bounded: `staging_budget` for the staging buffers, and as much again for prefetched copies.

    Args:
        config: an `OffloadConfig`, a dict or a file; `offload_optimizer.device` must be `nvme`. Or a folder on a drive.
        faults: failures to inject, for tests.

    Raises:
        ConfigError: the configuration is wrong, or its device is not `nvme`.
        SwapIOError: a path cannot be used.
        EngineUnavailable: the engine that was asked for cannot run here.
    """

    @door
    def __init__(self, config: SectionLike | None = None, *, faults: FaultSpec | None = None) -> None:
        self.config = _read_config(config)
        offload = self.config.zero_optimization.offload_optimizer
        self.prefetch_budget = offload.staging_budget
        """Bytes of host memory that prefetched copies may take."""
        self._owner_pid = os.getpid()
        self._closed = False
        self._closing = threading.RLock()
        self._pin_wanted = True
        self._locks = PageLocks(offload.pin_memory, logger.warning)
        self._scheduler = TaskScheduler(self.config, faults)
        _live.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a TensorSwapper cannot be pickled or copied: its tensors are on a drive. Make another one")

    @property
    def tier(self) -> NvmeTier:
        """The swap space and its engine."""
        return self._scheduler.tier

    @property
    def pool(self) -> BufferPool:
        """The staging buffers through which tensors pass."""
        return self._scheduler.pool

    def park(self) -> None:
        """Wait for all transfers, and give the memory of staging buffers back until the next one."""
        self._scheduler.park()

    def swap_out(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        after: Event | None = None,
        on_copied: Callable[[], object] | None = None,
        on_end: Callable[[Exception | None], object] | None = None,
    ) -> TensorTransfer[None]:
        """Store a tensor under `name` and return at once. It must not be changed before it is copied.

        An older value of that name is kept until the new one is complete, and stays if the transfer fails.

        Args:
            name: any string.
            tensor: any shape, strides and dtype, on any device. It is let go when all of it is in staging buffers.
            after: an event of the tensor's device (``torch.cuda.Event``): it is copied when that has come.
            on_copied: called then, before the bytes are on the drive; not if that fails before. As `on_done` of the
                transfer, but what it raises fails the transfer.
            on_end: called when the transfer is done, with what it raises or None; as `on_done`, but an exception cannot
                come between the call and this.

        Returns:
            A transfer, done when the bytes are on the drive, that raises SwapIOError (OutOfSpaceError if the disk is
            full) if the tensor was not stored: then the one in the caller's hands is still the truth. The failure is
            logged, too.

        Raises:
            TypeError: the tensor is not dense, or has no data of its own.
        """
        _check_dense(name, tensor)
        with self._usable():
            self._check_open()
            record = self._scheduler.records.get(name) or TensorRecord(name)
            self._pin_for(tensor.device)
            task = SwapOut(record, tensor.detach(), self._scheduler.cut, after, on_copied, on_end)
            transfer = self._scheduler.enqueue(task)
            self._scheduler.records[name] = record
        return transfer

    def swap_in(self, name: str, out: torch.Tensor | None = None) -> TensorTransfer[torch.Tensor]:
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
        with self._usable():
            record = self._record(name)
            spec, prefetch = record.require_value(), record.prefetch
            takes_any = out is None and is_host(spec.device)
            if takes_any and prefetch is not None and not record.tasks:
                return self._scheduler.hand_over(record, prefetch)
            if out is None:
                out = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
            else:
                _check_target(name, out, spec)
            self._pin_for(out.device)
            return self._scheduler.enqueue(SwapIn(record, out.detach(), out, prefetch, replaceable=takes_any))

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
        with self._usable():
            record = self._record(name)
            spec = record.require_value()
            if record.prefetch is not None:
                return True
            if self._scheduler.prefetched_bytes + spec.size_bytes > self.prefetch_budget:
                return False
            pinned_for = None if is_host(spec.device) or not self.pool.pinned else spec.device
            target = new_host_tensor(spec.shape, spec.dtype, pinned_for)
            self._scheduler.enqueue(Prefetch(record, target))
            return True

    def evict(self, name: str) -> None:
        """Drop the prefetched copy of `name`, if there is one; the value stays on the file."""
        with self._usable():
            self._record(name).forget_copy()

    def delete(self, name: str) -> None:
        """Forget `name` at once. Its space is given back when the calls made for it before are done."""
        with self._usable():
            record = self._record(name)
            self._scheduler.look_after(record)
            del self._scheduler.records[name]
            record.forget_copy()

    def names(self) -> list[str]:
        """Names with a value, complete or on its way, in the order in which they were first used."""
        with self._usable():
            return [name for name, record in self._scheduler.records.items() if record.newest]

    def __contains__(self, name: object) -> bool:
        with self._usable():
            record = self._scheduler.records.get(name) if isinstance(name, str) else None
            return record is not None and record.newest is not None

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor `name`, without alignment. Raises as swap_in does."""
        with self._usable():
            return self._record(name).require_value().size_bytes

    def residency(self, name: str) -> TensorResidency:
        """Which copies of `name` exist at this moment."""
        with self._usable():
            return self._record(name).residency

    def stats(self) -> SwapperStats:
        """Return what is held and what has been done."""
        with self._usable():
            records = self._scheduler.records.values()
            pieces = [piece for record in records if record.stored for piece in record.stored.pieces]
            return SwapperStats(
                num_tensors=len(self.names()),
                stored_bytes=sum(piece.size_bytes for piece in pieces),
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
        self._usable()
        self._scheduler.wait_all()

    def close(self) -> None:
        """Wait for what is under way, free the memory, delete the files. Idempotent; no-op in a forked child."""
        if os.getpid() != self._owner_pid:
            return
        with self._scheduler.lock:
            self._closed = True
        self._scheduler.wait_all()
        with self._closing:  # each part once more does no harm: an interrupted close can be repeated
            self._scheduler.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _usable(self) -> threading.RLock:
        """The lock under which everything happens, unless the swapper cannot be used."""
        # First the process: in a forked child the lock may be held by a thread that exists in the parent only.
        if (pid := os.getpid()) != self._owner_pid:
            raise ForkError("TensorSwapper", self._owner_pid, pid)
        self._check_open()
        return self._scheduler.lock

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("TensorSwapper")

    def _record(self, name: str) -> TensorRecord:
        self._check_open()  # another thread may have closed it before we had the lock
        records = self._scheduler.records
        if name not in records:
            near = get_close_matches(str(name), records, n=3)
            known = f"the nearest names are {', '.join(map(repr, near))}" if near else "no name is similar"
            raise KeyError(f"no tensor is named {name!r}; {known}")
        return records[name]

    def _pin_for(self, device: torch.device) -> None:
        """Pin the buffers for the first tensor on a device. Where the section does not ask for it, that may fail."""
        if not self._pin_wanted or not is_device(device):
            return
        self._locks.lock(self.pool, device, "lower zero_optimization.offload_optimizer.staging_budget")
        self._pin_wanted = False


_live: weakref.WeakSet[TensorSwapper] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # The copying threads must not outlive the interpreter.
    for swapper in list(_live):
        swapper.close()


def _read_config(config: SectionLike | None) -> OffloadConfig:
    config = OffloadConfig.of(config)
    device = config.zero_optimization.offload_optimizer.device
    if device != "nvme":
        key = "zero_optimization.offload_optimizer.device"
        raise ConfigError([f'{key} = "{device}": a TensorSwapper needs "nvme" and an nvme_path beside it'])
    if config.zero_optimization.offload_optimizer.pin_memory and default_device_type() == HOST.type:
        key = "zero_optimization.offload_optimizer.pin_memory"
        raise ConfigError([f"{key} = true: torch sees no device that memory could be pinned for; leave it out"])
    if unread := unread_text(config, "TensorSwapper", BY_SWAPPER):
        warn_user(unread, ConfigWarning)
    return config


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor is a string, not {name!r}")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r}: a TensorSwapper keeps tensors, not a {type(tensor).__name__}: use torch.as_tensor")
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
