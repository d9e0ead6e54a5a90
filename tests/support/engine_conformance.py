"""What every engine must do. A new engine adds three lines:

class TestNewEngine(EngineConformance):
    engine_class = NewEngine
    moves_data = True
"""

import errno
import itertools
import os
import time
from functools import partial

import pytest

from nvme_offload.aio_native.engine import Engine, Op, Segment
from tests.support.engine_faults import FaultConformance
from tests.support.engine_handles import HandleConformance, LoadConformance
from tests.support.engine_life import LifeConformance
from tests.support.engine_tools import (
    ALIGNMENT,
    BLOCK,
    PATIENCE,
    EngineTools,
    Memory,
    num_requests,
    pattern,
    run,
    submit,
)
from tests.support.threads import at_once


class DataConformance(EngineTools):
    """The right bytes arrive at the right place."""

    def test_any_size_at_any_offset(self):
        engine, fd = self.open(), self.file(bytes(8 * BLOCK))
        sizes = [1, 7, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 13]
        for size, offset in itertools.product(sizes, [0, 1, 4096, 12345]):
            source = Memory.of(pattern(size, size))
            target = Memory.of(b"\xaa" * (size + 2))
            assert run(engine, Op.WRITE, source.segment(fd, offset)).failure is None
            operation = run(engine, Op.READ, target.segment(fd, offset, start=1, size_bytes=size))
            assert operation.failure is None
            assert operation.size_bytes == size
            if self.moves_data:
                assert os.pread(fd, size, offset) == source.bytes()
                assert target.bytes() == b"\xaa" + source.bytes() + b"\xaa"

    def test_writes_touch_nothing_else(self):
        self.require_data()
        content = pattern(1, 6 * BLOCK)
        engine, fd = self.open(), self.file(content)
        data = Memory.of(pattern(2, 2 * BLOCK + 100))
        assert run(engine, Op.WRITE, data.segment(fd, 777)).failure is None
        end = 777 + data.size_bytes
        assert os.pread(fd, 7 * BLOCK, 0) == content[:777] + data.bytes() + content[end:]

    def test_one_operation_of_many_segments_in_several_files(self):
        engine = self.open()
        fds = [self.file(bytes(10 * BLOCK)) for _ in range(3)]
        sizes = [100, BLOCK, 3 * BLOCK + 5, 1, 2 * BLOCK]
        source, target = Memory.of(pattern(3, sum(sizes))), Memory(sum(sizes))
        starts = [0, *itertools.accumulate(sizes)]
        for op, memory in ((Op.WRITE, source), (Op.READ, target)):
            segments = [
                memory.segment(fds[index % 3], 4096 * index * index, starts[index], size)
                for index, size in enumerate(sizes)
            ]
            operation = run(engine, op, *segments)
            assert operation.failure is None
            assert operation.size_bytes == sum(sizes)
        if self.moves_data:
            assert target.bytes() == source.bytes()
            assert os.pread(fds[2], sizes[2], 4096 * 4) == source.bytes(starts[2], sizes[2])

    def test_direct_io(self):
        engine, fd = self.open(), self.file(flags=os.O_RDWR | os.O_DIRECT)
        source, target = Memory.of(pattern(4, 5 * BLOCK + ALIGNMENT)), Memory(5 * BLOCK + ALIGNMENT)
        assert run(engine, Op.WRITE, source.segment(fd, ALIGNMENT)).failure is None
        assert run(engine, Op.READ, target.segment(fd, ALIGNMENT)).failure is None
        if self.moves_data:
            assert target.bytes() == source.bytes()

    def test_requests_are_no_larger_than_the_block_size(self):
        engine, fd = self.open(), self.file(bytes(16 * BLOCK))
        sizes = [1, BLOCK, BLOCK + 1, 7 * BLOCK - 1]
        memory = Memory(max(sizes))
        run(engine, Op.READ, *(memory.segment(fd, size_bytes=size) for size in sizes))
        stats = engine.stats()
        assert stats.requests - stats.retries == num_requests(*sizes)

    def test_many_operations_from_many_threads(self):
        engine, fd = self.open(max_operations=4), self.file(bytes(64 * BLOCK))

        def work(index: int) -> None:
            start, size = index * 8 * BLOCK, 3 * BLOCK + index
            for turn in range(20):
                source, target = Memory.of(pattern(100 * index + turn, size)), Memory(size)
                for op, memory in ((Op.WRITE, source), (Op.READ, target)):
                    while (operation := engine.submit(op, [memory.segment(fd, start)])) is None:
                        time.sleep(0.0005)
                    assert operation.wait(PATIENCE)
                    assert operation.failure is None
                assert not self.moves_data or target.bytes() == source.bytes()

        at_once([partial(work, index) for index in range(8)])
        assert engine.stats().bytes_written == 20 * sum(3 * BLOCK + index for index in range(8))

    def test_registered_or_not_the_bytes_are_the_same(self):
        engine, fd = self.open(), self.file(bytes(4 * BLOCK))
        memory, other = Memory.of(pattern(5, 4 * BLOCK)), Memory(4 * BLOCK)
        registration = engine.register([(memory.address, memory.size_bytes)], [fd])
        assert all(refusal.strip() for refusal in registration.refusals)
        assert run(engine, Op.WRITE, memory.segment(fd)).failure is None
        assert run(engine, Op.READ, other.segment(fd)).failure is None  # memory that is not registered
        engine.register([], [])
        assert not self.moves_data or other.bytes() == memory.bytes()
        assert run(engine, Op.READ, memory.segment(fd)).failure is None
        engine.register([], [])


