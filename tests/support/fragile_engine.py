"""An engine that works, and breaks at a request of one's choice as a ring does whose system calls are forbidden."""

import ctypes
import errno
import os
from typing import ClassVar

import pytest

from nvme_offload.aio_native import registry
from nvme_offload.aio_native.engine import Op
from nvme_offload.aio_native.null import NullThread
from nvme_offload.aio_native.python_engine import PythonEngine
from nvme_offload.aio_native.registry import EngineEntry
from nvme_offload.aio_native.requests import Request


class FragileThread(NullThread):
    """Reads and writes one request after the other, and breaks with EPERM at the one with this number."""

    break_at: ClassVar[int]  # from 1 on
    ended: ClassVar[bool]  # whether it knows, when it breaks, that nothing is under way
    num_started = 0

    def _start(self, request: Request) -> None:
        self.num_started += 1
        if self.num_started >= self.break_at:
            raise PermissionError(errno.EPERM, "not allowed any more")
        memory = (ctypes.c_char * request.asked_bytes).from_address(request.address)
        move = os.preadv if request.op is Op.READ else os.pwritev
        self._completed.append((request, move(request.fd, [memory], request.offset)))

    def _shut(self) -> bool:
        super()._shut()
        return self.ended


class FragileEngine(PythonEngine):
    name = "fragile"
    owner_type = FragileThread


def choose_fragile(patch: pytest.MonkeyPatch, break_at: int, *, ended: bool = True) -> None:
    """From here on ``auto`` takes it first."""
    patch.setattr(FragileThread, "break_at", break_at, raising=False)
    patch.setattr(FragileThread, "ended", ended, raising=False)
    entry = EngineEntry(__name__, "FragileEngine", 0, "breaks")
    patch.setattr(registry, "REGISTRY", {"fragile": entry, **registry.REGISTRY})
    patch.setattr(registry, "ENGINES", ("fragile", *registry.ENGINES))
