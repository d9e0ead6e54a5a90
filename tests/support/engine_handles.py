"""Engines as their callers see them: submitting, waiting, waking, counters, depth, fairness."""

import math
import os
import select
import signal
import time

import pytest

from nvme_offload.aio_native.engine import Op, Segment
from tests.support.engine_tools import ALIGNMENT, BLOCK, PATIENCE, EngineTools, Memory, num_requests, run, submit


class _InterruptedError(Exception):
    pass


class HandleConformance(EngineTools):
    """Submitting, waiting, waking, being busy."""

    @pytest.mark.quiet
    def test_submit_returns_at_once_and_answers_busy(self):
        engine, fd = self.open_slow(max_operations=2), self.file(bytes(8 * BLOCK))
        memory = Memory(8 * BLOCK)
        before = time.monotonic()
        first = submit(engine, Op.READ, [memory.segment(fd)])
        second = submit(engine, Op.READ, [memory.segment(fd)])
        assert engine.submit(Op.READ, [memory.segment(fd)]) is None
        assert time.monotonic() - before < 0.1
        assert not first.done()
        assert not second.done()
        assert first.wait(PATIENCE)
        third = submit(engine, Op.READ, [memory.segment(fd)])
        assert second.wait(PATIENCE)
        assert third.wait(PATIENCE)

    def test_wait_gives_up_after_the_timeout(self):
        engine, fd, memory = self.open_slow(), self.file(bytes(8 * BLOCK)), Memory(8 * BLOCK)
        operation = submit(engine, Op.READ, [memory.segment(fd)])
        assert operation.wait(0.0) is False
        assert operation.wait(0.005) is False
        assert operation.completed_ns == 0
        assert operation.wait() is True
        assert operation.wait(0.0) is True
        assert operation.done()

    def test_timeouts_that_are_no_ordinary_numbers(self):
        engine, fd, memory = self.open_slow(), self.file(bytes(8 * BLOCK)), Memory(8 * BLOCK)
        operation = submit(engine, Op.READ, [memory.segment(fd)])
        assert operation.wait(-1.0) is False
        assert operation.wait(-math.inf) is False
        for timeout in (math.inf, 1e300):
            assert operation.wait(timeout) is True
            with pytest.raises(ValueError, match="timeout nan: must be a number of seconds, or None"):
                operation.wait(math.nan)
            operation = submit(engine, Op.READ, [memory.segment(fd)])
        assert operation.wait()

    def test_times_are_on_the_monotonic_clock(self):
        engine, fd, memory = self.open(), self.file(bytes(BLOCK)), Memory(BLOCK)
        before = time.monotonic_ns()
        operation = run(engine, Op.READ, memory.segment(fd))
        assert before <= operation.submitted_ns <= operation.completed_ns <= time.monotonic_ns()

    def test_wakers_before_and_after_completion(self):
        engine, fd, memory = self.open_slow(50_000), self.file(bytes(8 * BLOCK)), Memory(8 * BLOCK)
        eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        for eventfd in eventfds:
            self.on_exit.callback(os.close, eventfd)
        operation = submit(engine, Op.READ, [memory.segment(fd)])
        for eventfd in eventfds:
            operation.add_waker(eventfd)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(eventfds[0])
        for eventfd in eventfds:
            assert select.select([eventfd], [], [], PATIENCE)[0]
            assert os.eventfd_read(eventfd) == 1
        assert operation.done()
        operation.add_waker(eventfds[0])
        assert os.eventfd_read(eventfds[0]) == 1

    def test_a_signal_handler_that_raises_ends_the_wait(self):
        engine, fd, memory = self.open_slow(), self.file(bytes(8 * BLOCK)), Memory(8 * BLOCK)

        def interrupt(*_: object) -> None:
            raise _InterruptedError

        previous = signal.signal(signal.SIGALRM, interrupt)
        self.on_exit.callback(signal.signal, signal.SIGALRM, previous)
        for timeout in (None, PATIENCE):
            operation = submit(engine, Op.READ, [memory.segment(fd)])
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(_InterruptedError):
                operation.wait(timeout)
            assert not operation.done()
            assert operation.wait(PATIENCE)
            assert operation.failure is None

    def test_a_signal_handler_that_returns_runs_while_waiting(self):
        engine, fd, memory = self.open_slow(), self.file(bytes(8 * BLOCK)), Memory(8 * BLOCK)
        seen_done: list[bool] = []
        previous = signal.signal(signal.SIGALRM, lambda *_: seen_done.append(operation.done()))
        self.on_exit.callback(signal.signal, signal.SIGALRM, previous)
        for _ in range(20):  # a busy machine may run this process again when the operation is done
            operation = submit(engine, Op.READ, [memory.segment(fd)])
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            assert operation.wait()
            if False in seen_done:
                return
        pytest.fail(f"after the operation: {seen_done}")

    @pytest.mark.parametrize("segments", [[], [Segment(0, 0, 4096, 0)], [Segment(0, 0, 4096, -1)]])
    def test_empty_segments_are_refused(self, segments):
        with pytest.raises(ValueError, match=r"segment"):
            self.open().submit(Op.READ, segments)

    def test_negative_offsets_are_refused(self):
        with pytest.raises(ValueError, match="offset -1"):
            self.open().submit(Op.READ, [Segment(self.file(bytes(BLOCK)), -1, Memory(4096).address, 4096)])

    def test_direct_io_needs_alignment(self):
        engine, fd = self.open(), self.file(bytes(4 * BLOCK), os.O_RDWR | os.O_DIRECT)
        memory = Memory(2 * BLOCK)
        for offset, start, size in ((512 + 1, 0, BLOCK), (0, 8, BLOCK), (0, 0, BLOCK + 100)):
            segment = memory.segment(fd, offset, start, size)
            with pytest.raises(ValueError, match=str(ALIGNMENT)) as caught:
                engine.submit(Op.READ, [memory.segment(fd, 0, 0, BLOCK), segment])
            for number in (offset, size):
                assert str(number) in str(caught.value)
            assert str(segment.address) in str(caught.value) or f"{segment.address:x}" in str(caught.value)
        assert engine.stats().requests == 0


