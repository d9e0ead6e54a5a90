"""Space is promised before it is used, striped by weight, given back, and a full disk is said in bytes.

And files that others wrote are read where they are.
"""

import errno
import fcntl
import itertools
import os
import random
import subprocess
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from nvme_offload import OutOfSpaceError, SwapIOError, WeightFileError
from nvme_offload.aio_native.faults import FaultSpec
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.durable.directory import DurableDirectory
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.storage import swap_file
from nvme_offload.offload.storage.extent import FreeList, Stripe
from nvme_offload.offload.storage.file_ranges import FileIdentity, FileRange, RangeLayout
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.storage.swap_file import SwapFile
from nvme_offload.offload.storage.swap_space import SwapSpace
from tests.support.forked import printed
from tests.support.sandbox import needs_mounts, run_python
from tests.support.training import nvme_tier, section


@pytest.fixture
def open_space(tmp_path):
    spaces = []

    def open_one(num_paths=1, weights=None, direct="required", **more):
        paths = [tmp_path / str(number) for number in range(num_paths)]
        for path in paths:
            path.mkdir(exist_ok=True)
        spaces.append(SwapSpace(paths, weights=weights, direct=direct, **more))
        return spaces[-1]

    yield open_one
    for space in spaces:
        space.close()


def ranges_of(extents):
    stripes = [stripe for extent in extents for stripe in extent.stripes]
    return sorted((stripe.fd, stripe.offset, stripe.offset + stripe.size_bytes) for stripe in stripes)


def overlap(ranges):
    pairs = itertools.pairwise(ranges)
    return any(fd == next_fd and end > start for (fd, _, end), (next_fd, start, _) in pairs)


def test_files_are_private_direct_and_deleted_at_the_end(open_space, tmp_path):
    space = open_space(2)
    for fd in space.fds:
        path = space.path_of(fd)
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.is_relative_to(tmp_path)
    assert space.direct
    assert space.alignment >= 4096
    space.close()
    space.close()
    assert [list(path.iterdir()) for path in space.paths] == [[], []]


def test_space_is_promised_when_it_is_handed_out(open_space):
    space = open_space()
    extent = space.allocate(10 << 20)
    status = os.fstat(space.fds[0])
    assert extent.size_bytes == 10 << 20
    assert status.st_size >= 10 << 20
    assert status.st_blocks * 512 >= 10 << 20
    assert space.allocate_all([]) == []


@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 4097, 123_457])
def test_extents_are_aligned_and_large_enough(open_space, size_bytes):
    space = open_space(3, weights=[3, 1, 2])
    extent = space.allocate(size_bytes)
    assert size_bytes <= extent.size_bytes < size_bytes + space.alignment
    for stripe in extent.stripes:
        assert stripe.size_bytes > 0
        assert stripe.offset % space.alignment == 0
        assert stripe.size_bytes % space.alignment == 0


