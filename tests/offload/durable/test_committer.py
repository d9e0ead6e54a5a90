"""Commits in a thread of their own: one at a time, waited for or not, and a failure ends nothing."""

import threading
from contextlib import suppress

import pytest

from nvme_offload import ClosedError, StateError
from nvme_offload.offload.durable.committer import Committer
from tests.support.interrupts import Struck, every, raise_struck
from tests.support.training import run_child


@pytest.fixture
def committer():
    committer = Committer()
    yield committer
    committer.close()


def test_it_goes_on_while_nobody_waits(committer):
    go, done = threading.Event(), []
    committer.begin(lambda: (go.wait(60), done.append(threading.current_thread().name)))
    assert committer.is_busy
    with pytest.raises(StateError, match="no commit under way"):
        committer.begin(lambda: None)
    go.set()
    committer.wait()
    assert (done, committer.is_busy, committer.num_committed) == (["committer"], False, 1)
    assert committer.take_failure() is None
    assert committer.waited_seconds > 0
    assert committer.commit_seconds > 0


def test_a_failure_is_told_once_and_the_next_commit_is_made(committer):
    def fail():
        raise OSError("no")

    committer.begin(fail)
    committer.wait()
    assert str(committer.take_failure()) == "no"
    assert committer.take_failure() is None
    committer.begin(lambda: None)
    committer.wait()
    assert (committer.num_committed, committer.num_failed) == (1, 1)


def test_closing_waits_and_ends_the_thread(committer):
    before, done = threading.active_count(), []
    committer.begin(lambda: done.append(1))
    committer.close()
    committer.close()
    assert done == [1]
    assert threading.active_count() <= before + 1  # it is about to end
    with pytest.raises(ClosedError):
        committer.begin(lambda: None)


def test_nothing_is_started_without_a_commit():
    before = threading.active_count()
    Committer().close()
    assert threading.active_count() == before


UNDER_WAY_AT_EXIT = """
import os, sys
from nvme_offload.aio_native.engine import EngineOptions, Op
from nvme_offload.aio_native.faults import FaultSpec
from nvme_offload.aio_native.registry import open_engine
from nvme_offload.offload.durable.committer import Committer
from tests.support.engine_tools import BLOCK, Memory

late = FaultSpec(seed=1, delay=1.0, max_delay_us=2_000_000)
options = EngineOptions(queue_depth=4, block_size=BLOCK, rings=1, alignment=4096, max_operations=4, faults=late)
engine, memory = open_engine("io_uring", options).engine, Memory(BLOCK)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
write = engine.submit(Op.WRITE, [memory.segment(fd)])
committer = Committer()
committer.begin(lambda: (write.wait(), print("committed", flush=True)))
print("left", committer.is_busy, flush=True)
"""


def test_a_commit_that_waits_in_native_code_ends_before_the_interpreter(tmp_path):
    """Else the thread is unwound there, and C++ aborts the process: terminate called without an active exception."""
    assert run_child(UNDER_WAY_AT_EXIT, tmp_path / "file", fresh=True).split() == ["left", "True", "committed"]


def test_what_begins_a_commit_or_waits_for_it_can_be_interrupted():
    for call in ("begin", "wait"):
        for interrupt in every(1, raise_struck):
            committer, done = Committer(), []

            def begin(committer=committer, done=done):
                committer.begin(lambda: done.append(1))

            if call == "wait":
                begin()
            with suppress(Struck, RuntimeError), interrupt:  # RuntimeError: what Thread.start makes of it
                (begin if call == "begin" else committer.wait)()
            committer.wait()
            committer.close()
            assert len(done) <= 1, interrupt.place
            assert done or call == "begin", interrupt.place
            assert not committer.is_busy
