"""Host memory: aligned, pinned, registered; and the pool of it, which never grows and knows who holds what."""

import gc
import itertools
import mmap
import os
import random
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nvme_offload import ClosedError
from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.host.in_memory import memory_of
from nvme_offload.offload.host.region import HUGE_PAGE_BYTES, HostRegion
from tests.support.threads import at_once


@pytest.mark.parametrize("size_bytes", [1, 4096, 4097, 1 << 20])
def test_region_is_aligned_zero_and_whole_pages(size_bytes):
    region = HostRegion(size_bytes)
    assert region.address % mmap.PAGESIZE == 0
    assert region.size_bytes == -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    assert not region.view(torch.uint8, 0, region.size_bytes).any()


def test_views_share_memory():
    region = HostRegion(4096)
    region.view(torch.int32, 8, 2).copy_(torch.tensor([1, -1]))
    view = region.view(torch.uint8, 0, 4096)
    assert view[8:16].tolist() == [1, 0, 0, 0, 255, 255, 255, 255]
    assert view.data_ptr() == region.address
    assert view[16:].sum() == 0


def test_a_view_keeps_the_memory_and_nothing_else_does():
    region = HostRegion(1 << 20)
    view = region.view(torch.uint8, 0, 1 << 20)
    watched = weakref.ref(region._map)
    del region
    gc.collect()
    view.fill_(7)
    assert watched() is not None
    del view
    gc.collect()
    assert watched() is None


def test_more_than_the_address_space_is_a_memory_error():
    with pytest.raises(MemoryError, match="cannot map"):
        HostRegion(1 << 60)


