import os
from contextlib import suppress

import pytest

from nvme_offload.aio_native.bell import Bell
from nvme_offload.aio_native.descriptor import Descriptor
from tests.support.interrupts import Interrupt, Struck, every, raise_struck


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
    """What is raised in a finalizer is printed, and what it had not done yet is never done."""
    before = num_open()
    interrupt = Interrupt(1, raise_struck)
    dropped = Descriptor(os.eventfd, 0)
    with interrupt:
        del dropped
    assert not interrupt.place
    assert num_open() == before