def test_extents_never_overlap_and_freed_ranges_are_used_again(open_space):
    seed = 20
    rng = random.Random(seed)
    space = open_space(2, weights=[1, 2])
    held = []
    for _ in range(400):
        if held and rng.random() < 0.48:
            space.free(held.pop(rng.randrange(len(held))))
        else:
            held.append(space.allocate(rng.randrange(1, 200_000)))
        assert not overlap(ranges_of(held)), f"seed {seed}"
    for extent in held:
        space.free(extent)
    sizes = [os.fstat(fd).st_size for fd in space.fds]
    whole = space.allocate(sum(sizes) // 2)  # all holes are one again: nothing has to grow
    assert whole.size_bytes >= sum(sizes) // 2
    assert [os.fstat(fd).st_size for fd in space.fds][1] <= max(sizes[1], sum(sizes) // 3 + 4096)


def test_segments_cover_an_extent_in_order(open_space):
    extent = open_space(3, weights=[2, 1, 1]).allocate(100 * 4096)
    for start, size_bytes in [(0, None), (0, 4096), (30 * 4096, 40 * 4096), (99 * 4096, 4096)]:
        segments = extent.segments(1 << 20, start, size_bytes)
        address = 1 << 20
        for segment in segments:
            assert segment.address == address
            address += segment.size_bytes
        assert address - (1 << 20) == (extent.size_bytes if size_bytes is None else size_bytes)
    for start, size_bytes in [(0, 0), (0, 101 * 4096), (-4096, 4096)]:
        with pytest.raises(ValueError, match="do not lie in an extent"):
            extent.segments(0, start, size_bytes)


@pytest.mark.parametrize("call", ["allocate_all", "claim"])
def test_an_exception_between_a_record_and_its_owner_leaves_the_range_free(open_space, monkeypatch, call):
    """Of a signal handler, say. Its record must not give back what another was given since."""
    space = open_space()
    stripes = space.allocate(4096).stripes
    space.free(space.allocate(8192))  # what nobody has any more is free
    own = space._own

    def struck(stripes):
        own(stripes)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(space, "_own", struck)
        with pytest.raises(KeyboardInterrupt):
            space.allocate_all([4096, 8192]) if call == "allocate_all" else space.claim(stripes)
    extents = space.allocate_all([4096, 4096])
    assert not overlap(ranges_of([*extents, *space.allocate_all([4096] * 3)]))
    for extent in extents:
        space.free(extent)


def test_a_range_given_back_twice_is_our_bug():
    free = FreeList()
    offset = free.take(8192)
    free.take(4096)
    free.give_back(offset, 8192)
    with pytest.raises(AssertionError, match="twice"):
        free.give_back(offset, 4096)


def test_a_missing_path_leaves_nothing_on_the_others(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(SwapIOError, match="missing") as caught:
        SwapSpace([tmp_path / "there", tmp_path / "missing"], direct="required")
    assert caught.value.errno == errno.ENOENT
    assert list((tmp_path / "there").iterdir()) == []


PRELUDE = """
import logging, os, subprocess, sys
from pathlib import Path
from nvme_offload import OutOfSpaceError, SwapIOError, WeightFileError
from nvme_offload.aio_native.faults import FaultSpec
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.storage.swap_space import SwapSpace
path = Path(sys.argv[1])
"""


@needs_mounts
def test_one_full_path_of_two_takes_nothing_from_the_other(tmp_path):
    code = """
roomy = Path(sys.argv[2])
space = SwapSpace([roomy, path], direct="disabled")
first = space.allocate(16 << 20)
for allocate in (lambda: space.allocate(160 << 20), lambda: space.allocate_all([80 << 20, 80 << 20])):
    try:
        allocate()
    except OutOfSpaceError as error:
        assert error.path.is_relative_to(path), error
    assert [os.fstat(fd).st_size for fd in space.fds] == [8 << 20, 8 << 20], "space was kept"
again = space.allocate(16 << 20)
assert [stripe.offset for stripe in again.stripes] == [8 << 20, 8 << 20], again
"""
    (tmp_path / "full").mkdir()
    (tmp_path / "roomy").mkdir()
    full = tmp_path / "full"
    printed(run_python(PRELUDE + code, full, tmp_path / "roomy", mounts={full: "tmpfs,size=64m"}))


def test_whether_there_is_room_counts_what_is_free_inside(open_space, monkeypatch):
    """On a drive that is full, what was given back is enough for as much again, and for no more."""
    space = open_space()
    kept = [space.allocate(1 << 20) for _ in range(4)]
    del kept[1:3]
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=1))
    space.check_room([1 << 20, 1 << 20])
    with pytest.raises(OutOfSpaceError):
        space.check_room([1 << 20] * 3)
    kept += space.allocate_all([1 << 20, 1 << 20])
    assert not overlap(ranges_of(kept))


@pytest.fixture
def statx(monkeypatch):
    """Has statx answer this for direct I/O, on file systems of which nothing has been said yet."""
    monkeypatch.setattr(swap_file, "_said_buffered", set())

    def answer(direct_io_alignment):
        monkeypatch.setattr(swap_file, "_native", SimpleNamespace(direct_io_alignment=direct_io_alignment))

    return answer


def test_a_file_that_opens_and_has_no_direct_io_all_the_same(open_space, statx, tmp_path, caplog):
    """ext4 with data=journal takes O_DIRECT and goes through the page cache; only statx says so."""
    statx(lambda fd: (0, 0))
    with pytest.raises(SwapIOError, match=r"no direct I/O \(O_DIRECT\).* set aio.direct to \"optional\""):
        open_space()
    assert list((tmp_path / "0").iterdir()) == []
    for _ in range(2):
        space = open_space(direct="optional")
        assert not space.direct
        assert space.alignment == 4096
        assert not fcntl.fcntl(space.fds[0], fcntl.F_GETFL) & os.O_DIRECT
    assert caplog.text.count("has no direct I/O") == 1


def test_the_alignment_is_what_statx_reports_where_it_does(open_space, statx):
    refuse = Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted"))
    for answer, alignment in [(lambda fd: None, 4096), (lambda fd: (4, 16384), 16384), (refuse, 4096)]:
        statx(answer)
        space = open_space()
        assert space.direct
        assert space.alignment == alignment
    assert not open_space(direct="disabled").direct


def test_a_shortened_file_is_found_also_after_it_grew_again(open_space):
    space = open_space()
    _kept = space.allocate(8 << 20)
    space.check_whole()
    os.truncate(space.path_of(space.fds[0]), 4 << 20)
    with pytest.raises(SwapIOError, match="should hold 8388608 bytes and has 4194304"):
        space.check_whole()
    os.truncate(space.path_of(space.fds[0]), 8 << 20)  # as a write at the end would
    with pytest.raises(SwapIOError, match="truncated"):
        space.check_whole()


def punch(path):
    subprocess.run(["fallocate", "--punch-hole", "--length", "1MiB", path], check=True)


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 0), punch], ids=["truncated", "hole"])
def test_damage_is_not_hidden_by_an_allocation_that_grows_the_file(open_space, damage):
    space = open_space()
    _kept = space.allocate(4 << 20)
    damage(space.path_of(space.fds[0]))
    for _ in range(2):
        with pytest.raises(SwapIOError, match="ENODATA"):
            space.allocate(4 << 20)
        with pytest.raises(SwapIOError, match="ENODATA"):
            space.check_whole()