class LoadConformance(EngineTools):
    """Counters, depth, fairness."""

    def test_stats_add_up(self):
        engine, fd, memory = self.open(), self.file(bytes(16 * BLOCK)), Memory(16 * BLOCK)
        for size in (100, 5 * BLOCK, 16 * BLOCK):
            run(engine, Op.WRITE, memory.segment(fd, size_bytes=size))
        run(engine, Op.READ, memory.segment(fd, size_bytes=3 * BLOCK + 1))
        stats = engine.stats()
        assert stats.bytes_written == 100 + 21 * BLOCK
        assert stats.bytes_read == 3 * BLOCK + 1
        assert stats.requests - stats.retries == num_requests(100, 5 * BLOCK, 16 * BLOCK, 3 * BLOCK + 1)
        assert stats.depth_ns >= stats.busy_ns > 0
        engine.close()  # they can be read afterwards
        assert engine.stats().requests == stats.requests
        assert engine.stats().cpu_ns >= stats.cpu_ns > 0

    @pytest.mark.parametrize("rings", [1, 2])
    def test_depth_is_used_and_bounded(self, rings):
        engine, fd, memory = self.open_slow(3000, queue_depth=6, rings=rings), self.file(bytes(64 * BLOCK)), Memory(1)
        memory = Memory(64 * BLOCK)
        operations = [submit(engine, op, [memory.segment(fd)]) for op in (Op.WRITE, Op.READ)]
        assert all(operation.wait(PATIENCE) for operation in operations)
        # Per ring in an engine that has several: its busy time is a sum over rings, too.
        assert 1.5 < engine.stats().achieved_depth <= 6 * rings

    @pytest.mark.parametrize(("large", "small"), [(Op.READ, Op.WRITE), (Op.WRITE, Op.READ)])
    def test_neither_direction_waits_for_all_of_the_other(self, large, small):
        engine, fd, memory = self.open_slow(3000, queue_depth=4), self.file(bytes(800 * BLOCK)), Memory(800 * BLOCK)
        first = submit(engine, large, [memory.segment(fd)])
        assert submit(engine, small, [memory.segment(fd, size_bytes=8 * BLOCK)]).wait(PATIENCE)
        assert not first.done()
        assert first.wait(PATIENCE)
