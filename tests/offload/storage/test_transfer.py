"""A transfer can be waited for and awaited, by any number of threads and tasks, and outlives those who gave up."""

import asyncio
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from nvme_offload import SwapIOError, Transfer
from nvme_offload.aio_native.engine import Op, Segment
from nvme_offload.aio_native.operation import PythonOperation
from tests.support.own_resources import Resources

PATIENCE = 30.0


def make():
    operation = PythonOperation(Op.READ, [Segment(-1, 0, 0, 4096)])
    return operation, Transfer(operation, to_error, "result")


def to_error(failure):
    where = {"offset": failure.offset, "size_bytes": failure.size_bytes, "direction": "read"}
    return SwapIOError(failure.errno, path="/swap", **where)


def later(action, *arguments, seconds=0.03):
    timer = threading.Timer(seconds, action, arguments)
    timer.start()
    return timer


def test_wait_gives_the_result_every_time():
    operation, transfer = make()
    assert not transfer.done()
    for mistake in (lambda: transfer * 2, lambda: torch.ones(2) / transfer, lambda: transfer[0], lambda: [*transfer]):
        with pytest.raises(TypeError, match=r"call wait\(\) on it"):
            mistake()
    later(operation.complete, None)
    assert [transfer.wait(), transfer.wait(0), transfer.done()] == ["result", "result", True]


def test_wait_times_out_and_the_transfer_goes_on():
    operation, transfer = make()
    with pytest.raises(TimeoutError, match="4096 bytes"):
        transfer.wait(0.01)
    operation.complete(None)
    assert transfer.wait() == "result"


def test_cancelling_a_task_does_not_cancel_the_transfer():
    operation, transfer = make()

    async def main():
        task = asyncio.ensure_future(transfer)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not transfer.done()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(transfer, 0.01)
        later(operation.complete, None)
        return await transfer

    assert asyncio.run(main()) == "result"


def test_a_loop_that_is_gone_is_not_written_to():
    """Its eventfd is closed, and the number may be that of a swap file by then."""
    operation, transfer = make()

    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(transfer, 0.01)

    for _ in range(3):
        asyncio.run(give_up())
    readers, writers = zip(*(os.pipe2(os.O_NONBLOCK) for _ in range(20)), strict=True)  # take the freed numbers
    try:
        operation.complete(None)
        for reader in readers:
            with pytest.raises(BlockingIOError):
                os.read(reader, 8)
    finally:
        for fd in (*readers, *writers):
            os.close(fd)
    assert transfer.wait() == "result"


def test_a_loop_that_refused_to_watch_is_asked_again(monkeypatch):
    operation, transfer = make()
    refuse = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))  # fs.epoll.max_user_watches

    async def main():
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            patch.setattr(loop, "add_reader", refuse)
            with pytest.raises(OSError, match="No space left"):
                await transfer
        later(operation.complete, None)
        return await asyncio.wait_for(transfer, 5)

    assert asyncio.run(main()) == "result"


def test_awaiting_works_where_no_descriptor_is_left(monkeypatch):
    operation, transfer = make()
    refuse = Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))

    async def main():
        monkeypatch.setattr(os, "dup", refuse)
        later(operation.complete, None)
        return await asyncio.wait_for(transfer, PATIENCE)

    assert asyncio.run(main()) == "result"


def test_loops_in_several_threads():
    pairs = [make() for _ in range(4)]

    async def watch(transfer):
        return await transfer

    with ThreadPoolExecutor(4) as threads:
        results = threads.map(lambda pair: asyncio.run(watch(pair[1])), pairs, timeout=PATIENCE)
        time.sleep(0.05)
        for operation, _ in pairs:
            operation.complete(None)
        assert list(results) == ["result"] * 4


def test_awaiting_leaks_no_descriptor():
    async def main():
        for _ in range(20):
            operation, transfer = make()
            later(operation.complete, None, seconds=0.001)
            await transfer

    asyncio.run(main())
    before = Resources.steady()
    asyncio.run(main())
    assert not Resources.settled(before).beyond(before)


def test_loops_that_are_closed_midway_leave_no_descriptor():
    def close_midway():
        operation, transfer = make()
        loop = asyncio.new_event_loop()
        task = loop.create_task(wait_for(transfer))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        task._log_destroy_pending = False  # that is what is tested
        operation.complete(None)

    async def wait_for(transfer):
        return await transfer

    for _ in range(3):
        close_midway()
    before = Resources.steady()
    for _ in range(20):
        close_midway()
    assert not Resources.settled(before).beyond(before)
