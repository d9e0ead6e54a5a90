"""Parameters in blocks: what FSDP2 may copy is valid while it may copy it, in whatever order, also on a device."""

import os
from collections import deque
from dataclasses import replace

import pytest
import torch

from nvme_offload import ClosedError, ConfigError, OffloadConfig, StateError, SwapIOError
from nvme_offload.offload.shards.param_tier import ParamTier
from nvme_offload.offload.shards.stored import Padded, ResidentShard, UnbornShard
from nvme_offload.offload.storage.nvme_tier import NvmeTier

SHAPES = [torch.Size([3, 5]), torch.Size([7])]
FORMS = [Padded(shape, torch.bfloat16) for shape in SHAPES]


def numbers(block, place):
    return torch.full(SHAPES[place], 10.0 * block + place, dtype=torch.bfloat16)


@pytest.fixture
def make_tier(tmp_path):
    """``make_tier(num_blocks, **offload_param)``: the tier and the places of its parameters, by block."""
    tiers = []

    def make(num_blocks=5, device="cpu", in_memory=False, together=None, **section):
        section = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2, **section}
        config = OffloadConfig.from_dict({"zero_optimization": {"offload_param": section}})
        section = config.zero_optimization.offload_param
        tier = ParamTier(section, NvmeTier(config, paths=section.nvme_path))
        tiers.append(tier)
        groups = [(f"layer {number}", FORMS) for number in range(num_blocks)]
        places = tier.reserve(groups, torch.device(device), in_memory=in_memory, together=together)
        for number, shards in enumerate(places):
            tier.put(shards, [ResidentShard(numbers(number, place)) for place in range(2)])
        return tier, places

    yield make
    for tier in tiers:
        tier.close()
    assert not list(tmp_path.iterdir())


def all_then_all(shards):
    """How several ranks gather: asked for together, answered together."""
    seen = [shard.gather().clone() for shard in shards]
    for shard in shards:
        shard.end_gather()
    return seen


def one_by_one(shards):
    seen = []
    for shard in shards:
        seen.append(shard.gather().clone())
        shard.end_gather()
    return seen


def never_answered(shards):
    return [shard.gather().clone() for shard in shards]


def asked_again_before_the_answer(shards):
    never_answered(shards)
    return all_then_all(shards)


@pytest.mark.parametrize("gather", [all_then_all, one_by_one, never_answered, asked_again_before_the_answer])
def test_every_order_of_asking_gives_the_values(make_tier, gather):
    tier, places = make_tier()
    for number in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 2, 2):
        seen = gather(places[number])
        assert all(torch.equal(value, numbers(number, place)) for place, value in enumerate(seen))
    for shards in places:
        all_then_all(shards)
    assert sum(block.holds for block in tier.cache.blocks) <= 1, "only a gather that was never answered still holds"


def test_a_use_is_counted_once_however_many_parameters_it_has(make_tier):
    for gather in (all_then_all, one_by_one):
        tier, places = make_tier()
        before = tier.cache.stats.uses
        for number in (0, 1, 1, 2):
            gather(places[number])
        assert tier.cache.stats.uses - before == 4


def test_a_gather_ahead_that_is_answered_late_keeps_its_block(make_tier):
    """FSDP2 asks for the next group before the one at work is done with."""
    _, places = make_tier(buffer_count=3)
    first = [shard.gather() for shard in places[0]]
    second = [shard.gather() for shard in places[1]]
    for shard in places[0]:
        shard.end_gather()
    for number in (2, 3, 4):
        all_then_all(places[number])
    assert [value.unique().tolist() for value in second] == [[10], [11]]
    assert len(first) == 2


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("num_late", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(1, 2, 2, 1, 2), (2, 2, 2), (3, 1, 3, 2)])
def test_what_is_gathered_together_is_valid_until_all_of_it_was_asked_for(make_tier, sizes, num_late, keeps):
    """Its last block finds a buffer, also where answers of others are late, and where it is updated before it is asked.

    As many buffers as the largest group has blocks are enough.
    """
    together = [number for number, size in enumerate(sizes) for _ in range(size)]
    tier, places = make_tier(len(together), together=together, buffer_count=max(sizes))
    tier.keep_latest(keeps)
    values = {shard: numbers(block, place) for block, pair in enumerate(places) for place, shard in enumerate(pair)}
    waiting = deque()
    for turn, number in enumerate([*range(len(sizes)), *reversed(range(len(sizes)))] * 3):
        blocks = [pair for pair, of in zip(places, together, strict=True) if of == number]
        asked = {}
        for pair in blocks[:: (-1) ** turn]:
            with pair[1].held(change=True) as value:
                values[pair[1]] = value.add_(1).clone()
            asked |= {shard: shard.gather() for shard in pair}
        tier.cache.synchronize()  # whatever is on its way to a buffer is there
        assert all(torch.equal(found, values[shard]) for shard, found in asked.items())
        waiting.append(asked)
        for shard in waiting.popleft() if len(waiting) > num_late else ():
            shard.end_gather()


def test_a_gather_of_more_blocks_than_buffers_is_refused_where_it_is_placed(make_tier):
    tier, places = make_tier(2, together="ab")
    few = r"zero_optimization.offload_param.buffer_count = 2: .* the 3 blocks of 'two' .* write 3 or more"
    with pytest.raises(ConfigError, match=few):
        tier.reserve([("one", FORMS), ("two", FORMS), ("three", FORMS)], together="cbb")
    assert len(tier.cache.blocks) == 2
    tier.drop([shards[0].block for shards in tier.reserve([("one", FORMS), ("two", FORMS)], together="cb")])
    assert torch.equal(all_then_all(places[1])[0], numbers(1, 0))


