"""The one thing that rings when an operation is done; and descriptors, which have one end."""

import contextlib
import errno
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from nvme_offload.aio_native.bell import Bell
from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.aio_native.engine import Op, Segment
from nvme_offload.aio_native.operation import PythonOperation
from tests.support.interrupts import Interrupt, Struck, every, raise_struck

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0


@pytest.fixture
def bell():
    with_descriptor = Bell()
    yield with_descriptor
    with_descriptor.close()


def operation():
    return PythonOperation(Op.READ, [Segment(-1, 0, 0, 4096)])


def test_it_rings_for_whichever_is_done_first(bell):
    operations = [operation() for _ in range(3)]
    assert all(map(bell.hang_on, operations))
    assert bell.wait(0) is False
    operations[1].complete(None)
    assert bell.wait(PATIENCE) is True
    assert bell.wait(0) is False, "one wait takes all that rang"


def test_no_descriptor_is_lost_to_an_exception(bell):
    before = len(os.listdir("/proc/self/fd"))
    for interrupt in every(1, raise_struck):
        hung = operation()
        with contextlib.suppress(Struck), interrupt:
            bell.hang_on(hung)
        hung.complete(None)
        assert len(os.listdir("/proc/self/fd")) == before, interrupt.place


def test_it_rings_at_once_for_what_is_done(bell):
    done = operation()
    done.complete(None)
    assert bell.hang_on(done)
    assert bell.wait(0)


def test_a_thread_without_a_timeout_is_rung_up(bell):
    waiting = threading.Thread(target=bell.wait)
    waiting.start()
    bell.ring()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_without_a_descriptor_it_says_that_it_will_not_ring(bell, monkeypatch):
    monkeypatch.setattr(os, "dup", Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    assert bell.hang_on(operation()) is False


def test_closed_twice():
    bell = Bell()
    number = bell.fileno()
    bell.close()
    bell.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_nobody_else_makes_one():
    """But for pyuring's, which the ring itself reads: that one has to block."""
    sources = [path for part in ("aio_native", "offload", "optim", "perf") for path in (ROOT / part).rglob("*.py")]
    makers = {path.name for path in sources if re.search(r"\bos\.eventfd\b", path.read_text())}
    assert makers == {"bell.py", "pyuring.py"}


def num_open():
    return len(os.listdir("/proc/self/fd"))


def test_it_is_open_until_it_is_closed_or_nobody_has_it(tmp_path):
    before = num_open()
    kept = Descriptor(os.open, tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    assert os.path.samestat(os.fstat(kept.fileno()), os.stat(tmp_path))
    dropped = Descriptor(os.dup, kept.fileno())
    assert num_open() == before + 2
    kept.close()
    kept.close()
    assert kept.fileno() == -1
    del dropped
    assert num_open() == before
    with Descriptor(os.eventfd, 0) as eventfd:
        os.fstat(eventfd)
    assert num_open() == before


def test_what_is_not_opened_is_said(tmp_path):
    before = num_open()
    with pytest.raises(FileNotFoundError):
        Descriptor(os.open, tmp_path / "missing", os.O_RDONLY)
    assert num_open() == before


@pytest.mark.parametrize("make", [lambda: Descriptor(os.eventfd, 0), Bell], ids=["descriptor", "bell"])
def test_no_exception_loses_it(make):
    before = num_open()
    for interrupt in every(1, raise_struck):
        made = None
        with suppress(Struck), interrupt:
            made = make()
        with suppress(Struck), interrupt:
            if made is not None:
                made.close()
        del made
        interrupt.kept = None  # its frames have it
        assert num_open() == before, interrupt.place


def test_its_end_has_no_point_at_which_a_handler_could_raise():
    """Python prints what a finalizer raises, and never does what it had not done yet."""
    before = num_open()
    interrupt = Interrupt(1, raise_struck)
    dropped = Descriptor(os.eventfd, 0)
    with interrupt:
        del dropped
    assert not interrupt.place
    assert num_open() == before
