"""Memory of the host, and of a device, behind the interface of a tier: the bytes are there at once."""

from unittest.mock import Mock

import pytest
import torch

from nvme_offload.aio_native.engine import Op
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.staging.block_cache import BlockCache
from nvme_offload.offload.storage.memory_tier import DeviceTier, HostTier

SIZE = 3 * HostTier.alignment


@pytest.fixture(params=["host", "device cpu", "device late"])
def tier(request, late):
    kind, _, device = request.param.partition(" ")
    made = HostTier() if kind == "host" else DeviceTier(torch.device(device))
    yield made
    made.close()


@pytest.fixture
def on_host():
    made = HostTier()
    yield made
    made.close()


def fill(memory, value):
    memory.view(torch.uint8, 0, SIZE).fill_(value)


def holds(memory, value):
    return bool((memory.view(torch.uint8, 0, SIZE) == value).all())


def test_extents_are_memory_of_their_own(tier):
    first, second = tier.reserve([SIZE, SIZE - 1])
    assert first != second
    assert first.size_bytes == SIZE
    fill(tier.memory(first), 7)
    fill(tier.memory(second), 0)
    assert holds(tier.memory(first), 7)
    view = tier.memory(second).view(torch.float32, 16, 4)
    assert view.device.type == getattr(tier, "device", torch.device("cpu")).type
    assert view.cpu().tolist() == [0.0] * 4
    assert tier.memory(first).view(torch.uint16, 2, 0).numel() == 0
    what = "host" if isinstance(tier, HostTier) else "device"
    assert tier.describe(first) == f"12 KiB of {what} memory"


def test_what_is_written_is_read(tier):
    (extent,) = tier.reserve([SIZE])
    pool = BufferPool(2, SIZE)
    source, target = (pool.try_acquire() for _ in range(2))
    fill(source, 5)
    tier.write(extent, source, what="numbers", kind="numbers").wait(1)
    fill(source, 6)
    assert tier.read(extent, target, what="numbers", kind="numbers").wait(1) is target
    assert holds(target, 5)
    assert tier.bytes_of_kind(Op.READ, "numbers") == tier.bytes_of_kind(Op.WRITE, "numbers") == SIZE
    assert (tier.stats().bytes_read, tier.stats().bytes_written) == (SIZE, SIZE)
    fill(source, 9)
    tier.write(extent, source, what="numbers", kind="numbers", size_bytes=HostTier.alignment).wait(1)
    assert int(tier.memory(extent).view(torch.uint8, 0, SIZE).sum()) == (9 + 5 + 5) * HostTier.alignment
    for buffer in (source, target):
        buffer.release()
    pool.close()


def test_a_cache_runs_over_it(tier):
    cache = BlockCache(tier, "numbers", 2)
    blocks = cache.add([(f"block {number}", SIZE) for number in range(5)])
    for block in blocks:
        with cache.holding(block, change=True, load=False) as buffer:
            fill(buffer, block.index)
    for block in reversed(blocks):
        with cache.holding(block) as buffer:
            assert holds(buffer, block.index)
    cache.close()


def test_what_is_free_is_gone(on_host):
    (extent,) = on_host.reserve([SIZE])
    assert holds(on_host.memory(extent), 0), "zero until written"
    on_host.free(extent)
    with pytest.raises(KeyError):
        on_host.memory(extent)
    (other,) = on_host.reserve([SIZE])
    assert other != extent, "a stale extent never names the memory of another"


def test_too_much_is_refused_and_nothing_is_kept(on_host):
    with pytest.raises(MemoryError, match="cannot map"):
        on_host.reserve([SIZE, 1 << 60])
    (extent,) = on_host.reserve([SIZE])
    assert str(on_host.path_of(extent)) == "host memory"


def test_an_extent_that_was_lost_to_an_exception_takes_no_memory(on_host):
    kept, _ = on_host.reserve([4096]), on_host.reserve([1 << 20])
    del _
    assert [region.size_bytes for region in on_host._regions.values()] == [4096]
    on_host.memory(kept[0])


def test_a_device_that_is_full_says_which_budget(late, monkeypatch):
    monkeypatch.setattr(torch, "empty", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(MemoryError, match="12 KiB left for optimizer state: lower device_budget"):
        DeviceTier(torch.device("late")).reserve([SIZE])
