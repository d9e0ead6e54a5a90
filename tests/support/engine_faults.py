"""Engines under injected faults: every operation ends with the right bytes or the right errno."""

import errno
import os
import random

import pytest

from nvme_offload import FaultSpec
from nvme_offload.aio_native.engine import Failure, Op, Operation, Segment
from tests.support.engine_tools import ALIGNMENT, BLOCK, PATIENCE, EngineTools, Memory, pattern, run, submit

NUM_OPERATIONS = 5
REGION = 4 * BLOCK  # bytes of the file, and of memory, that one operation has for itself


def draw_faults(draw: random.Random, seed: int) -> FaultSpec:
    """Any mixture of faults; in half of the cases none that is final."""
    final = draw.choice((0.0, 0.05))
    again = {"short": draw.choice((0.0, 0.3, 0.9)), "eintr": draw.choice((0.0, 0.2)), "eagain": draw.choice((0.0, 0.2))}
    ends = {"eio": final, "enospc": final * draw.choice((0.0, 1.0))}
    late = {"delay": draw.choice((0.0, 0.3)), "reorder": draw.choice((0.0, 0.5)), "max_delay_us": 200}
    return FaultSpec(seed=seed, **again, **ends, **late)


def draw_segments(draw: random.Random, memory: Memory, fd: int, start: int, unit: int) -> list[Segment]:
    """Disjoint segments inside one region, at the same place in file and memory."""
    cuts = sorted(draw.sample(range(REGION // unit + 1), 2 * draw.randint(1, 3)))
    return [
        memory.segment(fd, start + low * unit, start + low * unit, (high - low) * unit)
        for low, high in zip(cuts[::2], cuts[1::2], strict=True)
    ]


class FaultConformance(EngineTools):
    """Faults come from a seed, which every failure message names."""

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 1000), marks=pytest.mark.slow)], ids=str)
    def test_any_mixture_of_faults(self, seeds, direct):
        content = pattern(1, NUM_OPERATIONS * REGION)
        fd = self.file(content)
        issue_fd = fd
        if direct:
            issue_fd = self.open_again(fd, os.O_RDWR | os.O_DIRECT)
        for seed in seeds:
            draw = random.Random(seed)
            spec = draw_faults(draw, seed)
            os.pwrite(fd, content, 0)
            memory = Memory.of(pattern(seed + 2, len(content)))
            engine = self.open(queue_depth=draw.choice((1, 2, 8)), faults=spec)
            operations: list[tuple[Op, list[Segment], Operation]] = []
            for index in range(NUM_OPERATIONS):
                op, unit = draw.choice(list(Op)), ALIGNMENT if direct else draw.choice((1, 512, ALIGNMENT))
                segments = draw_segments(draw, memory, issue_fd, index * REGION, unit)
                operations.append((op, segments, submit(engine, op, segments)))
            for index, (op, segments, operation) in enumerate(operations):
                where = f"{spec}, direct={direct}, operation {index}: {op.name} {segments}"
                assert operation.wait(PATIENCE), f"lost: {where}"
                if operation.failure is None:
                    self.check_region(fd, memory, index, self.expected(seed, content, op, segments, index), where)
                else:
                    check_failure(operation.failure, spec, op, segments, where)
            engine.close()

    def expected(self, seed: int, content: bytes, op: Op, segments: list[Segment], index: int) -> tuple[bytes, bytes]:
        """What a region of the file and of memory holds after a successful operation."""
        start = index * REGION
        in_file = bytearray(content[start : start + REGION])
        in_memory = bytearray(pattern(seed + 2, len(content))[start : start + REGION])
        for segment in segments:
            span = slice(segment.offset - start, segment.offset - start + segment.size_bytes)
            if op is Op.READ:
                in_memory[span] = in_file[span]
            else:
                in_file[span] = in_memory[span]
        return bytes(in_file), bytes(in_memory)

    def check_region(self, fd: int, memory: Memory, index: int, expected: tuple[bytes, bytes], where: str) -> None:
        if self.moves_data:
            in_file, in_memory = expected
            assert os.pread(fd, REGION, index * REGION) == in_file, f"wrong bytes in the file: {where}"
            assert memory.bytes(index * REGION, REGION) == in_memory, f"wrong bytes in memory: {where}"

    def test_short_transfers_are_finished(self):
        engine, fd = self.open(faults=FaultSpec(seed=1, short=0.9)), self.file(pattern(2, REGION))
        memory = Memory(REGION)
        assert run(engine, Op.READ, memory.segment(fd)).failure is None
        assert not self.moves_data or memory.bytes() == pattern(2, REGION)
        stats = engine.stats()
        assert stats.retries > 0
        assert stats.bytes_read >= REGION

    @pytest.mark.parametrize("op", list(Op))
    @pytest.mark.parametrize("kind", ["eintr", "eagain"])
    def test_repetition_is_bounded(self, op, kind):
        faults = FaultSpec(seed=1, eintr=float(kind == "eintr"), eagain=float(kind == "eagain"))
        engine, fd, memory = self.open(faults=faults), self.file(bytes(BLOCK)), Memory(BLOCK)
        failure = run(engine, op, memory.segment(fd)).failure
        assert failure == Failure(getattr(errno, kind.upper()), fd, 0, BLOCK)
        assert 2 <= engine.stats().requests <= 1000
        assert engine.stats().retries == engine.stats().requests - 1

    def test_a_lost_sector_is_named(self):
        engine, fd = self.open(faults=FaultSpec(seed=1, eio=1.0)), self.file(bytes(4 * BLOCK))
        for op in Op:
            failure = run(engine, op, Memory(100).segment(fd, 3 * BLOCK + 1)).failure
            assert failure == Failure(errno.EIO, fd, 3 * BLOCK + 1, 100)

    def test_a_full_disk_stops_writes_and_spares_reads(self):
        engine, fd = self.open(faults=FaultSpec(seed=1, enospc=1.0)), self.file(bytes(BLOCK))
        memory = Memory(BLOCK)
        assert run(engine, Op.READ, memory.segment(fd)).failure is None
        assert run(engine, Op.WRITE, memory.segment(fd)).failure == Failure(errno.ENOSPC, fd, 0, BLOCK)

    @pytest.mark.parametrize("num_blocks", [1, 40])
    def test_nothing_waits_for_ever_when_all_is_reordered(self, num_blocks):
        engine = self.open(faults=FaultSpec(seed=1, reorder=1.0, max_delay_us=500))
        fd, memory = self.file(pattern(3, num_blocks * BLOCK)), Memory(num_blocks * BLOCK)
        assert run(engine, Op.READ, memory.segment(fd)).failure is None
        assert not self.moves_data or memory.bytes() == pattern(3, num_blocks * BLOCK)


def check_failure(failure: Failure, spec: FaultSpec, op: Op, segments: list[Segment], where: str) -> None:
    """A failure is one that was injected, and lies inside the operation."""
    possible = set()
    if spec.eio:
        possible.add(errno.EIO)
    if spec.enospc and op is Op.WRITE:
        possible.add(errno.ENOSPC)
    assert failure.errno in possible, f"{failure}: {where}"
    assert any(
        failure.fd == fd and offset <= failure.offset and failure.offset + failure.size_bytes <= offset + size
        for fd, offset, _, size in segments
    ), f"{failure} lies outside: {where}"
