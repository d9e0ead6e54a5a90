"""The machine under the optimizer's pipeline and the block cache, and the order in which slots will be wanted."""

import itertools
import random

import pytest
import torch

from nvme_offload import StateError
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.staging.mover import Mover
from nvme_offload.offload.staging.slot import Residency, Slot
from nvme_offload.offload.staging.use_order import UseOrder
from tests.support.training import nvme_tier

SIZE = 8192

FOLLOWS = {
    "unborn": {"dirty", "host", "on tier"},
    "host": {"unborn"},
    "on tier": {"reading", "staged", "dirty", "unborn"},
    "reading": {"staged", "on tier"},
    "staged": {"dirty", "on tier"},
    "dirty": {"writing", "unborn"},
    "writing": {"staged", "dirty"},
}


@pytest.fixture(params=["auto", "aiofiles"])
def staging(request, tmp_path):
    tier = nvme_tier(tmp_path, engine=request.param)
    machine = Mover("numbers", tier, BufferPool(2, SIZE))
    yield machine
    tier.close()
    machine.close()
    assert not list(tmp_path.iterdir())


def slot_of(staging, index, value=None):
    """A slot on the tier; with a value, the bytes are there and in a buffer."""
    slot = Slot(index, f"numbers {index}", SIZE, staging.tier.reserve([SIZE])[0])
    if value is not None:
        assert staging.lease(slot)
        slot.buffer.view(torch.uint8, 0, SIZE).fill_(value)
        slot.become(Residency.DIRTY)
        staging.start_write(slot)
        slot.transfer.wait()
        staging.settle(slot)
    return slot


def read_back(staging, slot):
    staging.start_read(slot)
    slot.transfer.operation.wait()
    staging.settle(slot)
    return slot.buffer.view(torch.uint8, 0, SIZE).unique().tolist()


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Residency, Residency)))
def test_the_table_of_transitions_is_enforced(before, after):
    slot = Slot(0, "numbers", SIZE, residency=before)
    if after.value in FOLLOWS[before.value]:
        slot.become(after)
        assert slot.residency is after
    else:
        with pytest.raises(StateError, match=rf"numbers: expected .*before {after.value}.* {before.value}"):
            slot.become(after)
        assert slot.residency is before


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_transfer_whose_handle_was_lost_is_waited_for(staging, monkeypatch, direction):
    """The engine took the operation, and an exception came before anybody had it."""
    slot = slot_of(staging, 0, value=7)
    if direction == "read":
        staging.give_up(slot)
        assert staging.lease(slot)
        slot.buffer.view(torch.uint8, 0, SIZE).fill_(9)
    else:
        slot.buffer.view(torch.uint8, 0, SIZE).fill_(8)
        slot.become(Residency.DIRTY)
    engine, submit, lost = staging.tier.engine, staging.tier.engine.submit, []

    def interrupted(op, segments):
        lost.append(submit(op, segments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            (staging.start_read if direction == "read" else staging.start_write)(slot)
    assert slot.transfer is None
    with pytest.raises(StateError):
        staging.give_up(slot)
    staging.recover()
    assert lost[0].done()
    if direction == "read":
        assert slot.residency is Residency.ON_TIER
        assert read_back(staging, slot) == [7]
    else:
        assert slot.residency is Residency.DIRTY
        staging.start_write(slot)
        slot.transfer.wait()
        staging.settle(slot)
        slot.buffer.view(torch.uint8, 0, SIZE).fill_(0)
        staging.give_up(slot)
        assert staging.lease(slot)
        assert read_back(staging, slot) == [8]


def test_a_forgotten_slot_leaves_nothing(staging):
    slot = slot_of(staging, 0, value=1)
    slot.become(Residency.DIRTY)
    staging.start_write(slot)
    staging.forget(slot)
    assert slot.residency is Residency.UNBORN
    assert staging.pool.num_free == 2


def train(order, uses, step, log=None):
    """One step of a training: `uses` outside it, `step` inside; counts in `log` how many were foreseen."""
    for block in uses:
        if log is not None:
            log.append(order.soonest(1) == [block])
        order.note(block)
    order.begin_step(step)
    for block in step:
        if log is not None:
            log.append(order.soonest(1) == [block])
        order.note_in_step(block)
    order.end_step(step[::-1])


LAYERS = list(range(6))
PASS = LAYERS + LAYERS[::-1]


def test_from_the_second_step_on_everything_is_foreseen():
    for uses in (PASS, PASS * 3, [0, 1, 1, 2, 2, 1, 1, 0], [*LAYERS, 4, 5, 4, 3, 3, 2, 1, 0]):
        order = UseOrder()
        blocks = sorted(set(uses))
        train(order, uses, blocks)
        log = []
        for step in range(1, 6):
            train(order, uses, blocks[::-1] if step % 2 else blocks, log)
        assert all(log)


def test_steps_are_announced_and_not_learnt():
    order = UseOrder()
    train(order, [0, 1], [1, 0])
    order.begin_step([0, 0, 1])
    assert list(order.upcoming())[:3] == [0, 0, 1]
    assert order.is_next_in_step(0)
    order.note_in_step(0)
    order.note_in_step(0)
    assert order.is_next_in_step(1)
    assert not order.is_next_in_step(0)


def test_the_step_after_this_pass_is_part_of_the_forecast():
    order = UseOrder()
    train(order, PASS, LAYERS)
    assert list(order.upcoming()) == [*PASS, *LAYERS[::-1]]


def test_it_finds_its_place_again_after_an_evaluation():
    order = UseOrder()
    for _ in range(2):
        train(order, PASS, LAYERS)
    for block in LAYERS * 4:  # generation: forwards alone
        order.note(block)
    foreseen = []
    for block in LAYERS:
        foreseen.append(order.soonest(1) == [block])
        order.note(block)
    assert all(foreseen), "forwards are learnt too"
    log = []
    train(order, PASS, LAYERS, log)
    assert log.count(False) <= 2
    log = []
    train(order, PASS, LAYERS, log)
    assert log.count(False) <= 1


def test_the_nearest_different_blocks_come_in_order():
    order = UseOrder()
    train(order, [0, 1, 1, 0, 2], [])
    assert order.soonest(2) == [0, 1]
    assert order.soonest(9) == [0, 1, 2]


def test_disorder_does_no_harm_and_the_record_stays_short():
    order, generator = UseOrder(), random.Random(0)
    for number in range(200_000):
        order.note(generator.randrange(5))
        if number % 1000 == 0:
            assert len(order.soonest(3)) <= 3
            order.begin_step([1, 2])
            order.end_step([2, 1])
    assert len(order._record) <= 1 << 16
    for _ in range(3):
        train(order, PASS, LAYERS)
    log = []
    train(order, PASS, LAYERS, log)
    assert all(log)
