"""A drive that misbehaves: what can be repeated is not noticed, what cannot is said, and nothing is lost."""

import errno
import functools

import pytest
import torch

from nvme_offload import CorruptionError, FaultSpec, StateError, SwapIOError
from tests.support.engine_tools import available_engines
from tests.support.failing_drive import Failing, Op, flip_bit
from tests.support.pairs import each_value_once
from tests.support.training import BLOCK, Twin, assert_same_bits, faulty_drive, noted, params_of, set_grads, take_steps

SHAPES = [(BLOCK + 5,), (4 * BLOCK,), (9,)]
MIXED = (torch.bfloat16, torch.float16, torch.float32)
STEPS = 3
ENGINES = available_engines()


def make_faulty(make_adamw, faults, **options):
    params = params_of(SHAPES, *MIXED)
    with faulty_drive(faults) as tiers:
        optimizer = make_adamw(params, clip=1.0, block_size="128KiB", **options)
    return params, optimizer, tiers[0]


@pytest.fixture(scope="module")
def expected():
    params = params_of(SHAPES, *MIXED)
    twin = Twin(params, clip=1.0)
    for step in range(STEPS):
        set_grads(params, step)
        twin.step([p.grad for p in params])
    return twin


def all_buffers_are_accounted_for(optimizer):
    """After this, every buffer is free and every byte is on the drive."""
    pool, pipeline = optimizer.store.pool, optimizer.store.pipeline
    assert pool.num_free + len(pipeline.residents) == pool.num_buffers
    pipeline.drop_copies()
    return pool.num_free == pool.num_buffers


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 80), marks=pytest.mark.slow)], ids=str)
def test_what_can_be_repeated_is_not_noticed(make_adamw, expected, engine, seeds):
    retries = 0
    for seed in seeds:
        faults = FaultSpec(seed=seed, short=0.3, eintr=0.2, eagain=0.2, delay=0.05, reorder=0.2, max_delay_us=1000)
        options = {"engine": engine, "buffers": 2 + seed % 3, "sub_group_size": 1 if seed % 2 else 100_000}
        params, optimizer, tier = make_faulty(make_adamw, faults, **options)
        with noted(f"seed {seed}, {engine}"):
            take_steps(optimizer, params, *range(STEPS))
            expected.assert_equals(optimizer)
            assert all_buffers_are_accounted_for(optimizer)
        retries += tier.stats().retries
        optimizer.close()
    assert retries > 20


@pytest.mark.parametrize(("engine", "code"), each_value_once(ENGINES, ["eio", "enospc"]))
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 20), marks=pytest.mark.slow)], ids=str)
def test_what_cannot_be_repeated_is_said_and_nothing_is_lost(make_adamw, expected, engine, code, seeds):
    """finish_step() and synchronize() are called until they succeed: the result has the bits of a healthy drive."""
    num_errors = 0
    for seed in seeds:
        faults = FaultSpec(seed=seed, reorder=0.1, delay=0.05, max_delay_us=500, **{code: 0.1})
        params, optimizer, _ = make_faulty(make_adamw, faults, engine=engine, buffers=2 + seed % 3)

        persist = functools.partial(until_it_works, optimizer, code)
        with noted(f"seed {seed}, {engine}, {code}"):
            for step in range(STEPS):
                set_grads(params, step)
                num_errors += persist(optimizer.step)
            num_errors += persist(optimizer.synchronize)
            num_errors += persist(functools.partial(expected.assert_equals, optimizer))
            persist(functools.partial(all_buffers_are_accounted_for, optimizer))
            assert all_buffers_are_accounted_for(optimizer)
        optimizer.close()
    assert num_errors > 3


def until_it_works(optimizer, code, call):
    """The number of errors it took."""
    for attempt in range(1000):
        try:
            call()
        except SwapIOError as error:
            check_error(error, code)
            if optimizer.store.record is not None:
                call = optimizer.finish_step
        else:
            return attempt
    return pytest.fail("no end of errors")


def check_error(error, code):
    assert error.errno == {"eio": errno.EIO, "enospc": errno.ENOSPC}[code]
    assert error.path.name == "swap"
    assert error.offset % 4096 == 0
    assert 0 < error.size_bytes <= 131072
    for part in (str(error.path), f"offset {error.offset}", f"{error.size_bytes} bytes", errno.errorcode[error.errno]):
        assert part in str(error)
    assert "optimizer state of subgroup" in str(error)


def test_what_failed_before_the_cause_was_removed_is_not_reported_again(make_adamw, monkeypatch, expected):
    """The first failed write stops the step while others are under way that are going to fail as well."""
    faults = FaultSpec(seed=1, delay=1.0, max_delay_us=200_000)
    params, optimizer, tier = make_faulty(make_adamw, faults, buffers=4, sub_group_size=1)
    drive = Failing(tier, monkeypatch, Op.WRITE)
    set_grads(params, 0)
    with pytest.raises(SwapIOError):
        optimizer.step()
    assert sum(slot.transfer is not None for slot in optimizer.store.pipeline.residents) > 1
    drive.healthy = True
    optimizer.finish_step()
    take_steps(optimizer, params, *range(1, STEPS))
    expected.assert_equals(optimizer)