def test_a_forked_child_does_not_inherit_the_pages():
    region = HostRegion(4096)
    assert is_mapped(region.address)
    pid = os.fork()
    if pid == 0:
        os._exit(int(is_mapped(region.address)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def is_mapped(address):
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


@pytest.fixture
def registered(late, monkeypatch):
    """The addresses that are page-locked; what is not mapped cannot be unlocked."""
    runtime = torch.late.cudart()

    def unregister(address):
        assert is_mapped(address)
        runtime.cudaHostUnregister(address)

    checked = SimpleNamespace(cudaHostRegister=runtime.cudaHostRegister, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.late, "cudart", lambda: checked, raising=False)
    return late.pinned


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_forked_child_that_drops_a_region_keeps_what_it_has_at_its_addresses(in_a_cycle):
    region = HostRegion(1 << 20)
    held = SimpleNamespace(region=region, view=region.view(torch.uint8, 0, 8))
    held.itself = held if in_a_cycle else None
    addresses = range(region.address, region.address + region.size_bytes)
    del region
    if (pid := os.fork()) == 0:
        mine = [HostRegion(1 << 20).view(torch.uint8, 0, 1 << 20).fill_(7) for _ in range(32)]
        is_there = any(tensor.data_ptr() in addresses for tensor in mine)
        del held
        gc.collect()
        os._exit(0 if is_there and all(bool((tensor == 7).all()) for tensor in mine) else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_pinned_region_that_is_dropped_is_unpinned_before_its_pages_go(registered, in_a_cycle):
    region = HostRegion(4096)
    region.pin(torch.device("late"))
    address = region.address
    assert set(registered) == {address}
    if in_a_cycle:
        region.itself = region
    pid = os.fork()
    if pid == 0:  # the child has neither the pages nor the device
        del region
        gc.collect()
        os._exit(int(set(registered) != {address}))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    del region
    gc.collect()
    assert not registered
    assert not is_mapped(address)


def test_what_is_unpinned_is_not_unpinned_again_when_it_is_dropped(registered):
    region = HostRegion(4096)
    for _ in range(2):
        region.pin(torch.device("late"))
        region.unpin()
        assert not registered
    address = region.address
    registered[address] = 4096  # as if something else were there by now
    del region
    gc.collect()
    assert registered.pop(address)


def test_memory_is_pinned_in_the_context_of_its_device(late):
    """Nothing is asked of another device: the runtime would open a context there, which keeps memory from then on."""
    region = HostRegion(4096)
    region.pin(torch.device("late", 1))
    assert late.pinned_on == [1]
    assert torch.late.current_device() == 0
    region.unpin()


def test_a_refusal_to_pin_leaves_no_error_to_the_next_kernel(late):
    region, late.refusals = HostRegion(4096), 1
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        region.pin(torch.device("late"))
    assert not region.pinned
    assert float(torch.ones(2, device="late").sum()) == 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pin_and_unpin():
    region = HostRegion(1 << 20)
    region.pin(torch.device("cuda"))
    region.pin(torch.device("cuda"))
    assert region.pinned
    assert region.view(torch.uint8, 0, 16).is_pinned()
    region.unpin()
    region.unpin()
    assert not region.pinned


PATIENCE = 30.0


def test_buffers_are_aligned_distinct_and_whole_pages():
    pool = BufferPool(5, 5000)
    buffers = [pool.acquire() for _ in range(5)]
    assert pool.buffer_bytes == 8192
    assert pool.size_bytes == 5 * 8192
    addresses = sorted(buffer.address for buffer in buffers)
    assert all(address % 4096 == 0 for address in addresses)
    assert all(high - low >= 8192 for low, high in itertools.pairwise(addresses))
    assert all(buffer.size_bytes == 8192 for buffer in buffers)


def test_acquire_times_out_and_says_how_many_are_held():
    pool = BufferPool(2, 4096)
    held = [pool.acquire(), pool.acquire()]
    with pytest.raises(TimeoutError, match="all 2 staging buffers"):
        pool.acquire(timeout=0.01)
    for buffer in held:
        buffer.release()
    assert pool.num_free == 2


def test_a_buffer_released_twice_is_our_bug():
    pool = BufferPool(2, 4096)
    buffer = pool.acquire()
    buffer.release()
    with pytest.raises(AssertionError, match="twice"):
        buffer.release()
    assert pool.num_free == 2


def test_close_wakes_waiters_and_refuses_new_ones():
    pool = BufferPool(1, 4096)
    held = pool.acquire()
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(pool.acquire) for _ in range(3)]
        pool.close()
        pool.close()
        assert [type(wait.exception(PATIENCE)) for wait in waits] == [ClosedError] * 3
    held.release()
    for acquire in (pool.acquire, pool.try_acquire):
        with pytest.raises(ClosedError, match="buffer pool"):
            acquire()


@pytest.mark.parametrize(("num_buffers", "buffer_bytes"), [(3, 600 << 20), (2, 3 << 30), (5, 300 << 20)])
def test_regions_can_be_registered_and_no_buffer_crosses_one(num_buffers, buffer_bytes):
    pool = BufferPool(num_buffers, buffer_bytes)  # pages that nobody touches cost nothing
    assert all(0 < size <= 1 << 30 for _, size in pool.regions)
    assert sum(size for _, size in pool.regions) == pool.size_bytes
    if buffer_bytes <= 1 << 30:
        for _ in range(num_buffers):
            buffer = pool.acquire()
            assert any(
                start <= buffer.address and buffer.address + buffer.size_bytes <= start + size
                for start, size in pool.regions
            )


def test_huge_pages_are_registered_apart_from_small_ones():
    # Of a registered region with pages of both sizes the kernel makes a list of small ones: a drive gets requests cut.
    pool = BufferPool(3, (3 << 20) + 4096)
    (start, size), (rest, rest_size) = pool.regions
    assert start % HUGE_PAGE_BYTES == 0
    assert size == 8 << 20
    assert (rest, rest_size) == (start + size, pool.size_bytes - size)
    assert BufferPool(2, 1 << 20).regions[0][1] == 2 << 20
    assert BufferPool(1, 8192).regions[0][1] == 8192


def test_no_buffer_is_ever_held_twice():
    pool = BufferPool(3, 4096)

    def work(seed):
        rng = random.Random(seed)
        for _ in range(200):
            with pool.acquire(PATIENCE) as buffer:
                view = buffer.view(torch.int64, 0, 1)
                mark = rng.randrange(1 << 60)
                view.fill_(mark)
                time.sleep(rng.random() * 1e-4)
                assert view.item() == mark

    at_once([partial(work, seed) for seed in range(8)])
    assert pool.num_free == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_buffers():
    pool = BufferPool(2, 1 << 20)
    pool.pin(torch.device("cuda"))
    assert pool.pinned
    assert pool.acquire().view(torch.uint8, 0, 16).is_pinned()
    pool.close()
    assert not pool.pinned


def test_all_buffers_are_pinned_or_none(late, monkeypatch):
    runtime, asked = torch.late.cudart(), []

    def register(address, size_bytes, flags):
        asked.append(address)
        late.refusals = int(len(asked) == 2)
        return runtime.cudaHostRegister(address, size_bytes, flags)

    refusing = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=runtime.cudaHostUnregister)
    monkeypatch.setattr(torch.late, "cudart", lambda: refusing, raising=False)
    pool = BufferPool(2, 1 << 30)  # a region each; pages that nobody touches cost nothing
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        pool.pin(torch.device("late"))
    assert len(asked) == 2
    assert not late.pinned


@pytest.mark.parametrize("synced", [False, True])
def test_what_others_have_just_written_through_the_cache_is_not_taken_for_memory(synced, tmp_path):
    with (tmp_path / "restored").open("wb", buffering=0) as file:
        file.write(os.urandom(8 << 20))
        if synced:
            os.fsync(file.fileno())
    said = []
    for name in ("restored", "new"):
        with Descriptor(os.open, tmp_path / name, os.O_RDWR | os.O_CREAT | os.O_DIRECT) as fd:
            said.append(memory_of(fd, 4096))
    assert said[0] == said[1]
