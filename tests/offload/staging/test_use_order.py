"""What will be needed next: learnt in one period, right from the second on, and never in the way when it is wrong."""

import random

from nvme_offload.offload.staging.use_order import UseOrder


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


def test_nothing_is_foreseen_before_anything_was_seen():
    order = UseOrder()
    assert order.soonest(3) == []
    order.note(4)
    assert order.soonest(3) == []


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
