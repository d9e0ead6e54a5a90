"""Threads that make calls, wherever a signal handler raises in who waits for them."""

from contextlib import closing

import pytest

from nvme_offload.aio_native.starting import ThreadPool
from tests.support.interrupts import STRIKES, every, struck


@STRIKES
@pytest.mark.timeout(60)
def test_whoever_is_interrupted_waits_for_nobody(strike):
    found = []

    def use():
        with closing(ThreadPool(2, "of this test")) as threads:
            pending = [threads.submit(found.append, number) for number in range(3)]
            for each in pending:
                each.result()

    for interrupt in every(1, strike):
        found.clear()
        if struck(interrupt, use) is None:
            assert sorted(found) == [0, 1, 2], interrupt.place


def test_an_error_is_raised_as_often_as_it_is_asked_for():
    with closing(ThreadPool(1, "of this test")) as threads:
        failing = threads.submit(int, "none")
        for _ in range(2):
            with pytest.raises(ValueError, match="none"):
                failing.result()
