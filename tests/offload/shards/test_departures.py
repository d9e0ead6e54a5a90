"""Blocks on their way to a device: one copy for each gather, and memory that is held for as long as it takes."""

import pytest
import torch

from nvme_offload import ClosedError, OffloadConfig
from nvme_offload.offload.shards.param_tier import Padded, ParamTier, ResidentShard
from nvme_offload.offload.storage.nvme_tier import NvmeTier

SHAPES = [torch.Size([3, 5]), torch.Size([7])]
FORMS = [Padded(shape, torch.bfloat16) for shape in SHAPES]


def numbers(block, place):
    return torch.full(SHAPES[place], 10.0 * block + place, dtype=torch.bfloat16)


@pytest.fixture(params=["host memory", "nvme"])
def places(request, tmp_path, late):
    """Places of the two parameters of each of five blocks, of which two fit into the staging buffers."""
    section = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2}
    config = OffloadConfig.from_dict({"zero_optimization": {"offload_param": section}})
    section = config.zero_optimization.offload_param
    tier = ParamTier(section, NvmeTier(config, paths=section.nvme_path))
    reserve = tier.reserve if request.param == "nvme" else tier.reserve_in_memory
    found = reserve([(f"layer {number}", FORMS) for number in range(5)], torch.device("late", 0))
    for number, shards in enumerate(found):
        tier.put(shards, [ResidentShard(numbers(number, place)) for place in range(2)])
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
