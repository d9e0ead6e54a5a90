"""Engines from opening to closing: draining, forks, threads, signals, interpreter exit."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nvme_offload.aio_native.engine import Engine, Op, Segment
from tests.support.engine_tools import BLOCK, PATIENCE, EngineTools, Memory, pattern, run, submit
from tests.support.interrupts import Struck, every, raise_struck
from tests.support.own_resources import Resources
from tests.support.threads import at_once


class LifeConformance(EngineTools):
    """Closing, forking, threads."""

    def test_close_finishes_what_is_under_way(self):
        engine, fd = self.open_slow(50_000), self.file(bytes(64 * BLOCK))
        source = Memory.of(pattern(9, 64 * BLOCK))
        operations = [
            submit(engine, Op.WRITE, [source.segment(fd, 16 * BLOCK * index, 16 * BLOCK * index, 16 * BLOCK)])
            for index in range(4)
        ]
        engine.close()
        assert all(operation.done() and operation.failure is None for operation in operations)
        assert not self.moves_data or os.pread(fd, 64 * BLOCK, 0) == source.bytes()

    def test_close_is_idempotent_and_final(self):
        engine, fd, memory = self.open(), self.file(bytes(BLOCK)), Memory(BLOCK)
        run(engine, Op.READ, memory.segment(fd))
        at_once([engine.close] * 3)
        engine.close()
        with pytest.raises(RuntimeError):
            engine.submit(Op.READ, [memory.segment(fd)])

    def test_descriptors_and_threads_are_given_back(self):
        self.open().close()  # what is acquired once per process
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(10):
            engine, fd, memory = self.open(), self.file(bytes(BLOCK)), Memory(BLOCK)
            run(engine, Op.READ, memory.segment(fd))
            engine.close()
        assert len(os.listdir("/proc/self/fd")) <= before[0] + 10  # the ten files are still open
        assert threading.active_count() <= before[1]

    def test_without_close_it_ends_with_its_handle(self):
        """Also where an exception came before its constructor returned: nobody has it then."""
        self.open().close()
        options, before = self.options(), Resources.steady()
        for interrupt in every(1, raise_struck):
            engine = None
            with contextlib.suppress(Struck), interrupt:
                engine = self.engine_class(options)
            del engine
            interrupt.kept = None  # it has all that its frames have
            left = Resources.settled(before).beyond(before)
            assert not left, f"{left} left by an exception at {interrupt.place or 'no point at all'}"

    def test_a_forked_child_is_told_and_harms_nothing(self):
        engine, fd, memory = self.open_slow(50_000), self.file(bytes(8 * BLOCK)), Memory(8 * BLOCK)
        operation = submit(engine, Op.READ, [memory.segment(fd)])
        pid = os.fork()
        if pid == 0:
            os._exit(_misuse_in_child(engine, memory.segment(fd)))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert operation.wait(PATIENCE)
        assert run(engine, Op.READ, memory.segment(fd)).failure is None

    def test_signals_are_blocked_in_its_threads(self):
        before = set(os.listdir("/proc/self/task"))
        engine, fd, memory = self.open(), self.file(bytes(16 * BLOCK)), Memory(16 * BLOCK)
        run(engine, Op.READ, memory.segment(fd))
        for task in set(os.listdir("/proc/self/task")) - before:
            try:
                status = Path(f"/proc/self/task/{task}/status").read_text()
            except OSError:
                continue  # ended meanwhile
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            if not fields["Name"].startswith("iou-"):  # the kernel's own
                blocked = int(fields["SigBlk"], 16)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1):
                    assert blocked >> (number - 1) & 1, f"{number!r} is not blocked in {fields['Name']}"

    def test_importing_starts_nothing_and_an_open_engine_does_not_hold_up_the_exit(self):
        self.open().close()
        script = f"""
import os, threading
from {self.engine_class.__module__} import {self.engine_class.__name__} as E
assert len(os.listdir("/proc/self/task")) == 1, "importing started a thread"
from nvme_offload.aio_native.engine import EngineOptions, Op, Segment
engine = E(EngineOptions(queue_depth=4, block_size=4096, rings=1, alignment=4096, max_operations=4))
import mmap, ctypes
memory = mmap.mmap(-1, 65536)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
engine.submit(Op.READ, [Segment(os.open("/dev/zero", os.O_RDONLY), 0, address, 65536)])
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
        assert (done.returncode, done.stderr) == (0, "")


def _misuse_in_child(engine: Engine, segment: Segment) -> int:
    """0 if every method but `close` raises RuntimeError."""
    wrong = 0
    for misuse in (lambda: engine.submit(Op.READ, [segment]), lambda: engine.register([], []), engine.stats):
        try:
            misuse()
            wrong += 1
        except RuntimeError:
            pass
        except BaseException:
            wrong += 10
    engine.close()
    engine.close()
    return wrong