class ErrorConformance(EngineTools):
    """What the kernel refuses is reported, once, and harms no one else."""

    @pytest.fixture(autouse=True)
    def _needs_data(self) -> None:
        self.require_data()

    def assert_still_works(self, engine: Engine) -> None:
        data, fd = Memory.of(pattern(6, 3 * BLOCK)), self.file()
        assert run(engine, Op.WRITE, data.segment(fd)).failure is None
        assert os.pread(fd, data.size_bytes, 0) == data.bytes()

    @pytest.mark.parametrize("file_size", [0, 3 * BLOCK, 2 * BLOCK + 4096, 2 * BLOCK + 100])
    @pytest.mark.parametrize("flags", [os.O_RDWR, os.O_RDWR | os.O_DIRECT])
    def test_reading_beyond_the_end(self, file_size, flags):
        content = pattern(7, file_size)
        engine, fd, memory = self.open(), self.file(content, flags), Memory(5 * BLOCK)
        failure = run(engine, Op.READ, memory.segment(fd)).failure
        assert (failure.errno, failure.fd) == (errno.ENODATA, fd)
        assert failure.offset + failure.size_bytes > file_size
        assert failure.offset % ALIGNMENT == 0
        assert failure.offset <= 4 * BLOCK
        assert 0 < failure.size_bytes <= BLOCK
        self.assert_still_works(engine)

    def test_writing_to_a_file_opened_for_reading(self):
        engine, fd, memory = self.open(), self.file(bytes(BLOCK), os.O_RDONLY), Memory(20 * BLOCK)
        failure = run(engine, Op.WRITE, memory.segment(fd, 4096)).failure
        assert (failure.errno, failure.fd) == (errno.EBADF, fd)
        assert (failure.offset - 4096) % BLOCK == 0
        assert failure.size_bytes == BLOCK
        self.assert_still_works(engine)

    def test_a_descriptor_that_is_not_open(self):
        engine, memory = self.open(), Memory(BLOCK)
        fd = os.dup(self.file())
        os.close(fd)
        failure = run(engine, Op.READ, memory.segment(fd)).failure
        assert failure.errno == errno.EBADF
        self.assert_still_works(engine)

    def test_memory_that_does_not_exist(self):
        engine, fd = self.open(), self.file(bytes(BLOCK))
        for op in Op:
            failure = run(engine, op, Segment(fd, 0, 4096, BLOCK)).failure
            assert failure.errno == errno.EFAULT
        self.assert_still_works(engine)

    def test_after_a_failure_the_rest_is_not_issued(self):
        engine, fd, memory = self.open(queue_depth=2), self.file(bytes(BLOCK), os.O_RDONLY), Memory(BLOCK)
        assert run(engine, Op.WRITE, *[memory.segment(fd)] * 1000).failure is not None
        assert engine.stats().requests < 100

    def test_a_failing_operation_harms_no_other(self):
        engine, good, bad = self.open(), self.file(pattern(8, 8 * BLOCK)), self.file(b"", os.O_RDONLY)
        memory, target = Memory(8 * BLOCK), Memory(8 * BLOCK)
        operations = []
        for _ in range(10):
            operations.append(submit(engine, Op.WRITE, [memory.segment(bad)]))
            operations.append(submit(engine, Op.READ, [target.segment(good)]))
        assert all(operation.wait(PATIENCE) for operation in operations)
        assert all(operation.failure is not None for operation in operations[::2])
        assert all(operation.failure is None for operation in operations[1::2])
        assert target.bytes() == pattern(8, 8 * BLOCK)


class EngineConformance(
    DataConformance, ErrorConformance, HandleConformance, LoadConformance, LifeConformance, FaultConformance
):
    """All of it."""