def fail_on_the_second_path(space, error):
    """An ``os.posix_fallocate`` that works on the first path; `error` is called, and raises, for the second."""
    fallocate = os.posix_fallocate
    return lambda fd, *where: fallocate(fd, *where) if fd == space.fds[0] else error()


def test_clean_up_hides_neither_damage_nor_the_first_error(open_space, monkeypatch):
    space = open_space(2)
    _kept = space.allocate(4 << 20)

    def damage_the_first():
        os.truncate(space.path_of(space.fds[0]), 0)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail_on_the_second_path(space, damage_the_first))
    with pytest.raises(OutOfSpaceError):
        space.allocate(8 << 20)
    with pytest.raises(SwapIOError, match="ENODATA"):
        space.check_whole()


def test_a_clean_up_that_fails_does_not_hide_the_first_error(open_space, monkeypatch):
    space = open_space(2)
    _kept = space.allocate(4 << 20)
    read_only = Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail_on_the_second_path(space, read_only))
        patch.setattr(os, "ftruncate", read_only)
        for allocate in (lambda: space.allocate(8 << 20), lambda: space.allocate_all([8 << 20])):
            with pytest.raises(SwapIOError, match=r"allocate of .*EROFS.* remount") as caught:
                allocate()
            assert caught.value.path == space.path_of(space.fds[1])
    space.check_whole()
    assert [stripe.offset for stripe in space.allocate(8 << 20).stripes] == [2 << 20, 2 << 20]


KIB = 1 << 10


@pytest.fixture
def open_again(open_space):
    """Opens the space of a durable run, whose files stay."""
    return partial(open_space, direct="optional", directory=partial(DurableDirectory, name="run", rank=0))


def moved(stripes, before, after):
    """Stripes of a space that was closed, in one that is open."""
    return [Stripe(after[before.index(stripe.fd)], stripe.offset, stripe.size_bytes) for stripe in stripes]


def test_what_is_claimed_twice_is_refused_and_keeps_nothing(open_again):
    space = open_again(2)
    mine = space.claim([Stripe(space.fds[0], 8 * KIB, 8 * KIB), Stripe(space.fds[1], 0, 4 * KIB)])
    for offset in (8 * KIB, 4 * KIB, 12 * KIB):
        with pytest.raises(ValueError, match="are taken already"):
            space.claim([Stripe(space.fds[1], 40 * KIB, 4 * KIB), Stripe(space.fds[0], offset, 8 * KIB)])
    assert space.claim([Stripe(space.fds[1], 40 * KIB, 4 * KIB)])
    space.free(mine)
    assert space.claim(mine.stripes)


def test_blocks_that_somebody_took_are_promised_again(open_again, tmp_path):
    space = open_again()
    (extent,), path = space.allocate_all([256 * KIB]), space.path_of(space.fds[0])
    space.close()
    os.truncate(path, 16 * KIB)
    space = open_again()
    claimed = space.claim(moved(extent.stripes, [extent.stripes[0].fd], space.fds))
    space.promise()
    assert path.stat().st_blocks * 512 >= 256 * KIB
    space.check_whole()
    assert claimed.size_bytes == 256 * KIB


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [1, 5, 2]])
def test_every_part_of_an_extent_is_striped_by_itself(open_again, weights):
    space = open_again(len(weights), weights)
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


def test_parts_on_one_path_are_one_stripe(open_again):
    assert len(open_again().allocate_all([(8 * KIB, 4 * KIB)])[0].stripes) == 1


def written(path, size_bytes, seed):
    path.write_bytes(random.Random(seed).randbytes(size_bytes))
    return path, FileIdentity.of(path.stat())


def bring(tier, extent, buffer):
    tier.read(extent, buffer, what="a base", kind="parameters").wait()
    return extent.arrive(buffer)


