"""Aligned, pinned, registered: three properties, and the first is what every region has."""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from nvme_offload.offload.host.region import HostRegion


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


def test_empty_view():
    assert HostRegion(1).view(torch.bfloat16, 0, 0).shape == (0,)


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


def test_unpin_without_pin_does_nothing():
    region = HostRegion(4096)
    region.unpin()
    assert not region.pinned


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
    """Of no other: the runtime would open one there, where this process keeps memory from then on."""
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


FREED = """
import torch
from nvme_offload.offload.host.region import give_back_freed_memory
from nvme_offload.offload.host.proc import PROC, read

def resident():
    return int(read(PROC / "self/statm").split()[1]) * 4096

assert {} or give_back_freed_memory()
torch.ones(30 << 20, dtype=torch.uint8)  # from here on glibc keeps what is smaller
before = resident()
tensors = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(9)]
del tensors[:-1]  # the last one keeps the heap from shrinking
print(resident() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_freed_tensors_are_given_back():
    """Eight of nine tensors of 8 MiB are freed. Without being told, glibc keeps them."""
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", FREED.format(skip)], capture_output=True, check=True).stdout)
        for skip in (True, False)
    )
    assert kept > 60 << 20
    assert given_back < 20 << 20
