"""Host memory behind the interface of a tier: the bytes are there at once, where they are or as copies."""

import pytest
import torch

from nvme_offload.aio_native import Op
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.staging.block_cache import BlockCache
from nvme_offload.offload.storage.host_tier import HostTier

SIZE = 3 * HostTier.alignment


@pytest.fixture
def tier():
    made = HostTier()
    yield made
    made.close()


def fill(memory, value):
    memory.view(torch.uint8, 0, SIZE).fill_(value)


def test_extents_are_memory_of_their_own(tier):
    first, second = tier.reserve([SIZE, SIZE])
    assert first != second
    assert not tier.memory(first).view(torch.uint8, 0, SIZE).any(), "zero until written"
    fill(tier.memory(first), 7)
    assert (tier.memory(first).view(torch.uint8, 0, SIZE) == 7).all()
    assert not tier.memory(second).view(torch.uint8, 0, SIZE).any()


def test_what_is_written_is_read(tier):
    (extent,) = tier.reserve([SIZE])
    pool = BufferPool(2, SIZE)
    source, target = (pool.try_acquire() for _ in range(2))
    fill(source, 5)
    tier.write(extent, source, what="numbers", kind="numbers").wait(1)
    assert tier.read(extent, target, what="numbers", kind="numbers").wait(1) is target
    assert (target.view(torch.uint8, 0, SIZE) == 5).all()
    assert tier.bytes_of_kind(Op.READ, "numbers") == tier.bytes_of_kind(Op.WRITE, "numbers") == SIZE
    assert (tier.stats().bytes_read, tier.stats().bytes_written) == (SIZE, SIZE)
    for buffer in (source, target):
        buffer.release()
    pool.close()


def test_part_of_an_extent(tier):
    (extent,) = tier.reserve([SIZE])
    pool = BufferPool(1, SIZE)
    buffer = pool.try_acquire()
    fill(buffer, 9)
    tier.write(extent, buffer, what="numbers", kind="numbers", size_bytes=HostTier.alignment).wait(1)
    assert int(tier.memory(extent).view(torch.uint8, 0, SIZE).sum()) == 9 * HostTier.alignment
    buffer.release()
    pool.close()


def test_what_is_free_is_gone(tier):
    (extent,) = tier.reserve([SIZE])
    tier.free(extent)
    with pytest.raises(KeyError):
        tier.memory(extent)
    (other,) = tier.reserve([SIZE])
    assert other != extent, "a stale extent never names the memory of another"


def test_too_much_is_refused_and_nothing_is_kept(tier):
    with pytest.raises(MemoryError, match="cannot map"):
        tier.reserve([SIZE, 1 << 60])
    assert tier.stats().bytes_written == 0
    (extent,) = tier.reserve([SIZE])
    assert str(tier.path_of(extent)) == "host memory"
    assert tier.describe(extent) == "12 KiB of host memory"


def test_a_cache_runs_over_it(tier):
    cache = BlockCache(tier, "numbers", 2)
    blocks = cache.add([(f"block {number}", SIZE) for number in range(5)])
    for block in blocks:
        with cache.holding(block, change=True, load=False) as buffer:
            fill(buffer, block.index)
    for block in reversed(blocks):
        with cache.holding(block) as buffer:
            assert (buffer.view(torch.uint8, 0, SIZE) == block.index).all()
    cache.close()


def test_an_extent_that_was_lost_to_an_exception_takes_no_memory():
    tier = HostTier()
    kept, _ = tier.reserve([4096]), tier.reserve([1 << 20])
    del _
    assert [region.size_bytes for region in tier._regions.values()] == [4096]
    tier.memory(kept[0])
    tier.close()
