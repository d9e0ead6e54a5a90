"""Memory of a device behind the interface of a tier, on the stand-in and on the CPU as the device."""

import pytest
import torch

from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.staging.block_cache import BlockCache
from nvme_offload.offload.storage.device_tier import DeviceTier

SIZE = 3 * DeviceTier.alignment


@pytest.fixture(params=["cpu", "late"])
def tier(request, late):
    made = DeviceTier(torch.device(request.param))
    yield made
    made.close()


def test_extents_are_memory_of_the_device(tier):
    first, second = tier.reserve([SIZE, SIZE - 1])
    assert first.size_bytes == second.size_bytes == SIZE
    tier.memory(first).view(torch.float32, 0, 8).fill_(7.0)
    tier.memory(second).view(torch.uint8, 0, SIZE).zero_()
    view = tier.memory(first).view(torch.float32, 16, 4)
    assert view.device.type == tier.device.type
    assert view.cpu().tolist() == [7.0] * 4
    assert tier.memory(first).view(torch.uint16, 2, 0).numel() == 0
    assert tier.describe(first) == "12 KiB of device memory"


def test_what_is_written_is_read(tier):
    (extent,) = tier.reserve([SIZE])
    pool = BufferPool(2, SIZE)
    source, target = (pool.try_acquire() for _ in range(2))
    source.view(torch.uint8, 0, SIZE).fill_(5)
    tier.write(extent, source, what="numbers", kind="numbers").wait(1)
    source.view(torch.uint8, 0, SIZE).fill_(6)
    tier.read(extent, target, what="numbers", kind="numbers").wait(1)
    assert (target.view(torch.uint8, 0, SIZE) == 5).all()


def test_a_cache_runs_over_it(tier):
    cache = BlockCache(tier, "numbers", 2)
    blocks = cache.add([(f"block {number}", SIZE) for number in range(4)])
    for block in blocks:
        with cache.holding(block, change=True, load=False) as buffer:
            buffer.view(torch.uint8, 0, SIZE).fill_(block.index)
    for block in reversed(blocks):
        with cache.holding(block) as buffer:
            assert (buffer.view(torch.uint8, 0, SIZE) == block.index).all()
    cache.close()


def test_a_device_that_is_full_says_which_budget(tier, monkeypatch):
    def full(*unused, **named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MemoryError, match="12 KiB left for optimizer state: lower device_budget"):
        tier.reserve([SIZE])
