"""A source is let go when it is copied, and who asks for it is called at the end of a transfer."""

import logging
import threading
from unittest.mock import Mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nvme_offload import FaultSpec, SwapIOError
from tests.support.swapper_tools import PATIENCE, KiB, random_bits, same_bits

SLOW_DRIVE = FaultSpec(seed=5, delay=1.0, max_delay_us=20_000)


@pytest.mark.parametrize("shape", [(0,), (3,), (40_000,), (300, 500)], ids=str)
def test_a_source_is_gone_when_it_is_copied(open_swapper, shape):
    """Pieces of it are on their way to a slow drive then, and only in staging buffers."""
    swapper = open_swapper(faults=SLOW_DRIVE, staging_budget=2048 * KiB)
    source = random_bits(shape)
    expected = source.clone()
    storage, copied = StorageWeakRef(source.untyped_storage()), threading.Event()
    transfer = swapper.swap_out("x", source, on_copied=copied.set)
    del source
    assert copied.wait(PATIENCE)
    assert storage.expired()
    transfer.wait(PATIENCE)
    assert same_bits(swapper.swap_in("x").wait(PATIENCE), expected)


def test_nothing_is_copied_where_there_is_no_space(open_swapper, monkeypatch):
    swapper, called = open_swapper(), []
    monkeypatch.setattr(swapper.tier, "reserve", Mock(side_effect=OSError(28, "no space")))
    transfer = swapper.swap_out("x", torch.ones(10), on_copied=lambda: called.append("copied"))
    transfer.on_done(lambda: called.append("done"))
    with pytest.raises(OSError, match="no space"):
        transfer.wait(PATIENCE)
    swapper.synchronize()
    assert called == ["done"]


def test_an_exception_where_a_source_was_copied_fails_the_transfer(swapper):
    with pytest.raises(KeyError, match="mine"):
        swapper.swap_out("x", torch.ones(10), on_copied=Mock(side_effect=KeyError("mine"))).wait(PATIENCE)
    assert swapper.names() == []


def test_the_end_of_a_transfer_is_told_once_to_each(open_swapper):
    swapper = open_swapper(faults=SLOW_DRIVE)
    told, last = [], threading.Event()
    transfer = swapper.swap_out("x", torch.ones(1000))
    transfer.on_done(lambda: told.append(transfer.done()))
    transfer.on_done(last.set)
    assert last.wait(PATIENCE)
    transfer.on_done(lambda: told.append("late"))  # it is done: here and now
    assert told == [True, "late"]
    read = swapper.swap_in("x")
    read.on_done(lambda: told.append(read.wait(0).sum().item()))
    swapper.synchronize()
    swapper.prefetch("x")
    swapper.synchronize()
    swapper.swap_in("x").on_done(lambda: told.append("prefetched"))
    assert told == [True, "late", 1000.0, "prefetched"]


def test_a_failure_is_told_to_who_reads_behind_it_too(open_swapper):
    swapper = open_swapper(faults=FaultSpec(seed=1, eio=1.0, delay=1.0, max_delay_us=20_000))
    write, told = swapper.swap_out("x", torch.ones(1000)), []
    read = swapper.swap_in("x")
    for transfer in (write, read):
        transfer.on_done(lambda it=transfer: told.append(it.done()))
    for transfer in (write, read):
        with pytest.raises(SwapIOError):
            transfer.wait(PATIENCE)
    swapper.close()
    assert told == [True, True]


def test_who_is_told_may_call_the_swapper_while_another_thread_holds_what_he_wants(open_swapper):
    """The swapper holds no lock while it tells: two threads that want two locks in either order go on."""
    swapper = open_swapper()
    mine, told, ends = threading.Lock(), [], threading.Semaphore(0)

    def tell(number):
        with mine:
            told.append((number, f"{number}" in swapper.names()))
        ends.release()

    for number in range(200):
        transfer = swapper.swap_out(f"{number}", torch.ones(10), on_copied=lambda: mine.acquire() and mine.release())
        transfer.on_done(lambda number=number: tell(number))
        with mine:
            swapper.names()
    assert all(ends.acquire(timeout=PATIENCE) for _ in range(200))
    assert sorted(told) == [(number, True) for number in range(200)]


def test_what_a_callback_raises_is_logged_and_stops_nothing(swapper, caplog):
    with caplog.at_level(logging.ERROR):
        swapper.swap_out("x", torch.ones(10)).on_done(Mock(side_effect=KeyError("mine")))
        swapper.synchronize()
        assert swapper.swap_in("x").wait(PATIENCE).sum() == 10
        swapper.close()  # which ends the thread that calls and logs
    assert "mine" in caplog.text
