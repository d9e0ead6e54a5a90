"""A step of a run with a log, and who reads its state, cut short anywhere: the bits stay, and so do the buffers."""

from itertools import count

import pytest
import torch

from tests.support.interrupts import STRIKES, Interrupt, every, raise_struck, strided, struck
from tests.support.logged_pair import ADAMW
from tests.support.tiers import check_buffers, goes_on
from tests.support.training import BLOCK, noted


@pytest.fixture
def pair(pairs):
    pair = pairs(ADAMW, 3, seed=2, dtypes=(torch.bfloat16,), shapes=[(BLOCK,)] * 7, buffers=4)
    pair.plain_step()
    return pair


@STRIKES
@strided(1597)
def test_a_step_that_is_cut_short_is_finished_and_logged_once(pair, strike, stride):
    optimizer = pair.logged

    def step(interrupt):
        before = optimizer.stats().steps
        struck(interrupt, optimizer.step)
        if not goes_on(optimizer, before):  # struck in the kernel, of which nobody knows how far it got
            pair.load()

    for interrupt in every(stride, strike):
        pair.plain_step(by=lambda at=interrupt: step(at))
        check(pair, interrupt)


@strided(1597)
@pytest.mark.parametrize("read", ["state_dict", "synchronize"])
def test_a_reader_that_is_cut_short_changes_nothing(pair, read, stride):
    for interrupt in every(stride, raise_struck):
        pair.plain_step()
        struck(interrupt, getattr(pair.logged, read))
        pair.plain_step()
        check(pair, interrupt)


def test_a_log_is_not_done_twice_by_who_reads_again(pair):
    """Struck when the kernel has done it, and nobody has noted that."""
    for number in count():
        pair.plain_step()
        interrupt = Interrupt(after_the_kernel(number), raise_struck)
        struck(interrupt, pair.logged.state_dict)
        if not interrupt.place:
            break
        check(pair, interrupt)
    assert number > 1, "subgroups"


def after_the_kernel(number):
    """Say of a point whether the kernel has just updated a subgroup, after so many others."""
    passed = count()
    return lambda point: (
        point.code.co_qualname == "KernelPool.update" and "CALL" in point.opcode and next(passed) == number
    )


def check(pair, interrupt):
    """The bits are those of the other training, and each buffer is free or has one owner."""
    with noted(f"struck at {interrupt.place}"):
        pair.check()
    check_buffers(pair.logged, interrupt.place)
    pair.logged.synchronize()
