"""Puts a world in the place of threads, clock and engines of the package; for a process that does nothing else."""

import errno
import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

import nvme_offload.offload.host.region as region_module
import nvme_offload.offload.storage.swap_file as swap_file_module
from nvme_offload.aio_native import starting
from nvme_offload.aio_native.bell import Bell
from nvme_offload.aio_native.registry import EngineEntry
from tests.support.simulator.drive import SimulatedEngine
from tests.support.simulator.primitives import SimpleQueue, Threading, Time, world

_REAL = ("interrupt", "peers", "aiofiles_engine", "uring", "pyuring")
"""Modules that keep real threads and time: they look at the main thread, at other processes, or are not used."""

regions: weakref.WeakSet[Any] = weakref.WeakSet()  # host memory that is mapped now
allocations: list[Callable[[], bool]] = []  # asked whether this allocation on the drive finds it full


def install() -> None:
    """Exchange what the package imported, once and for all."""
    torch.set_num_threads(1)
    # Torch for CUDA lets DTensor see devices where there is none, and autograd has threads for them: nobody forks then.
    torch._C._ensureCUDADeviceGuardSet = lambda: None  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # and its locks, which are real, with it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stepped_threads, stepped_time, start = Threading(), Time(), starting.start
    for name, module in list(sys.modules.items()):
        if not name.startswith("nvme_offload.") or name.rpartition(".")[2] in _REAL:
            continue
        for attribute, real, stepped in (("threading", threading, stepped_threads), ("time", time, stepped_time)):
            if getattr(module, attribute, None) is real:
                setattr(module, attribute, stepped)
        if getattr(module, "start", None) is start:
            module.start = _start  # type: ignore[attr-defined]
        if hasattr(module, "SimpleQueue"):
            module.SimpleQueue = SimpleQueue  # type: ignore[attr-defined]
    EngineEntry.open = lambda entry, options: SimulatedEngine(options)  # type: ignore[method-assign]
    swap_file_module.os = _Allocating()  # type: ignore[assignment]
    _step_bells()
    _count_regions()
    gc.disable()


def _start(thread: threading.Thread) -> None:
    """No signal handler runs here, and each thread is of this world."""
    thread.start()


def freeze() -> None:
    """From here on a collection looks at what a case left, and not at all of torch."""
    gc.collect()
    gc.freeze()


class _Allocating:
    """The module `os`, with a drive that may be full."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        if any(full() for full in allocations):
            os.posix_fallocate(fd, offset, max(1, size // 2))  # ext4 and XFS keep what they found
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, size)


def _step_bells() -> None:
    rung = Bell.wait

    def wait(bell: Any, timeout: float | None = None) -> bool:
        world().block(lambda: bool(bell._poll.poll(0)), timeout, "a bell")
        return rung(bell, 0)

    Bell.wait = wait  # type: ignore[method-assign]


def _count_regions() -> None:
    made = region_module.HostRegion.__init__

    def init(region: Any, size_bytes: int) -> None:
        made(region, size_bytes)
        regions.add(region)

    region_module.HostRegion.__init__ = init  # type: ignore[method-assign]
