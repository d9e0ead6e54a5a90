"""Bodies share annexes: what is where, who has how many, and how much memory that is."""

import itertools
import mmap
import random

import pytest
import torch

from nvme_offload.offload.errors import ClosedError
from nvme_offload.offload.host.annexed_pool import AnnexedPool, PoolShape
from nvme_offload.offload.host.buffer_pool import BufferPool, Lease, Parts

PAGE = mmap.PAGESIZE
PARTS = Parts(8 * PAGE, 5 * PAGE, 3, PAGE)
SPLITS = (5 * PAGE, 6 * PAGE, 7 * PAGE)


def pool_of(num_buffers=3, num_annexes=7):
    return AnnexedPool(PoolShape(num_buffers, PARTS, num_annexes))


def owner(splits=SPLITS):
    return Lease(splits=splits)


def test_bytes_are_where_the_parts_are():
    pool = pool_of()
    buffer = pool.try_acquire(owner())
    assert buffer.size_bytes == 5 * PAGE
    assert not buffer.has_annex
    assert buffer.extend()
    assert buffer.is_extended
    assert buffer.size_bytes == 8 * PAGE
    for number in range(8):
        buffer.view(torch.uint8, number * PAGE, PAGE).fill_(number)
    places = buffer.places(4 * PAGE, 3 * PAGE)
    assert [size for _, size in places] == [PAGE, PAGE, PAGE]
    assert [buffer.view(torch.uint8, at * PAGE, 1).data_ptr() for at in (4, 5, 6)] == [place for place, _ in places]
    assert [int(buffer.view(torch.uint8, at * PAGE, PAGE).unique()) for at in range(8)] == list(range(8))
    assert buffer.places(PAGE, 2 * PAGE) == [(buffer.address + PAGE, 2 * PAGE)]
    assert buffer.view(torch.int32, 0, 0).numel() == 0


def test_what_is_not_there_or_not_in_one_piece_is_not_given_out():
    buffer = pool_of().try_acquire(owner())
    with pytest.raises(AssertionError, match="not there"):
        buffer.view(torch.uint8, 5 * PAGE, 1)
    with pytest.raises(AssertionError, match="not there"):
        buffer.places(4 * PAGE, 2 * PAGE)
    assert buffer.extend()
    with pytest.raises(AssertionError, match=f"not in one piece: the next begins at {5 * PAGE}"):
        buffer.view(torch.uint8, 5 * PAGE - 1, 2)


def test_who_finds_too_few_annexes_keeps_what_he_got_and_gets_the_rest_later():
    pool = pool_of(num_annexes=4)
    first, second = (pool.try_acquire(owner()) for _ in range(2))
    assert first.extend()
    assert not second.extend()
    assert second.has_annex
    assert not second.is_extended
    first.shrink()
    assert second.extend()
    assert not first.has_annex


def test_what_is_written_keeps_the_annexes_that_are_written():
    pool = pool_of()
    buffer = pool.try_acquire(owner())
    for start, end, left in (
        (0, 6 * PAGE, [5]),
        (6 * PAGE, 6 * PAGE + 9, [6]),
        (0, 5 * PAGE, []),
        (0, 8 * PAGE, [5, 6, 7]),
    ):
        assert buffer.extend()
        buffer.shrink(start, end)
        assert pool.annexes.num_free == 7 - len(left)
        for page in left:
            buffer.view(torch.uint8, page * PAGE, PAGE)


def test_with_a_buffer_its_annexes_are_free_again():
    pool = pool_of()
    buffer = pool.try_acquire(owner())
    assert buffer.extend()
    buffer.release()
    assert (pool.num_free, pool.annexes.num_free) == (3, 7)


def test_owners_with_other_parts_follow_each_other():
    pool = pool_of(num_buffers=1)
    for splits, annexes in ((SPLITS, 3), ((PAGE,), 1), ((), 0), (SPLITS[:2], 2)):
        with pool.try_acquire(owner(splits)) as buffer:
            assert buffer.extend()
            assert pool.annexes.num_free == 7 - annexes
            assert buffer.size_bytes == (splits[-1] + PAGE if splits else 5 * PAGE)
    assert pool.annexes.num_free == 7


def test_all_of_the_memory_is_registered_and_none_twice():
    pool = pool_of()
    assert sum(size for _, size in pool.regions) == pool.size_bytes == (3 * 5 + 7) * PAGE
    buffers = [pool.try_acquire(owner()) for _ in range(2)]
    assert all(buffer.extend() for buffer in buffers)
    taken = sorted(place for buffer in buffers for place in buffer.places(0, 8 * PAGE))
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(taken))
    for address, size in taken:
        assert any(start <= address and address + size <= start + length for start, length in pool.regions)


def test_a_closed_pool_gives_out_nothing():
    pool = pool_of()
    buffer = pool.try_acquire(owner())
    pool.close()
    with pytest.raises(ClosedError):
        buffer.extend()


def test_in_the_memory_of_four_buffers_there_are_five():
    """Of 4 Mi elements in bf16 under AdamW, rewritten every third step: 10 bytes of state and three times 2 beside."""
    mib = 1 << 20
    shape = PoolShape.within(4, Parts(64 * mib, 40 * mib, 3, 8 * mib), 32 * mib)
    assert shape == PoolShape(5, Parts(64 * mib, 40 * mib, 3, 8 * mib), 7)


@pytest.mark.parametrize("parts", [Parts(48, 40, 1, 8), Parts(56, 40, 2, 8), Parts(64, 64)])
def test_where_no_more_bodies_fit_all_buffers_are_whole(parts):
    shape = PoolShape.within(4, parts, 1)
    assert shape == PoolShape.whole(4, parts)
    assert isinstance(shape.pool(), BufferPool)
    assert not isinstance(shape.pool(), AnnexedPool)


def test_what_has_to_be_under_way_to_keep_a_drive_busy_has_annexes():
    small = Parts(64 * PAGE, 40 * PAGE, 3, 8 * PAGE)
    assert PoolShape.within(40, small, 1).num_annexes == 7
    assert PoolShape.within(40, small, 400 * PAGE).num_annexes == 34
    assert PoolShape.within(4, small, 400 * PAGE) == PoolShape.whole(4, small)


def test_it_is_never_more_memory_than_that_of_whole_buffers_nor_fewer_of_them():
    draw = random.Random(5)
    for _ in range(300):
        body, annex, number, count = (draw.randrange(1, most) for most in (40, 20, 17, 12))
        parts = Parts((body + number * annex) * PAGE, body * PAGE, number, annex * PAGE)
        shape = PoolShape.within(count, parts, draw.randrange(80) * PAGE)
        pool = shape.pool()
        assert pool.size_bytes <= count * parts.whole_bytes
        assert pool.num_buffers >= count
        assert pool.holds(parts)
        assert pool.most_bytes == parts.whole_bytes
        assert min(count, 2) <= pool.num_whole <= pool.num_buffers
        pool.close()