def test_an_iteration_ends_with_the_step_that_was_finished(make_adamw, monkeypatch):
    """What its timeline has is forgotten then, however many steps in a row are finished."""
    params, optimizer, tier = make_faulty(make_adamw, None, buffers=2)
    drive = Failing(tier, monkeypatch, Op.WRITE)
    lengths = []
    for step in range(8):
        drive.healthy = False
        set_grads(params, step)
        with pytest.raises(SwapIOError):
            optimizer.step()
        drive.healthy = True
        optimizer.finish_step()
        lengths.append(len(optimizer.timeline()))
    assert max(lengths[4:]) < 2 * max(lengths[1:4]), lengths


def test_a_step_does_not_wait_for_the_writes_of_the_one_before(make_adamw, monkeypatch):
    params, optimizer, _ = make_faulty(make_adamw, None)
    optimizer.place()
    set_grads(params, 0)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer.store.pipeline, "synchronize", lambda: pytest.fail("it waits"))
        for _ in range(2):
            optimizer.step()


def test_closing_does_not_care(make_adamw, monkeypatch, drive):
    params, optimizer, tier = make_faulty(make_adamw, None)
    optimizer.place()
    Failing(tier, monkeypatch, Op.WRITE, optimizer.stats().num_subgroups)
    take_steps(optimizer, params, 0)
    with pytest.raises(SwapIOError):
        optimizer.synchronize()
    optimizer.close()
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize("buffers", [2, 3, 8])
def test_state_is_rescued_from_a_drive_that_takes_no_more_writes(make_adamw, monkeypatch, expected, buffers):
    """Every staging buffer holds state that cannot be written; the rest can still be read."""
    params, optimizer, tier = make_faulty(make_adamw, None, buffers=buffers)
    take_steps(optimizer, params, *range(STEPS))
    optimizer.synchronize()
    Failing(tier, monkeypatch, Op.WRITE)
    pipeline = optimizer.store.pipeline
    for slot in pipeline.residents:
        pipeline.will_change(slot)
    with pytest.raises(SwapIOError):
        optimizer.synchronize()
    expected.assert_equals(optimizer)
    expected.assert_equals(optimizer)


@pytest.mark.parametrize("damaged", [False, True], ids=["unreadable", "of another checksum"])
def test_a_load_needs_nothing_of_what_it_replaces(make_adamw, monkeypatch, drive, damaged):
    params, optimizer, tier = make_faulty(make_adamw, None, buffers=2, checksums=True)
    take_steps(optimizer, params, 0)
    checkpoint = optimizer.state_dict()
    take_steps(optimizer, params, 1)
    if damaged:
        optimizer.synchronize()
        (file,) = drive.glob("*/swap")
        file.write_bytes(b"\xa5" * file.stat().st_size)
    else:
        Failing(tier, monkeypatch, Op.READ)  # for good: the old state cannot be read any more
    optimizer.load_state_dict(checkpoint)
    monkeypatch.undo()
    assert_same_bits(optimizer.state_dict()["state"], checkpoint["state"])


def test_a_flipped_bit_is_found_where_checksums_are_on(make_adamw, drive):
    params, optimizer, _ = make_faulty(make_adamw, None, buffers=2, checksums=True)
    take_steps(optimizer, params, *range(2))
    optimizer.synchronize()
    slot = next(slot for slot in optimizer.store.slots if slot.buffer is None)
    (stripe,) = slot.extent.stripes
    (file,) = drive.glob("*/swap")
    flip_bit(file, stripe.offset + slot.subgroup.size_bytes - 1)  # the smallest has 108 bytes; what follows is padding
    set_grads(params, 2)
    with pytest.raises(CorruptionError, match=rf"swap \({slot.name}: .* at offset .*\): checksum 0x"):
        optimizer.step()
    with pytest.raises(StateError, match="finish_step"):
        optimizer.step()


@pytest.mark.parametrize("nth", [1, 2, 3, 5])
def test_a_transfer_that_cannot_even_start_loses_nothing(make_adamw, monkeypatch, expected, nth):
    """A buffer into which nothing was read must not be taken for state."""
    params, optimizer, tier = make_faulty(make_adamw, None, buffers=3)
    take_steps(optimizer, params, 0)
    start, left = tier._start, [nth]

    def refuse_once(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise SwapIOError(errno.EMFILE, path="x", offset=0, size_bytes=1, direction="read")
        return start(*arguments)

    monkeypatch.setattr(tier, "_start", refuse_once)
    refused = 0
    for step in range(1, STEPS):
        set_grads(params, step)
        try:
            optimizer.step()
        except SwapIOError:
            refused += 1
            optimizer.finish_step()
    expected.assert_equals(optimizer)
    assert refused == 1
