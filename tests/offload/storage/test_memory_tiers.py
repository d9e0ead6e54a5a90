"""Tiers in memory, and the plan of what goes onto which tier."""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvme_offload.aio_native.engine import Op
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.staging.block_cache import BlockCache
from nvme_offload.offload.storage.memory_tier import DeviceTier, HostTier
from nvme_offload.offload.storage.tier_plan import TIERS, Unit, plan_tiers

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


MB = 10**6


def state(index, size_bytes=10 * MB, tiers=("host", "nvme")):
    return Unit(f"subgroup {index}", "optimizer state", size_bytes, size_bytes, size_bytes, tiers)


def are_on_host(plan):
    return [tier == "host" for tier in plan.tiers]


def test_without_a_budget_everything_goes_as_high_as_it_may():
    plan = plan_tiers([state(0), state(1, tiers=("nvme",)), state(2, tiers=("device", "host"))], {})
    assert plan.tiers == ("host", "nvme", "device")
    assert plan.bytes_read == plan.bytes_written == 10 * MB


def test_what_has_one_place_comes_first():
    staging = Unit("staging buffers", "staging buffers", 25 * MB, tiers=("host",))
    plan = plan_tiers([*(state(i) for i in range(4)), staging], {"host": 46 * MB})
    assert are_on_host(plan) == [True, False, True, False, True]
    assert plan.bytes_on("host") == 45 * MB
    assert plan.bytes_on("host", "optimizer state") == 20 * MB
    assert (plan.excess("host"), plan.excess("nvme")) == (0, 0)


def test_a_budget_that_is_too_small_shows_by_how_much():
    plan = plan_tiers([Unit("staging buffers", "staging buffers", 7, tiers=("host",)), state(0)], {"host": 5})
    assert plan.excess("host") == 2
    assert plan.tiers == ("host", "nvme")


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 70), st.integers(0, 9 * MB))
def test_equal_units_are_spread_evenly(count, fitting, rest):
    hosted = are_on_host(plan_tiers([state(i) for i in range(count)], {"host": fitting * 10 * MB + rest}))
    assert sum(hosted) == min(count, fitting), "as many as fit"
    share = sum(hosted) / count
    for i in range(count):  # at any point, what was met differs from the even share by less than two units
        assert abs(sum(hosted[: i + 1]) - share * (i + 1)) < 2


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=30), st.integers(0, 500))
def test_budgets_are_kept_and_nothing_that_fits_is_left_out(sizes, budget):
    plan = plan_tiers([state(i, size) for i, size in enumerate(sizes)], {"host": budget})
    left = budget - plan.bytes_on("host")
    assert left >= 0
    assert all(unit.size_bytes > left for unit in plan.units_on("nvme"))
    assert plan.bytes_on("host") + plan.bytes_on("nvme") == sum(sizes)


def test_what_moves_most_per_byte_goes_highest():
    """Parameters are read twice in a step, gradients are written and read, optimizer state too."""
    blocks = [Unit(f"block {i}", "parameter", 4 * MB, 8 * MB, 4 * MB, TIERS) for i in range(4)]
    states = [state(i) for i in range(4)]
    plan = plan_tiers([*states, *blocks], {"device": 9 * MB, "host": 19 * MB})
    assert len(plan.units_on("device")) == 2
    assert len(plan.units_on("host", "parameter")) == 2
    assert len(plan.units_on("host", "optimizer state")) == 1, "what is left of 19 MB"
    assert plan.bytes_read == plan.bytes_written == 30 * MB


def test_units_of_about_the_same_saving_are_spread_together():
    """Rounding up to whole pages makes the last, smaller unit a little dearer: no reason to keep it first."""
    units = [*(state(i) for i in range(5)), Unit("last", "optimizer state", 10_000, 10_100, 10_100)]
    assert are_on_host(plan_tiers(units, {"host": 20_010_000})) == [False, True, False, True, False, True]


def test_it_prints_a_table():
    units = [Unit("staging buffers", "staging buffers", 2**30, tiers=("host",)), state(0, 2**30), state(1, 2**30)]
    lines = str(plan_tiers(units, {"host": 2**31})).splitlines()
    assert lines[0].split() == ["tier", "what", "units", "bytes", "read/step", "written/step"]
    assert lines[1].split() == ["host", "staging", "buffers", "1", "1", "GiB", "-", "-"]
    assert lines[3].split() == ["host", "together", "2", "GiB", "of", "2", "GiB"]
    assert lines[4].split() == ["nvme", "optimizer", "state", "1", "1", "GiB", "1", "GiB", "1", "GiB"]