def test_what_was_kept_while_the_drive_took_no_writes_is_let_go_later(make_tier):
    tier, places = make_tier(4, together="aabc", buffer_count=3)
    tier.cache.synchronize()
    tier.keep_latest(True)
    dirty, good = places[2][0].block, places[2][0].block.extent
    read_only = os.open(tier.cache.tier.space.path_of(good.stripes[0].fd), os.O_RDONLY)
    dirty.lie_in(replace(good, stripes=(good.stripes[0]._replace(fd=read_only),)))
    with places[2][0].held(change=True) as values:
        values.add_(1)
    with pytest.raises(SwapIOError):
        tier.cache.synchronize()
    dirty.lie_in(good)
    os.close(read_only)
    with places[3][0].held(change=False):
        asked = [*places[0], places[1][0]]
        seen = never_answered(asked)  # no buffer for the last one, until the drive takes what was changed
    assert [value.unique().item() for value in seen] == [0, 1, 10]
    tier.keep_latest(False)
    all_then_all(asked)
    assert not any(block.holds for block in tier.cache.blocks)
    assert torch.equal(all_then_all(places[2])[0], numbers(2, 0) + 1)


def test_a_gather_that_needs_the_buffer_of_a_stale_one_holds_its_own(make_tier):
    _, places = make_tier()
    for number in range(4):
        seen = places[number][0].gather()
        assert places[number][0].block.holds == 1
        assert torch.equal(seen, numbers(number, 0))


def test_changes_are_kept_and_padding_is_zero(make_tier):
    tier, places = make_tier()
    tier.cache.synchronize()
    before = tier.cache.tier.stats().bytes_written
    for shards in places:
        with shards[1].held(change=True) as flat:
            flat.mul_(2)
        with shards[0].held(change=True) as flat:
            flat[:3] = 1
    tier.cache.synchronize()
    written = tier.cache.tier.stats().bytes_written - before
    assert written == len(places) * 4096, "changes in a row are written once"
    for number, shards in enumerate(places):
        assert torch.equal(all_then_all(shards)[1], numbers(number, 1) * 2)


def test_what_has_no_value_yet_is_zero_and_is_not_written(make_tier):
    tier, _ = make_tier(1)
    tier.cache.synchronize()
    before = tier.cache.tier.stats().bytes_written
    new, half_new = tier.reserve([("new", FORMS), ("half new", FORMS)])
    unborn = UnbornShard(FORMS[0])
    with pytest.raises(StateError, match="gives it a place"):
        unborn.gather()
    with pytest.raises(StateError, match="give it one first"):
        unborn.declared(SHAPES[0]).sum()
    tier.put(new, [unborn, UnbornShard(FORMS[1])])
    assert tier.cache.tier.stats().bytes_written == before
    tier.put(half_new, [unborn, ResidentShard(numbers(3, 1))])
    with new[1].held(change=True) as flat:
        flat[:2] = 7
    assert all_then_all(new)[1].tolist() == [7, 7, 0, 0, 0, 0, 0]
    assert not all_then_all(new)[0].any()
    assert torch.equal(all_then_all(half_new)[1], numbers(3, 1))
    assert not all_then_all(half_new)[0].any()


@pytest.fixture(params=[True, False], ids=["host memory", "nvme"])
def places(request, make_tier, late):
    """Places on a device of the two parameters of each of five blocks, of which two fit into the staging buffers."""
    tier, found = make_tier(device="late:0", in_memory=request.param)
    yield found
    tier.close()
    with pytest.raises(ClosedError):
        found[0][0].gather()


def test_values_arrive_long_after_their_blocks_have_been_asked_for(places, late):
    gathered = [[shard.gather() for shard in places[number]] for number in (0, 1, 2, 3, 4, 3, 0)]
    for number, found in zip((0, 1, 2, 3, 4, 3, 0), gathered, strict=True):
        assert all(torch.equal(value.cpu(), numbers(number, place)) for place, value in enumerate(found))
    assert late.num_copies - sum(map(len, gathered)) == len(gathered), "one to the device for each gather of a block"


def test_what_changes_afterwards_does_not_reach_who_asked_before(places):
    before = [shard.gather() for shard in places[0]]
    for place, shard in enumerate(places[0]):
        with shard.held(change=True) as values:
            values.fill_(90.0 + place)
    after = [shard.gather() for shard in places[0]]
    assert all(torch.equal(value.cpu(), numbers(0, place)) for place, value in enumerate(before))
    assert all((value.cpu() == 90.0 + place).all() for place, value in enumerate(after))


def test_a_gather_that_was_given_up_halfway_leaves_no_old_values(places):
    places[0][0].gather()
    with places[0][1].held(change=True) as values:
        values.fill_(91.0)
    assert (places[0][1].gather().cpu() == 91.0).all()


def test_of_gathers_that_are_given_up_halfway_little_stays_on_the_device(places, late):
    before = late.live_bytes
    for shards in places:
        shards[0].gather()
    block_bytes = 4096 if places[0][0].block.size_bytes > 128 else 128
    assert late.live_bytes - before <= 2 * block_bytes