def drawn_tensors(draw, files):
    """Tensors of one range, of neighbours, of several ranges, of none, with padding; and what is in each."""
    tensors, contents, last = [], [], {}
    for _ in range(draw.randint(1, 9)):
        ranges, content = [], b""
        for _ in range(draw.choice([0, 1, 1, 1, 3])):
            path, identity = draw.choice(files)
            data = path.read_bytes()
            start = draw.choice([last.get(path, 0), draw.randrange(len(data)), len(data) - draw.randint(1, 99)])
            start = min(max(start, 0), len(data) - 1)
            size = min(len(data) - start, draw.choice([1, 8, 64, 640, 4096, draw.randint(1, 20000)]))
            ranges.append(FileRange(path, identity, start, size))
            content, last[path] = content + data[start : start + size], start + size
        tensors.append((ranges, len(content) + draw.choice([0, 0, 5000])))
        contents.append(content)
    return tensors, contents


@pytest.mark.parametrize("direct", ["required", "disabled"])
def test_drawn_ranges_come_whole_and_aligned(tmp_path, direct):
    """Sizes of files are below a page, whole pages, and any; ranges reach the end of a file and lie anywhere."""
    sizes = (999, 8192, 50_001, 100_000)
    files = [written(tmp_path / str(size), size, size) for size in sizes]
    with closing(nvme_tier(tmp_path, direct=direct)) as tier:
        for seed in range(150):
            tensors, contents = drawn_tensors(random.Random(seed), files)
            layout = RangeLayout.of(tensors)
            extent, pool = tier.extent_in_files(layout), BufferPool(1, layout.size_bytes)
            with pool.acquire() as buffer:
                buffer.view(torch.uint8, 0, buffer.size_bytes).fill_(seed)
                assert bring(tier, extent, buffer)
                for offset, content, (_, padded) in zip(extent.offsets, contents, tensors, strict=True):
                    assert (buffer.address + offset) % 64 == 0
                    assert offset + padded <= layout.size_bytes
                    found = bytes(buffer.view(torch.uint8, offset, len(content)).tolist())
                    assert found == content, seed
                assert not extent.arrive(buffer), "what was moved once is read again before it is moved once more"
    assert all((tmp_path / str(size)).read_bytes() == random.Random(size).randbytes(size) for size in sizes)


def change(path):
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"other")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (change, "its mtime_ns was"),
        (lambda path: os.truncate(path, 6000), "its size_bytes was 50001 and is 6000"),
        (lambda path: None, "cannot be read .EIO"),
    ],
    ids=["changed", "truncated", "unreadable"],
)
def test_a_file_that_is_not_what_it_was_is_named_in_one_error(tmp_path, harm, said):
    path, identity = written(tmp_path / "base", 50_001, 1)
    layout = RangeLayout.of([([FileRange(path, identity, 100, 40_000)], 40_000)])
    faults = FaultSpec(seed=1, eio=1.0) if "EIO" in said else None
    with closing(NvmeTier(OffloadConfig.from_dict(section(tmp_path)), faults=faults)) as tier:
        extent, pool = tier.extent_in_files(layout), BufferPool(1, layout.size_bytes)
        harm(path)
        with pool.acquire() as buffer, pytest.raises(WeightFileError, match=said) as error:
            bring(tier, extent, buffer)
    assert error.value.path == path
    assert '"copy"' in str(error.value)


def test_a_file_that_was_exchanged_before_it_is_opened_is_refused(tmp_path):
    path, identity = written(tmp_path / "base", 9000, 1)
    layout = RangeLayout.of([([FileRange(path, identity, 0, 8)], 8)])
    written(tmp_path / "other", 9000, 2)[0].replace(path)
    with closing(nvme_tier(tmp_path)) as tier:
        with pytest.raises(WeightFileError, match="its inode was"):
            tier.extent_in_files(layout)
        path.unlink()
        with pytest.raises(WeightFileError, match=r"it cannot be opened \(ENOENT"):
            tier.extent_in_files(layout)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_space_that_cannot_be_promised_is_written_and_what_is_there_stays(tmp_path, monkeypatch, caplog, code):
    """EINVAL: the C library writes single bytes then, which direct I/O refuses."""
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(code, os.strerror(code))))
    monkeypatch.setattr(swap_file, "_PIECE_BYTES", 8192)
    monkeypatch.setattr(swap_file, "_said_filled", set())
    (tmp_path / "swap").write_bytes(b"kept" * 1024)
    os.truncate(tmp_path / "swap", 5 * 4096)
    (tmp_path / "swap").chmod(0o600)
    file = SwapFile(tmp_path / "swap", "required", keep=True)
    for num_pages in (7, 10):
        file.reserve(num_pages * 4096)
        assert (tmp_path / "swap").read_bytes() == b"kept" * 1024 + bytes((num_pages - 1) * 4096)
        assert file.status().st_blocks * 512 >= num_pages * 4096
    file.close()
    [said] = caplog.messages
    assert said.startswith(f"{tmp_path} cannot promise space")
