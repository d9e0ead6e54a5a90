"""Swap files that stay and are opened again: what somebody refers to is taken first, the rest is free."""

import itertools
import os
import random
from functools import partial

import pytest
import torch

from nvme_offload.offload.durable.directory import DurableDirectory
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.storage.extent import FreeList, Stripe
from nvme_offload.offload.storage.swap_space import SwapSpace

KIB = 1 << 10


@pytest.fixture
def open_space(tmp_path):
    spaces = []

    def open_one(num_paths=1, weights=None):
        paths = [tmp_path / str(number) for number in range(num_paths)]
        for path in paths:
            path.mkdir(exist_ok=True)
        directory = partial(DurableDirectory, name="run", rank=0)
        spaces.append(SwapSpace(paths, weights=weights, direct="optional", directory=directory))
        return spaces[-1]

    yield open_one
    for space in spaces:
        space.close()


def moved(stripes, before, after):
    """Stripes of a space that was closed, in one that is open."""
    return [Stripe(after[before.index(stripe.fd)], stripe.offset, stripe.size_bytes) for stripe in stripes]


def test_bytes_and_promises_stay(open_space, monkeypatch):
    space = open_space(2)
    fds, extents = space.fds, space.allocate_all([64 * KIB, 40 * KIB, 24 * KIB])
    for stripe in extents[1].stripes:
        os.pwritev(stripe.fd, [memory_of(stripe.size_bytes)], stripe.offset)
    paths = [space.path_of(fd) for fd in space.fds]
    space.close()
    assert all(path.exists() for path in paths)
    space = open_space(2)
    kept = space.claim(moved(extents[1].stripes, fds, space.fds))
    monkeypatch.setattr(os, "posix_fallocate", None)  # nothing is asked for
    space.promise()
    others = space.allocate_all([64 * KIB, 24 * KIB])
    taken = [stripe for extent in (kept, *others) for stripe in extent.stripes]
    assert sum(stripe.size_bytes for stripe in taken) == 128 * KIB
    assert len({(fd, at) for fd, offset, size in taken for at in range(offset, offset + size, 4 * KIB)}) == 32
    for stripe in kept.stripes:
        content = space.path_of(stripe.fd).read_bytes()[stripe.offset : stripe.offset + stripe.size_bytes]
        assert content == b"\x5a" * stripe.size_bytes


def memory_of(size_bytes):
    """Aligned, as direct I/O needs it."""
    return HostRegion(size_bytes).view(torch.uint8, 0, size_bytes).fill_(0x5A).numpy().data


def test_what_is_claimed_twice_is_refused_and_keeps_nothing(open_space):
    space = open_space(2)
    mine = space.claim([Stripe(space.fds[0], 8 * KIB, 8 * KIB), Stripe(space.fds[1], 0, 4 * KIB)])
    for offset in (8 * KIB, 4 * KIB, 12 * KIB):
        with pytest.raises(ValueError, match="are taken already"):
            space.claim([Stripe(space.fds[1], 40 * KIB, 4 * KIB), Stripe(space.fds[0], offset, 8 * KIB)])
    assert space.claim([Stripe(space.fds[1], 40 * KIB, 4 * KIB)])
    space.free(mine)
    assert space.claim(mine.stripes)


def test_what_was_claimed_and_lost_is_free_again(open_space):
    space = open_space()
    stripes = [Stripe(space.fds[0], 0, 8 * KIB)]
    extent = space.claim(stripes)
    del extent
    assert space.claim(stripes)


def test_blocks_that_somebody_took_are_promised_again(open_space, tmp_path):
    space = open_space()
    (extent,), path = space.allocate_all([256 * KIB]), space.path_of(space.fds[0])
    space.close()
    os.truncate(path, 16 * KIB)
    space = open_space()
    claimed = space.claim(moved(extent.stripes, [extent.stripes[0].fd], space.fds))
    space.promise()
    assert path.stat().st_blocks * 512 >= 256 * KIB
    space.check_whole()
    assert claimed.size_bytes == 256 * KIB


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [1, 5, 2]])
def test_every_part_of_an_extent_is_striped_by_itself(open_space, weights):
    space = open_space(len(weights), weights)
    parts = (256 * KIB, 64 * KIB)
    extent, single = space.allocate_all([parts, 20 * KIB])
    for start, size_bytes in ((0, parts[0]), (parts[0], parts[1])):
        segments = extent.segments(0, start, size_bytes)
        shares = [sum(segment.size_bytes for segment in segments if segment.fd == fd) for fd in space.fds]
        assert sum(shares) == size_bytes
        assert all(
            abs(share - size_bytes * weight / sum(weights)) <= 4 * KIB
            for share, weight in zip(shares, weights, strict=True)
        )
    for fd in space.fds:  # one range in each file
        ranges = sorted((offset, size) for its_fd, offset, size in extent.stripes if its_fd == fd)
        assert all(first + size == second for (first, size), (second, _) in itertools.pairwise(ranges))
    space.free(extent)
    space.free(single)
    assert space.allocate(320 * KIB).stripes[0].offset == 0


def test_parts_on_one_path_are_one_stripe(open_space):
    assert len(open_space().allocate_all([(8 * KIB, 4 * KIB)])[0].stripes) == 1


def test_claims_and_takes_never_meet():
    chance = random.Random(5)
    for _ in range(50):
        ranges, taken = FreeList(), []
        for _ in range(60):
            size = chance.randrange(1, 9)
            if chance.random() < 0.3 and taken:
                ranges.give_back(*taken.pop(chance.randrange(len(taken))))
            elif chance.random() < 0.5:
                taken.append((ranges.take(size), size))
            else:
                offset = chance.randrange(200)
                free = all(offset + size <= start or start + length <= offset for start, length in taken)
                if free:
                    ranges.claim(offset, size)
                    taken.append((offset, size))
                else:
                    with pytest.raises(ValueError, match="taken already"):
                        ranges.claim(offset, size)
            cells = [cell for offset, size in taken for cell in range(offset, offset + size)]
            assert len(cells) == len(set(cells))
            assert ranges.end >= max(cells, default=0)
