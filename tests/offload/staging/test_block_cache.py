"""Blocks that visit staging buffers: real files, real failures, nothing lost."""

import os
import time
from dataclasses import replace

import pytest
import torch

from nvme_offload import CorruptionError, StateError, SwapIOError
from nvme_offload.offload.staging.block_cache import BlockCache
from tests.support.training import nvme_tier

SIZE = 8192


@pytest.fixture
def make_cache(tmp_path):
    """``make_cache(num_blocks, num_buffers, **arguments of BlockCache)``; block i is filled with i."""
    caches = []

    def make(num_blocks=4, num_buffers=2, **arguments):
        cache = BlockCache(nvme_tier(tmp_path, engine="aiofiles"), "numbers", num_buffers, **arguments)
        caches.append(cache)
        for block in cache.add([(f"numbers of block {number}", SIZE) for number in range(num_blocks)]):
            fill(cache, block, block.index)
        return cache

    yield make
    for cache in caches:
        cache.close()
        cache.close()
    assert not list(tmp_path.iterdir())


def fill(cache, block, value):
    with cache.holding(block, change=True, load=False) as buffer:
        buffer.view(torch.uint8, 0, SIZE).fill_(value)


def content(cache, block):
    with cache.holding(block) as buffer:
        values = buffer.view(torch.uint8, 0, SIZE).unique().tolist()
    assert len(values) == 1
    return values[0]


def learn(cache, *numbers):
    """Use these blocks in this order twice, as two steps do; then all is quiet."""
    for _ in range(2):
        for number in numbers:
            cache.order.note(number)
            content(cache, cache.blocks[number])
        cache.order.begin_step([])
        cache.order.end_step([])
    cache.synchronize()


def empty_buffers(cache):
    """Everything is on the tier alone."""
    for block in list(cache.residents):
        cache._evict(block)


class Late:
    """A transfer that is seen to be done `seconds` after it began, or later."""

    def __init__(self, transfer, seconds):
        self.operation, self.wait = transfer.operation, transfer.wait
        self._transfer, self._end = transfer, time.monotonic() + seconds

    def done(self):
        return self._transfer.done() and time.monotonic() >= self._end


def slow_down(cache, block, seconds):
    """Reads of one block take so long. Returns a list that will have the name of every block that is read."""
    read, names = cache.tier.read, []

    def read_slowly(extent, buffer, *, what, **more):
        names.append(what)
        transfer = read(extent, buffer, what=what, **more)
        return Late(transfer, seconds) if what == block.name else transfer

    cache.tier.read = read_slowly
    return names


def test_a_write_that_is_done_makes_room_for_what_is_next(make_cache):
    cache = make_cache(4, 2)
    learn(cache, 0, 1, 2, 3)
    for number in (0, 1):
        cache.order.note(number)
        fill(cache, cache.blocks[number], 100 + number)
    for block in cache.blocks[:2]:
        if block.transfer is not None:
            block.transfer.operation.wait(None)
    cache.advance()
    assert {block.index for block in cache.blocks if block.buffer is not None} == {2, 3}
    assert [content(cache, block) for block in cache.blocks] == [100, 101, 2, 3]


def test_a_held_block_stays_and_too_many_are_refused_in_words(make_cache):
    gives_up = []
    cache = make_cache(3, 2, on_pressure=lambda: [cache.release(block) for block in gives_up])
    first, second, third = cache.blocks
    cache.hold(first)
    cache.hold(second)
    with pytest.raises(StateError, match=r"numbers of block 2: .*all 2 are held: raise buffer_count of the tier of"):
        cache.hold(third)
    gives_up.append(first)
    cache.hold(third)
    assert first.buffer is None
    cache.release(second)
    cache.release(third)


def test_a_block_that_cannot_be_read_is_not_read_ahead_time_and_again(make_cache):
    cache = make_cache(4, 3)
    learn(cache, 0, 1, 2, 3)
    empty_buffers(cache)
    read = slow_down(cache, cache.blocks[1], 0.3)
    bad, good = cache.blocks[2], cache.blocks[2].extent
    with open("/proc/self/mem", "rb") as broken:
        bad.extent = replace(good, stripes=(good.stripes[0]._replace(fd=broken.fileno(), offset=0),))
        for number in (0, 1):
            cache.order.note(number)
            assert content(cache, cache.blocks[number]) == number
        assert read.count(bad.name) == 1
        with pytest.raises(SwapIOError, match="EIO"):
            cache.hold(bad)
        bad.extent = good
    assert content(cache, bad) == 2
    assert not bad.unreadable


def test_pressure_gives_the_wanted_block_one_buffer(make_cache):
    cache = make_cache(6, 3, on_pressure=lambda: [cache.release(cache.blocks[number]) for number in (0, 1)])
    blocks = cache.blocks
    learn(cache, 0, 1, 2, 5, 5, 0)
    for number in (0, 1, 2):
        cache.order.note(number)
        cache.hold(blocks[number])

    slow_down(cache, blocks[5], 0.05)
    cache.order.note(5)
    cache.hold(blocks[5])
    cache.release(blocks[5])
    cache.release(blocks[2])
    cache.synchronize()
    with_buffer = [block for block in blocks if block.buffer is not None]
    assert sorted(block.index for block in cache.residents) == [block.index for block in with_buffer]
    assert cache.pool.num_free + len(with_buffer) == 3


def test_added_blocks_do_not_take_the_buffers_of_reads_that_run_ahead(make_cache):
    cache = make_cache(5, 3)
    learn(cache, 0, 1, 2, 3, 4)
    empty_buffers(cache)
    cache.add([("numbers of a large block", 4 * SIZE)])
    assert not any(block.transfer for block in cache.blocks)
    assert [content(cache, block) for block in cache.blocks[:5]] == list(range(5))


def test_a_failed_write_keeps_its_bytes_until_the_drive_is_well(make_cache):
    cache = make_cache(4, 2)
    cache.synchronize()
    block, good = cache.blocks[0], cache.blocks[0].extent
    read_only = os.open(cache.tier.space.path_of(good.stripes[0].fd), os.O_RDONLY)
    block.extent = replace(good, stripes=(good.stripes[0]._replace(fd=read_only),))
    fill(cache, block, 77)
    for other in cache.blocks[1:]:
        assert content(cache, other) == other.index, "there is still a buffer for the others"
    with pytest.raises(SwapIOError, match=r"write of 8192 bytes .* failed: EBADF"):
        cache.synchronize()
    assert content(cache, block) == 77
    block.extent = good
    os.close(read_only)
    cache.synchronize()
    for other in cache.blocks[1:]:
        content(cache, other)
    assert block.buffer is None
    assert content(cache, block) == 77


def test_a_changed_byte_on_the_drive_is_found_where_checksums_are_on(make_cache):
    cache = make_cache(3, 2, checksum=lambda values: values.long().sum().view(1))
    cache.synchronize()
    block = next(block for block in cache.blocks if block.buffer is None)
    stripe = block.extent.stripes[0]
    with open(f"/proc/self/fd/{stripe.fd}", "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"\7", stripe.offset + 5)
    with pytest.raises(CorruptionError, match=block.name):
        cache.hold(block)
    fill(cache, block, 5)
    for other in cache.blocks:
        assert content(cache, other) == (5 if other is block else other.index)
    assert content(cache, block) == 5
