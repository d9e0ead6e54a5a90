"""Memory, files and engines for the conformance suite."""

import contextlib
import ctypes
import errno
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nvme_offload import EngineUnavailable, FaultSpec
from nvme_offload.aio_native.engine import Engine, EngineOptions, Op, Operation, Segment
from nvme_offload.aio_native.registry import ENGINES, open_engine

BLOCK = 16384
ALIGNMENT = 4096
PATIENCE = 60.0  # seconds after which an operation counts as lost
HAS_BINDING = find_spec("pyuring") is not None
"""pyuring has wheels up to CPython 3.13."""
needs_binding = pytest.mark.skipif(not HAS_BINDING, reason="pyuring is not installed: it has wheels up to CPython 3.13")
PYTHON_ENGINE = "pyuring" if HAS_BINDING else "aiofiles"


class Memory:
    """Page-aligned anonymous memory with an address."""

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(size_bytes, 1))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size_bytes = size_bytes

    @classmethod
    def of(cls, data: bytes) -> "Memory":
        memory = cls(len(data))
        memory._map[: len(data)] = data
        return memory

    def bytes(self, start: int = 0, size_bytes: int | None = None) -> bytes:
        end = self.size_bytes if size_bytes is None else start + size_bytes
        return self._map[start:end]

    def segment(self, fd: int, offset: int = 0, start: int = 0, size_bytes: int | None = None) -> Segment:
        """The segment between the file at `offset` and this memory from `start` on."""
        size_bytes = self.size_bytes - start if size_bytes is None else size_bytes
        return Segment(fd, offset, self.address + start, size_bytes)


class EngineTools:
    """Opens files and engines, and closes them when the test ends."""

    engine_class: type[Engine]
    moves_data: bool  # false for an engine that does no I/O: nobody looks at its bytes

    def require_data(self) -> None:
        if not self.moves_data:
            pytest.skip("this engine does no I/O")

    @pytest.fixture(autouse=True)
    def _cleanup(self, tmp_path: Path) -> Iterator[None]:
        self.directory = tmp_path
        self.num_files = 0
        with contextlib.ExitStack() as self.on_exit:
            yield

    def options(self, **given: Any) -> EngineOptions:
        usual = {"queue_depth": 8, "rings": 1, "max_operations": 64}
        return EngineOptions(block_size=BLOCK, alignment=ALIGNMENT, **usual | given)

    def open(self, **given: Any) -> Engine:
        try:
            engine = self.engine_class(self.options(**given))  # type: ignore[call-arg]
        except EngineUnavailable as error:
            pytest.skip(str(error))
        self.on_exit.callback(engine.close)
        return engine

    def open_slow(self, max_delay_us: int = 200_000, **options: int) -> Engine:
        """An engine whose operations of several requests take about `max_delay_us`."""
        return self.open(faults=FaultSpec(seed=1, delay=1.0, max_delay_us=max_delay_us), **options)

    def file(self, content: bytes = b"", flags: int = os.O_RDWR) -> int:
        """The descriptor of a new file."""
        self.num_files += 1
        path = self.directory / f"file-{self.num_files}"
        path.write_bytes(content)
        return self._open(path, flags)

    def open_again(self, fd: int, flags: int) -> int:
        """Another descriptor of an open file."""
        return self._open(Path(os.readlink(f"/proc/self/fd/{fd}")), flags)

    def _open(self, path: Path, flags: int) -> int:
        try:
            fd = os.open(path, flags)
        except OSError as error:
            if error.errno == errno.EINVAL and flags & os.O_DIRECT:
                pytest.skip(f"the file system of {path.parent} refuses O_DIRECT")
            raise
        self.on_exit.callback(os.close, fd)
        return fd


def submit(engine: Engine, op: Op, segments: Sequence[Segment]) -> Operation:
    """Submit to an engine that is not busy."""
    operation = engine.submit(op, segments)
    assert operation is not None, "busy"
    return operation


def run(engine: Engine, op: Op, *segments: Segment) -> Operation:
    """Submit and wait."""
    operation = submit(engine, op, segments)
    assert operation.wait(PATIENCE), "lost"
    return operation


def num_requests(*sizes: int) -> int:
    """Requests that segments of these sizes need when nothing is repeated."""
    return sum(-(-size // BLOCK) for size in sizes)


def pattern(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def available_engines() -> list[str]:
    """The engines that can run here, fastest first."""
    options = EngineOptions(queue_depth=1, block_size=4096, rings=1, alignment=4096, max_operations=1)
    available = []
    for name in ENGINES:
        try:
            open_engine(name, options).engine.close()
        except EngineUnavailable:
            continue
        available.append(name)
    return available
