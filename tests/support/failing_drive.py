"""A drive that fails, and is well again; and one of an exact rate."""

import errno
import math
import os
import weakref
from contextlib import contextmanager
from functools import partialmethod

import pytest

from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.aio_native.engine import Op as Op
from nvme_offload.aio_native.faults import FaultSpec
from nvme_offload.aio_native.injection import FaultInjector
from nvme_offload.offload.storage import drive, swap_space
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.sync import sync_data
from nvme_offload.perf.experiments.paced_drive import STANDS_IN_FOR as STANDS_IN_FOR
from nvme_offload.perf.experiments.paced_drive import paced_drive as paced_drive


def flip_bit(path, offset):
    """A byte comes back changed; from the end, as -1, too."""
    with open(path, "r+b", buffering=0) as file:
        offset %= os.fstat(file.fileno()).st_size
        [byte] = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte ^ 4]), offset)
        os.fsync(file.fileno())


FAILS_WITH = {errno.EIO: "/proc/self/mem", errno.ENOSPC: "/dev/full"}
"""Files whose transfers fail so at the offsets of small swap files: low addresses are never mapped."""


@contextmanager
def failing_copy(optimizer, copy, monkeypatch, op):
    """Requests in one direction to the files of a copy of a run complete with EIO, in engines with faults."""
    fds = [file.fd for file in optimizer.store.durability.run.space.copies.files[copy]]
    overwrite = FaultInjector._overwrite

    def failing(injector, request, result):
        return -errno.EIO if request.fd in fds and request.op is op else overwrite(injector, request, result)

    with monkeypatch.context() as patch:
        patch.setattr(FaultInjector, "_overwrite", failing)
        yield


class FailingFiles:
    """Requests to the files `fds` complete with EIO when `left` more have passed, in tiers made from here on."""

    def __init__(self, monkeypatch):
        self.fds, self.left = [], math.inf
        overwrite = FaultInjector._overwrite

        def failing(injector, request, result):
            self.left -= request.fd in self.fds
            return -errno.EIO if self.left < 0 and request.fd in self.fds else overwrite(injector, request, result)

        faulty = type("Faulty", (NvmeTier,), {"__init__": partialmethod(NvmeTier.__init__, faults=FaultSpec(seed=1))})
        monkeypatch.setattr("nvme_offload.optim.tiers.block_tiers.NvmeTier", faulty)
        monkeypatch.setattr(FaultInjector, "_overwrite", failing)


def fail_to_sync(fd, patch):
    """Make the syncs of one swap file fail."""
    patch.setattr(swap_space, "sync_data", lambda file: fail() if file == fd else sync_data(file))


def fail(*_):
    """As a drive that is lost."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


class Failing:
    """Makes the operations of one direction fail from the `first` on, until it is repaired; or a `number` of them.

    They fail with EBADF, or one of `FAILS_WITH`.
    """

    def __init__(self, tier, monkeypatch, op, first=1, number=None, code=errno.EBADF):
        self.healthy, self.op, self.left = False, op, first
        # Without a file that fails, a descriptor that is open for the other direction.
        flags = os.O_RDWR if code in FAILS_WITH else os.O_WRONLY if op is Op.READ else os.O_RDONLY
        self._bad_fd = os.open(FAILS_WITH.get(code, os.devnull), flags)
        weakref.finalize(self, os.close, self._bad_fd)
        start = tier._start

        def submit(op, extent, *more):
            if op is self.op and not self.healthy:
                self.left -= 1
                self.healthy = number is not None and self.left <= 1 - number
                if self.left <= 0:
                    extent = Extent(extent.size_bytes, tuple(s._replace(fd=self._bad_fd) for s in extent.stripes))
            return start(op, extent, *more)

        monkeypatch.setattr(tier, "_start", submit)


@contextmanager
def dead(path, code):
    """Let each call about what is below `path` fail; with EMFILE those that open a file, wherever it is."""
    ask = drive.ask

    def fail(*_):
        raise OSError(code, os.strerror(code))

    def asked(about, call, *arguments, **more):
        fails = call is Descriptor if code == errno.EMFILE else os.fspath(about).startswith(os.fspath(path))
        return ask(about, fail if fails else call, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drive, "ask", asked)
        yield
